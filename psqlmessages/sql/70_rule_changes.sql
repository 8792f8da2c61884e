-- Changes of rules: end the registrations, memberships and observations that no rule allows. If another transaction has
-- locked their rows, _unfinished and _recheck (10_rules.sql) list them, and housekeeping ends them later.

CREATE OR REPLACE FUNCTION messages._revoked_memberships(
    nodes bigint[]
)
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $$
    SELECT m.id
    FROM psqlmessages_membership AS m
    JOIN psqlmessages_client AS c ON c.id = m.client_id
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id
    CROSS JOIN LATERAL messages._permissions(c.role, c.ident, 'Topic', t.name) AS r
    WHERE m.client_id = ANY (nodes)
      AND NOT coalesce(CASE m.kind WHEN 'listen' THEN r.can_read ELSE r.can_write END, false)
    ORDER BY t.name, m.kind, m.id
$$;

COMMENT ON FUNCTION messages._revoked_memberships IS
    'Ids of the memberships of these nodes that no rule allows, in the order in which they are locked.';


CREATE OR REPLACE FUNCTION messages._revoked_observations(
    nodes bigint[]
)
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $$
    SELECT o.id
    FROM psqlmessages_observation AS o
    JOIN psqlmessages_client AS c ON c.id = o.client_id
    CROSS JOIN LATERAL messages._permissions(c.role, c.ident, 'Topic', o.pattern) AS r
    WHERE o.client_id = ANY (nodes) AND NOT coalesce(r.can_observe, false)
    ORDER BY o.id
$$;

COMMENT ON FUNCTION messages._revoked_observations IS
    'Ids of the observations of these nodes that no rule allows.';


CREATE OR REPLACE FUNCTION messages._apply_revocations(
    nodes bigint[],
    topics bigint[],
    former_rules psqlmessages_auth[],
    OUT events int,
    OUT locked_topics bigint[],
    OUT locked_nodes bigint[]
)
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_memberships bigint[] := ARRAY(SELECT messages._revoked_memberships(nodes));
    v_observations bigint[] := ARRAY(SELECT messages._revoked_observations(nodes));
    v_topics bigint[];
    v_rebuilt bigint[];
    v_id bigint;
    v_observation psqlmessages_observation;
    v_node record;
BEGIN
    events := 0;
    v_topics := ARRAY(
        SELECT m.topic_id FROM psqlmessages_membership AS m WHERE m.id = ANY (v_memberships)
        UNION
        SELECT t.id
        FROM psqlmessages_observation AS o
        CROSS JOIN LATERAL messages._topics_like(o.pattern) AS t (id)
        WHERE o.id = ANY (v_observations)
        UNION
        -- Rules also determine which subscribers a publish notifies.
        SELECT unnest(messages._subscribed_topics(nodes))
        UNION
        SELECT t.id FROM psqlmessages_topic AS t WHERE t.id = ANY (topics)
    );
    v_rebuilt := ARRAY(
        SELECT t.id FROM psqlmessages_topic AS t
        WHERE t.id = ANY (v_topics) ORDER BY t.name FOR NO KEY UPDATE SKIP LOCKED
    );
    FOR v_id IN
        SELECT m.id FROM psqlmessages_membership AS m JOIN psqlmessages_topic AS t ON t.id = m.topic_id
        WHERE m.id = ANY (v_memberships) ORDER BY t.name, m.kind, m.id FOR UPDATE OF m SKIP LOCKED
    LOOP
        events := events + messages._end_membership(v_id, 'revoke', true);
    END LOOP;
    FOR v_observation IN
        SELECT o.* FROM psqlmessages_observation AS o
        WHERE o.id = ANY (v_observations) ORDER BY o.id FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM psqlmessages_observation AS o WHERE o.id = v_observation.id;
        -- Only the observer gets this event.
        events := events + messages._send_event(
            ARRAY[v_observation.client_id], 'topic_unobserve',
            (SELECT c.ident FROM psqlmessages_client AS c WHERE c.id = v_observation.client_id),
            v_observation.pattern, NULL
        );
    END LOOP;
    locked_nodes := ARRAY(
        SELECT c.id FROM psqlmessages_client AS c
        WHERE c.id = ANY (nodes) AND NOT messages._has_rule(c.role, c.ident)
    );
    FOR v_node IN
        SELECT c.id, c.ident, c.session_id FROM psqlmessages_client AS c
        WHERE c.id = ANY (locked_nodes)
          AND NOT EXISTS (SELECT FROM psqlmessages_membership AS m WHERE m.client_id = c.id)
          AND NOT EXISTS (SELECT FROM psqlmessages_observation AS o WHERE o.client_id = c.id)
        ORDER BY c.ident FOR UPDATE SKIP LOCKED
    LOOP
        events := events + messages._send_node_event('disconnect', v_node.ident, true, former_rules);
        DELETE FROM psqlmessages_client AS c WHERE c.id = v_node.id;
        PERFORM messages._end_empty_sessions(ARRAY[v_node.session_id]);
        locked_nodes := array_remove(locked_nodes, v_node.id);
    END LOOP;
    PERFORM messages._rebuild_topics(v_rebuilt);
    locked_topics := ARRAY(
        SELECT t.id FROM unnest(v_topics) AS t (id) WHERE t.id <> ALL (v_rebuilt)
        UNION
        SELECT m.topic_id FROM psqlmessages_membership AS m WHERE m.id = ANY (v_memberships)
        UNION
        SELECT t.id
        FROM psqlmessages_observation AS o
        CROSS JOIN LATERAL messages._topics_like(o.pattern) AS t (id)
        WHERE o.id = ANY (v_observations)
    );
END
$$;

COMMENT ON FUNCTION messages._apply_revocations IS
    'End memberships, observations and registrations of these nodes that no rule allows, send their events, and rebuild these topics. former_rules: rules just removed, which still determine the receivers of events; events: their number; locked_topics, locked_nodes: the rest, because a transaction has locked their rows. Never waits.';


CREATE OR REPLACE FUNCTION messages._record_unfinished(
    topics bigint[],
    nodes bigint[],
    queues bigint[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF coalesce(cardinality(topics), 0) + coalesce(cardinality(nodes), 0) + coalesce(cardinality(queues), 0) = 0 THEN
        RETURN;
    END IF;
    INSERT INTO messages._unfinished (topic_id, client_id, queue_id)
    SELECT n.topic_id, n.client_id, n.queue_id
    FROM (
        SELECT t.id, NULL::bigint, NULL::bigint FROM unnest(topics) AS t (id)
        UNION ALL SELECT NULL, c.id, NULL FROM unnest(nodes) AS c (id)
        UNION ALL SELECT NULL, NULL, q.id FROM unnest(queues) AS q (id)
    ) AS n (topic_id, client_id, queue_id)
    WHERE NOT EXISTS (
        SELECT FROM messages._unfinished AS u
        WHERE u.topic_id = n.topic_id OR u.client_id = n.client_id OR u.queue_id = n.queue_id
    );
    -- Other sessions see the sequence from now on, and these rows after the commit.
    PERFORM pg_current_xact_id();
    PERFORM setval('messages._unfinished_xact', pg_snapshot_xmax(pg_current_snapshot())::text::bigint);
END
$$;

COMMENT ON FUNCTION messages._record_unfinished IS
    'Record topics, nodes and queues with locked rows: sends check the rules until housekeeping has updated them.';


CREATE OR REPLACE FUNCTION messages._refresh_membership_timeouts(
    nodes bigint[]
)
RETURNS void
LANGUAGE sql
AS $$
    UPDATE psqlmessages_membership AS m
    SET timeout = r.timeout
    FROM psqlmessages_client AS c, psqlmessages_topic AS t,
        LATERAL messages._permissions(c.role, c.ident, 'Topic', t.name) AS r
    WHERE m.id = ANY (ARRAY(
            SELECT l.id
            FROM psqlmessages_membership AS l
            JOIN psqlmessages_client AS n ON n.id = l.client_id
            JOIN psqlmessages_topic AS o ON o.id = l.topic_id
            CROSS JOIN LATERAL messages._permissions(n.role, n.ident, 'Topic', o.name) AS e
            WHERE l.client_id = ANY (nodes) AND l.timeout <> e.timeout
            FOR NO KEY UPDATE OF l SKIP LOCKED
        ))
      AND c.id = m.client_id AND t.id = m.topic_id AND m.timeout <> r.timeout
$$;

COMMENT ON FUNCTION messages._refresh_membership_timeouts IS
    'Copy changed timeouts from the rules to the memberships of these nodes, because sends read them there. Never waits.';


-- The newest row has the checksum of the role memberships that housekeeping has applied last. Each change adds a row,
-- because an open transaction may have locked the previous one.
CREATE TABLE IF NOT EXISTS messages._role_memberships (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sum numeric NOT NULL
);


CREATE OR REPLACE FUNCTION messages._role_membership_checksum()
RETURNS numeric
LANGUAGE plpgsql
AS $$
BEGIN
    -- Includes the names of groups, because rules name them and they may be renamed; and superusers, because they are
    -- members of every role.
    RETURN (
        SELECT coalesce(sum(hashtextextended(m.membership, 0)), 0)
        FROM (
            -- The whole row as text: since PostgreSQL 16 it has the option to inherit.
            SELECT g.rolname || ' ' || m::text || ' ' || l.rolinherit AS membership
            FROM pg_catalog.pg_auth_members AS m
            JOIN pg_catalog.pg_roles AS g ON g.oid = m.roleid
            JOIN pg_catalog.pg_roles AS l ON l.oid = m.member
            UNION ALL
            SELECT 'superuser ' || r.oid FROM pg_catalog.pg_roles AS r WHERE r.rolsuper
        ) AS m
    );
END
$$;

COMMENT ON FUNCTION messages._role_membership_checksum IS
    'Checksum of all role memberships.';


CREATE OR REPLACE FUNCTION messages._apply_role_membership_changes(
    is_commit boolean DEFAULT false
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_sum numeric := messages._role_membership_checksum();
BEGIN
    IF v_sum IS DISTINCT FROM (SELECT k.sum FROM messages._role_memberships AS k ORDER BY k.id DESC LIMIT 1) THEN
        INSERT INTO messages._role_memberships (sum) VALUES (v_sum);
        DELETE FROM messages._role_memberships AS k WHERE k.id IN (
            SELECT o.id FROM messages._role_memberships AS o ORDER BY o.id DESC OFFSET 1 FOR UPDATE SKIP LOCKED
        );
        -- Check only nodes with rules for other roles than their own.
        INSERT INTO messages._recheck (idents, channels) VALUES (
            ARRAY(
                SELECT DISTINCT a.ident::text
                FROM psqlmessages_client AS c
                CROSS JOIN LATERAL unnest(messages._patterns(c.ident)) AS p (pattern)
                JOIN psqlmessages_auth AS a ON a.ident = p.pattern AND a.role <> c.role
            ),
            (SELECT coalesce(jsonb_object_agg(q.name, q.channel), '{}') FROM psqlmessages_queue AS q)
        );
        PERFORM messages._record_unfinished(NULL, NULL, messages._replace_queue_channels());
    END IF;
    RETURN messages._finish_rule_changes(is_commit);
END
$$;

COMMENT ON FUNCTION messages._apply_role_membership_changes IS
    'Apply GRANT and REVOKE of group roles, which fire no trigger: a checksum of all role memberships shows them. Then finish changes of rules. is_commit: as in _finish_rule_changes. Returns the number of events.';


CREATE OR REPLACE FUNCTION messages._finish_rule_changes(
    is_commit boolean DEFAULT false
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_now float8 := date_part('epoch', clock_timestamp());
    v_rechecks bigint[] := ARRAY(SELECT r.id FROM messages._recheck AS r);
    v_unfinished bigint[] := ARRAY(SELECT u.id FROM messages._unfinished AS u);
    v_snapshot pg_snapshot;
    v_topic_names text[];
    v_idents text[];
    v_are_created boolean;
    v_topics bigint[];
    v_nodes bigint[];
    v_locked_queues bigint[];
    v_done bigint[];
    v_result record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN 0;
    ELSIF v_rechecks = '{}' AND v_unfinished = '{}' THEN
        IF NOT messages._rules_are_applied() THEN
            PERFORM messages._mark_rules_applied_if_finished();
        END IF;
        RETURN 0;
    -- A time more than two seconds ahead was stored before the clock was set back. New changes of rules never wait.
    ELSIF pg_sequence_last_value('messages._rechecks_paused_until') BETWEEN v_now AND v_now + 2
        AND NOT EXISTS (SELECT FROM messages._recheck AS r WHERE r.horizon IS NULL)
    THEN
        RETURN 0;
    END IF;
    -- Taken after reading these rows, and before reading the rows that they name.
    v_snapshot := pg_current_snapshot();
    v_topic_names := ARRAY(
        SELECT DISTINCT n.name FROM messages._recheck AS r CROSS JOIN LATERAL unnest(r.topics) AS n (name)
        JOIN psqlmessages_auth AS a ON a.type = 'Topic' AND a.dest = n.name
        WHERE r.id = ANY (v_rechecks)
    );
    v_are_created := CASE WHEN v_topic_names = '{}' THEN true ELSE messages._try_create_topics(v_topic_names) END;
    v_topics := ARRAY(
        SELECT u.topic_id FROM messages._unfinished AS u WHERE u.id = ANY (v_unfinished) AND u.topic_id IS NOT NULL
        UNION
        -- A topic may lack a node that began to observe it while it was being created.
        SELECT t.id FROM psqlmessages_topic AS t WHERE t.name = ANY (v_topic_names)
    );
    IF NOT EXISTS (SELECT FROM messages._recheck AS r WHERE r.id = ANY (v_rechecks) AND r.idents IS NULL) THEN
        v_idents := ARRAY(
            SELECT DISTINCT i.ident FROM messages._recheck AS r
            CROSS JOIN LATERAL unnest(r.idents) AS i (ident) WHERE r.id = ANY (v_rechecks)
        );
    END IF;
    v_nodes := ARRAY(
        SELECT unnest(messages._nodes_matching(v_idents))
        UNION
        SELECT u.client_id FROM messages._unfinished AS u WHERE u.id = ANY (v_unfinished) AND u.client_id IS NOT NULL
        UNION
        SELECT m.client_id FROM psqlmessages_membership AS m WHERE m.topic_id = ANY (v_topics)
        UNION
        SELECT o.client_id FROM psqlmessages_topic AS t
        JOIN psqlmessages_observation AS o ON o.pattern = ANY (messages._patterns(t.name))
        WHERE t.id = ANY (v_topics)
    );
    -- Checks of many nodes would slow down all sessions, so pause them. setval is not rolled back, so the caller's
    -- transaction must not fail.
    IF is_commit AND cardinality(v_nodes) > 100 THEN
        PERFORM setval('messages._rechecks_paused_until', date_part('epoch', clock_timestamp())::bigint + 1);
    END IF;
    SELECT * INTO v_result FROM messages._apply_revocations(v_nodes, v_topics, '{}');
    PERFORM messages._refresh_membership_timeouts(v_nodes);
    v_locked_queues := messages._replace_queue_channels(ARRAY(
        SELECT u.queue_id FROM messages._unfinished AS u WHERE u.id = ANY (v_unfinished) AND u.queue_id IS NOT NULL
    ));
    PERFORM messages._record_unfinished(v_result.locked_topics, v_result.locked_nodes, v_locked_queues);
    DELETE FROM messages._unfinished AS u WHERE u.id = ANY (ARRAY(
        SELECT d.id FROM messages._unfinished AS d
        WHERE d.id = ANY (v_unfinished)
          AND coalesce(d.topic_id <> ALL (v_result.locked_topics), true)
          AND coalesce(d.client_id <> ALL (v_result.locked_nodes), true)
          AND coalesce(d.queue_id <> ALL (v_locked_queues), true)
        FOR UPDATE SKIP LOCKED
    ));
    -- The checks of a row are done when no transaction runs that may have read the old rules.
    v_done := ARRAY(
        SELECT d.id FROM messages._recheck AS d
        WHERE d.id = ANY (v_rechecks) AND d.horizon <= pg_snapshot_xmin(v_snapshot)
          AND (v_are_created OR d.topics IS NULL)
        FOR UPDATE SKIP LOCKED
    );
    IF EXISTS (SELECT FROM messages._recheck AS r WHERE r.id = ANY (v_done) AND r.channels IS NOT NULL) THEN
        -- Replace channels once again: there may be new queues, and readers that began to LISTEN on a former channel.
        PERFORM messages._record_unfinished(NULL, NULL, messages._replace_queue_channels());
        PERFORM messages._notify_queue_readers(c.value, c.key, 'moved')
        FROM messages._recheck AS r CROSS JOIN LATERAL jsonb_each_text(r.channels) AS c WHERE r.id = ANY (v_done);
    END IF;
    DELETE FROM messages._recheck AS r WHERE r.id = ANY (v_done);
    -- Repeat the checks of new rows until all transactions that run now have ended.
    UPDATE messages._recheck AS r SET horizon = pg_snapshot_xmax(v_snapshot) WHERE r.id = ANY (ARRAY(
        SELECT n.id FROM messages._recheck AS n
        WHERE n.id = ANY (v_rechecks) AND n.horizon IS NULL FOR UPDATE SKIP LOCKED
    ));
    RETURN v_result.events;
END
$$;

COMMENT ON FUNCTION messages._finish_rule_changes IS
    'Finish changes of rules: update the rows listed in _unfinished, and check the nodes of _recheck again as long as a transaction may run that has read the old rules. Works even if another transaction has locked rows of these two tables. is_commit: whether this is the commit of a transaction that nothing can delay; then more than 100 nodes are not checked again for a second. Returns the number of events. Never waits.';


CREATE OR REPLACE FUNCTION messages._mark_rules_applied_if_finished()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_snapshot pg_snapshot := pg_current_snapshot();
    v_is_empty boolean := NOT EXISTS (SELECT FROM messages._unfinished);
    v_last_xact bigint := pg_sequence_last_value('messages._unfinished_xact');
BEGIN
    -- All transactions that wrote a row have ended, and no row is left. If a row is written at this moment, the next
    -- housekeeping sets the value again. A transaction id ahead of the current ones is from a restored dump.
    IF v_is_empty AND (
        v_last_xact <= pg_snapshot_xmin(v_snapshot)::text::bigint
        OR v_last_xact > pg_snapshot_xmax(pg_current_snapshot())::text::bigint
    ) THEN
        -- With false, the sequence has no last value, which _rules_are_applied tests.
        PERFORM setval('messages._unfinished_xact', v_last_xact, false);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._mark_rules_applied_if_finished IS
    'Make _rules_are_applied true if no change of rules is unfinished: sends then use the stored rows without checking rules.';


CREATE OR REPLACE FUNCTION messages._try_create_topics(
    names text[]
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_lock_timeout text := current_setting('lock_timeout');
    v_are_created boolean := true;
    v_name text;
BEGIN
    -- An open transaction may be creating one of them.
    PERFORM set_config('lock_timeout', least(200, messages._remaining_lock_wait_ms())::text, true);
    BEGIN
        PERFORM messages._make_topics(names);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        PERFORM set_config('lock_timeout', '1', true);
        FOREACH v_name IN ARRAY names LOOP
            BEGIN
                PERFORM messages._make_topics(ARRAY[v_name]);
            EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                v_are_created := false;
            END;
        END LOOP;
    END;
    PERFORM set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_are_created;
END
$$;

COMMENT ON FUNCTION messages._try_create_topics IS
    'Create topics, unless they exist; false if an open transaction is creating one of them.';


CREATE OR REPLACE FUNCTION messages._apply_rule_changes(
    former_rules psqlmessages_auth[],
    idents text[],
    topics text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_are_created boolean := CASE WHEN topics IS NULL THEN true ELSE messages._try_create_topics(topics) END;
    v_channels jsonb;
    v_locked_queues bigint[];
    v_nodes bigint[];
    v_revoked bigint[];
    v_deadline timestamp with time zone;
    v_result record;
BEGIN
    IF EXISTS (SELECT FROM unnest(former_rules) AS f WHERE f.type = 'Queue') OR idents IS NULL THEN
        v_channels := (SELECT coalesce(jsonb_object_agg(q.name, q.channel), '{}') FROM psqlmessages_queue AS q);
        v_locked_queues := messages._replace_queue_channels();
    END IF;
    v_nodes := messages._nodes_matching(idents);
    IF v_nodes <> '{}' THEN
        v_revoked := ARRAY(
            SELECT c.id FROM psqlmessages_client AS c
            WHERE c.id = ANY (v_nodes) AND NOT messages._has_rule(c.role, c.ident)
            UNION
            SELECT m.client_id FROM messages._revoked_memberships(v_nodes) AS l (id)
            JOIN psqlmessages_membership AS m ON m.id = l.id
            UNION
            SELECT o.client_id FROM messages._revoked_observations(v_nodes) AS l (id)
            JOIN psqlmessages_observation AS o ON o.id = l.id
        );
        IF v_revoked <> '{}' THEN
            -- Poll for the locks of their rows: lock_timeout would limit each wait, not their sum. After the deadline,
            -- continue without the rows that other transactions have locked.
            v_deadline := clock_timestamp() + make_interval(secs => messages._remaining_lock_wait_ms() / 1000.0);
            WHILE NOT messages._try_lock_nodes(v_revoked) AND clock_timestamp() < v_deadline LOOP
                PERFORM pg_sleep(0.01);
            END LOOP;
        END IF;
        SELECT * INTO v_result
        FROM messages._apply_revocations(v_revoked, messages._subscribed_topics(v_nodes), former_rules);
        PERFORM messages._refresh_membership_timeouts(v_nodes);
        PERFORM messages._record_unfinished(v_result.locked_topics, v_result.locked_nodes, NULL);
    END IF;
    PERFORM messages._record_unfinished(NULL, NULL, v_locked_queues);
    -- Without the rules lock, or in an older snapshot, other nodes and members may exist that are not visible here.
    IF NOT v_are_created OR NOT messages._holds_rules_lock()
        OR current_setting('transaction_isolation') <> 'read committed'
    THEN
        INSERT INTO messages._recheck (idents, topics, channels) VALUES (idents, topics, v_channels);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._apply_rule_changes IS
    'Apply changed rules: create topics, end what no rule allows, and replace the channels of queues. former_rules: rules as they were before; idents: the names and patterns of nodes in changed rules, null for all; topics: those to create, or null.';


CREATE OR REPLACE FUNCTION messages._nodes_matching(
    idents text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN ARRAY(
        SELECT c.id FROM psqlmessages_client AS c
        WHERE idents IS NULL OR EXISTS (
            SELECT FROM unnest(messages._patterns(c.ident)) AS p (pattern) WHERE p.pattern = ANY (idents)
        )
    );
END
$$;

COMMENT ON FUNCTION messages._nodes_matching IS
    'The connected nodes that match these names and patterns; all if null.';


CREATE OR REPLACE FUNCTION messages._before_rules_change()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._lock_rules();
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._before_rules_change IS
    'Trigger before each statement that changes rules: lock the rules.';


CREATE OR REPLACE FUNCTION messages._after_rules_change()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_former_rules psqlmessages_auth[] := '{}';
    v_idents text[];
    v_topics text[];
BEGIN
    IF TG_OP IN ('UPDATE', 'DELETE') THEN
        SELECT array_agg(o::psqlmessages_auth), array_agg(DISTINCT o.ident::text)
        INTO v_former_rules, v_idents FROM old_rules AS o;
    END IF;
    IF TG_OP IN ('INSERT', 'UPDATE') THEN
        SELECT v_idents || array_agg(DISTINCT n.ident::text),
               array_agg(DISTINCT n.dest::text) FILTER (WHERE n.type = 'Topic' AND right(n.dest, 1) <> '*')
        INTO v_idents, v_topics FROM new_rules AS n;
    END IF;
    -- A statement that changes no row needs nothing; TRUNCATE may affect all nodes.
    IF v_idents IS NOT NULL OR TG_OP = 'TRUNCATE' THEN
        PERFORM messages._apply_rule_changes(v_former_rules, v_idents, v_topics);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._after_rules_change IS
    'Trigger after each statement that changes rules: apply the changes.';


-- role_identity: the role for which a rule was saved, because another role may get this name later. The Django model
-- does not have this column, and permission checks do not read it.
DO $$
BEGIN
    -- ADD COLUMN IF NOT EXISTS would block all readers of rules in each installation.
    IF NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = 'psqlmessages_auth'::regclass AND a.attname = 'role_identity'
    ) THEN
        ALTER TABLE psqlmessages_auth ADD COLUMN role_identity text;
    END IF;
END
$$;


CREATE OR REPLACE FUNCTION messages._store_role_identity()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    NEW.role_identity := (
        SELECT r.oid || ' ' || messages._database_identity() FROM pg_catalog.pg_roles AS r WHERE r.rolname = NEW.role
    );
    RETURN NEW;
END
$$;

COMMENT ON FUNCTION messages._store_role_identity IS
    'Trigger: store the oid of the role and the identity of this database in the rule; null if there is no such role.';


CREATE OR REPLACE TRIGGER note_role
BEFORE INSERT OR UPDATE ON psqlmessages_auth
FOR EACH ROW EXECUTE FUNCTION messages._store_role_identity();

CREATE OR REPLACE TRIGGER rules_change
BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON psqlmessages_auth
FOR EACH STATEMENT EXECUTE FUNCTION messages._before_rules_change();

CREATE OR REPLACE TRIGGER rules_inserted
AFTER INSERT ON psqlmessages_auth
REFERENCING NEW TABLE AS new_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._after_rules_change();

CREATE OR REPLACE TRIGGER rules_updated
AFTER UPDATE ON psqlmessages_auth
REFERENCING OLD TABLE AS old_rules NEW TABLE AS new_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._after_rules_change();

CREATE OR REPLACE TRIGGER rules_deleted
AFTER DELETE ON psqlmessages_auth
REFERENCING OLD TABLE AS old_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._after_rules_change();

CREATE OR REPLACE TRIGGER rules_truncated
AFTER TRUNCATE ON psqlmessages_auth
FOR EACH STATEMENT EXECUTE FUNCTION messages._after_rules_change();


CREATE OR REPLACE FUNCTION messages._disconnect(
    ident text
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_node bigint;
BEGIN
    PERFORM messages._share_rules_lock();
    SELECT c.id INTO v_node FROM psqlmessages_client AS c WHERE c.ident = _disconnect.ident;
    IF v_node IS NULL THEN
        RETURN false;
    END IF;
    PERFORM messages._end_node(v_node, 'disconnect', true);
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._disconnect IS
    'For the administrator: disconnect a node of any session. Other nodes of the session stay connected. False if the node is not connected.';
