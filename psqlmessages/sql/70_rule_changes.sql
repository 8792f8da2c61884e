-- Revocation: find and end registrations and memberships without a rule, now or when their rows are unlocked.

CREATE OR REPLACE FUNCTION messages._lost_memberships(
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

COMMENT ON FUNCTION messages._lost_memberships IS
    'The listening and sending of these nodes without a rule.';


CREATE OR REPLACE FUNCTION messages._lost_observations(
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

COMMENT ON FUNCTION messages._lost_observations IS
    'The observations of these nodes without a rule.';


CREATE OR REPLACE FUNCTION messages._end_lost_nodes(
    nodes bigint[],
    former psqlmessages_auth[],
    OUT events int,
    OUT left_nodes bigint[]
)
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_lost bigint[];
    v_ended bigint[] := '{}';
    v_node record;
BEGIN
    events := 0;
    v_lost := ARRAY(
        SELECT c.id FROM psqlmessages_client AS c
        WHERE c.id = ANY (nodes) AND NOT messages._has_rule(c.role, c.ident)
    );
    FOR v_node IN
        SELECT c.id, c.ident, c.session_id FROM psqlmessages_client AS c
        WHERE c.id = ANY (v_lost)
          AND NOT EXISTS (SELECT FROM psqlmessages_membership AS m WHERE m.client_id = c.id)
          AND NOT EXISTS (SELECT FROM psqlmessages_observation AS o WHERE o.client_id = c.id)
        ORDER BY c.ident FOR UPDATE SKIP LOCKED
    LOOP
        events := events + messages._send_node_event('disconnect', v_node.ident, true, former);
        DELETE FROM psqlmessages_client AS c WHERE c.id = v_node.id;
        PERFORM messages._end_empty_sessions(ARRAY[v_node.session_id]);
        v_ended := v_ended || v_node.id;
    END LOOP;
    left_nodes := ARRAY(SELECT l.id FROM unnest(v_lost) AS l (id) WHERE l.id <> ALL (v_ended));
END
$$;

COMMENT ON FUNCTION messages._end_lost_nodes IS
    'Disconnect those of these nodes that no rule names. left_nodes: those with locked rows. Never waits.';


CREATE OR REPLACE FUNCTION messages._settle(
    nodes bigint[],
    topics bigint[],
    former psqlmessages_auth[],
    OUT events int,
    OUT left_topics bigint[],
    OUT left_nodes bigint[]
)
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_memberships bigint[] := ARRAY(SELECT messages._lost_memberships(nodes));
    v_observations bigint[] := ARRAY(SELECT messages._lost_observations(nodes));
    v_topics bigint[];
    v_locked bigint[];
    v_id bigint;
    v_observation psqlmessages_observation;
    v_nodes record;
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
        -- Rules also determine the sessions that publish wakes.
        SELECT unnest(messages._subscribed_topics(nodes))
        UNION
        SELECT t.id FROM psqlmessages_topic AS t WHERE t.id = ANY (topics)
    );
    v_locked := ARRAY(
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
    SELECT * INTO v_nodes FROM messages._end_lost_nodes(nodes, former);
    events := events + v_nodes.events;
    left_nodes := v_nodes.left_nodes;
    PERFORM messages._rebuild_topics(v_locked);
    left_topics := ARRAY(
        SELECT l.id FROM unnest(v_topics) AS l (id) WHERE l.id <> ALL (v_locked)
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

COMMENT ON FUNCTION messages._settle IS
    'End memberships, observations and registrations of these nodes that no rule allows, with their events, and rebuild these topics. former: rules just removed, for the audience. left_topics, left_nodes: those with locked rows. Never waits.';


CREATE OR REPLACE FUNCTION messages._note_unfinished(
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
    -- From now on sends check the rules, and after the commit these rows.
    PERFORM pg_current_xact_id();
    PERFORM setval('messages._unfinished_xact', pg_snapshot_xmax(pg_current_snapshot())::text::bigint);
END
$$;

COMMENT ON FUNCTION messages._note_unfinished IS
    'Let sends check the rules for these, until housekeeping has finished the change.';


CREATE OR REPLACE FUNCTION messages._refresh_timeouts(
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

COMMENT ON FUNCTION messages._refresh_timeouts IS
    'Update the timeouts that sends read from the rules. Never waits.';


-- Checksums of all role memberships; the newest row was processed last. Each change adds a row, because an open
-- transaction may have locked the previous one.
CREATE TABLE IF NOT EXISTS messages._role_memberships (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sum numeric NOT NULL
);


CREATE OR REPLACE FUNCTION messages._role_membership_sum()
RETURNS numeric
LANGUAGE plpgsql
AS $$
BEGIN
    -- With names, because rules name groups, which may be renamed. A superuser is a member of every role.
    RETURN (
        SELECT coalesce(sum(hashtextextended(m.membership, 0)), 0)
        FROM (
            -- m as text: inheritance is an option of the membership since PostgreSQL 16.
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

COMMENT ON FUNCTION messages._role_membership_sum IS
    'Checksum of all role memberships.';


CREATE OR REPLACE FUNCTION messages._follow_role_memberships(
    is_commit boolean DEFAULT false
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_sum numeric := messages._role_membership_sum();
BEGIN
    IF v_sum IS DISTINCT FROM (SELECT k.sum FROM messages._role_memberships AS k ORDER BY k.id DESC LIMIT 1) THEN
        INSERT INTO messages._role_memberships (sum) VALUES (v_sum);
        DELETE FROM messages._role_memberships AS k WHERE k.id IN (
            SELECT o.id FROM messages._role_memberships AS o ORDER BY o.id DESC OFFSET 1 FOR UPDATE SKIP LOCKED
        );
        -- Only nodes with rules for other roles than their own.
        INSERT INTO messages._recheck (idents, channels) VALUES (
            ARRAY(
                SELECT DISTINCT a.ident::text
                FROM psqlmessages_client AS c
                CROSS JOIN LATERAL unnest(messages._patterns(c.ident)) AS p (pattern)
                JOIN psqlmessages_auth AS a ON a.ident = p.pattern AND a.role <> c.role
            ),
            messages._queue_channels()
        );
        PERFORM messages._note_unfinished(NULL, NULL, messages._move_channels());
    END IF;
    RETURN messages._recheck_rules(is_commit);
END
$$;

COMMENT ON FUNCTION messages._follow_role_memberships IS
    'Follow GRANT and REVOKE of group roles, which fire no trigger: compare a checksum of all role memberships. Then repeat the checks of _recheck_rules. Returns the number of events.';


CREATE OR REPLACE FUNCTION messages._rechecks_rest()
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_now float8 := date_part('epoch', clock_timestamp());
BEGIN
    -- A time further ahead was stored before the clock was put back. New changes of rules are checked without delay.
    RETURN coalesce(pg_sequence_last_value('messages._rechecks_rest_until') BETWEEN v_now AND v_now + 2, false)
        AND NOT EXISTS (SELECT FROM messages._recheck AS r WHERE r.horizon IS NULL);
END
$$;

COMMENT ON FUNCTION messages._rechecks_rest IS
    'Whether a commit has just checked many nodes, and no change of rules is new.';


CREATE OR REPLACE FUNCTION messages._recheck_rules(
    is_commit boolean DEFAULT false
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_rechecks bigint[] := ARRAY(SELECT r.id FROM messages._recheck AS r);
    v_unfinished bigint[] := ARRAY(SELECT u.id FROM messages._unfinished AS u);
    v_snapshot pg_snapshot;
    v_names text[];
    v_idents text[];
    v_are_made boolean := true;
    v_topics bigint[];
    v_nodes bigint[];
    v_queues bigint[];
    v_done bigint[];
    v_settled record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN 0;
    ELSIF v_rechecks = '{}' AND v_unfinished = '{}' THEN
        IF NOT messages._rules_are_applied() THEN
            PERFORM messages._note_settled();
        END IF;
        RETURN 0;
    ELSIF messages._rechecks_rest() THEN
        RETURN 0;
    END IF;
    -- After these rows were read, and before the rows that they name are.
    v_snapshot := pg_current_snapshot();
    v_names := ARRAY(
        SELECT DISTINCT n.name FROM messages._recheck AS r CROSS JOIN LATERAL unnest(r.topics) AS n (name)
        JOIN psqlmessages_auth AS a ON a.type = 'Topic' AND a.dest = n.name
        WHERE r.id = ANY (v_rechecks)
    );
    IF v_names <> '{}' THEN
        v_are_made := messages._make_ruled_topics(v_names);
    END IF;
    v_topics := ARRAY(
        SELECT u.topic_id FROM messages._unfinished AS u WHERE u.id = ANY (v_unfinished) AND u.topic_id IS NOT NULL
        UNION
        -- A node may have observed a new topic before others could see it.
        SELECT t.id FROM psqlmessages_topic AS t WHERE t.name = ANY (v_names)
    );
    IF NOT EXISTS (SELECT FROM messages._recheck AS r WHERE r.id = ANY (v_rechecks) AND r.idents IS NULL) THEN
        v_idents := ARRAY(
            SELECT DISTINCT i.ident FROM messages._recheck AS r
            CROSS JOIN LATERAL unnest(r.idents) AS i (ident) WHERE r.id = ANY (v_rechecks)
        );
    END IF;
    v_nodes := ARRAY(
        SELECT unnest(messages._nodes_named(v_idents))
        UNION
        SELECT u.client_id FROM messages._unfinished AS u WHERE u.id = ANY (v_unfinished) AND u.client_id IS NOT NULL
        UNION
        SELECT m.client_id FROM psqlmessages_membership AS m WHERE m.topic_id = ANY (v_topics)
        UNION
        SELECT o.client_id FROM psqlmessages_topic AS t
        JOIN psqlmessages_observation AS o ON o.pattern = ANY (messages._patterns(t.name))
        WHERE t.id = ANY (v_topics)
    );
    -- Many nodes would slow down all sessions. Only in a commit that is certain to end, as setval is not rolled back.
    IF is_commit AND cardinality(v_nodes) > 100 THEN
        PERFORM setval('messages._rechecks_rest_until', date_part('epoch', clock_timestamp())::bigint + 1);
    END IF;
    SELECT * INTO v_settled FROM messages._settle(v_nodes, v_topics, '{}');
    PERFORM messages._refresh_timeouts(v_nodes);
    v_queues := messages._move_channels(ARRAY(
        SELECT u.queue_id FROM messages._unfinished AS u WHERE u.id = ANY (v_unfinished) AND u.queue_id IS NOT NULL
    ));
    PERFORM messages._note_unfinished(v_settled.left_topics, v_settled.left_nodes, v_queues);
    DELETE FROM messages._unfinished AS u WHERE u.id = ANY (ARRAY(
        SELECT d.id FROM messages._unfinished AS d
        WHERE d.id = ANY (v_unfinished)
          AND coalesce(d.topic_id <> ALL (v_settled.left_topics), true)
          AND coalesce(d.client_id <> ALL (v_settled.left_nodes), true)
          AND coalesce(d.queue_id <> ALL (v_queues), true)
        FOR UPDATE SKIP LOCKED
    ));
    v_done := ARRAY(
        SELECT d.id FROM messages._recheck AS d
        WHERE d.id = ANY (v_rechecks) AND d.horizon <= pg_snapshot_xmin(v_snapshot)
          AND (v_are_made OR d.topics IS NULL)
        FOR UPDATE SKIP LOCKED
    );
    IF EXISTS (SELECT FROM messages._recheck AS r WHERE r.id = ANY (v_done) AND r.channels IS NOT NULL) THEN
        -- Repeat it: there may be new queues, and readers that listened on a channel after it had changed.
        PERFORM messages._note_unfinished(NULL, NULL, messages._move_channels());
        PERFORM messages._notify_readers(c.value, c.key, 'moved')
        FROM messages._recheck AS r CROSS JOIN LATERAL jsonb_each_text(r.channels) AS c WHERE r.id = ANY (v_done);
    END IF;
    DELETE FROM messages._recheck AS r WHERE r.id = ANY (v_done);
    UPDATE messages._recheck AS r SET horizon = pg_snapshot_xmax(v_snapshot) WHERE r.id = ANY (ARRAY(
        SELECT n.id FROM messages._recheck AS n
        WHERE n.id = ANY (v_rechecks) AND n.horizon IS NULL FOR UPDATE SKIP LOCKED
    ));
    RETURN v_settled.events;
END
$$;

COMMENT ON FUNCTION messages._recheck_rules IS
    'Finish changes of rules that open transactions delayed, and check nodes again while a transaction may run that has read the old rules. Returns the number of events. Locks on _recheck and _unfinished do not stop this. is_commit: the commit is certain to end; then many nodes are not checked again for about a second. Never waits.';


CREATE OR REPLACE FUNCTION messages._note_settled()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_snapshot pg_snapshot := pg_current_snapshot();
    v_is_empty boolean := NOT EXISTS (SELECT FROM messages._unfinished);
    v_last bigint := pg_sequence_last_value('messages._unfinished_xact');
BEGIN
    -- All transactions that wrote a row have ended, and no row is left. If a row is written at this moment, the next
    -- housekeeping sets the value again. A transaction id from the future came with a dump.
    IF v_is_empty AND (
        v_last <= pg_snapshot_xmin(v_snapshot)::text::bigint
        OR v_last > pg_snapshot_xmax(pg_current_snapshot())::text::bigint
    ) THEN
        PERFORM setval('messages._unfinished_xact', v_last, false);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._note_settled IS
    'Let sends trust the stored rows again, if no change of rules is unfinished.';


CREATE OR REPLACE FUNCTION messages._rules_have_work()
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN NOT messages._rules_are_applied()
        OR EXISTS (SELECT FROM messages._recheck)
        OR EXISTS (SELECT FROM messages._unfinished)
        OR messages._role_membership_sum() IS DISTINCT FROM (
            SELECT k.sum FROM messages._role_memberships AS k ORDER BY k.id DESC LIMIT 1
        );
END
$$;

COMMENT ON FUNCTION messages._rules_have_work IS
    'Whether _follow_role_memberships has anything to write.';


-- Changes of rules: make the topics that they name, and end without delay what they forbid.

CREATE OR REPLACE FUNCTION messages._make_ruled_topics(
    names text[]
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_timeout text := current_setting('lock_timeout');
    v_are_made boolean := true;
    v_name text;
BEGIN
    -- An open transaction may be making one of them.
    PERFORM set_config('lock_timeout', least(200, messages._remaining_lock_wait_ms())::text, true);
    BEGIN
        PERFORM messages._make_topics(names);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        PERFORM set_config('lock_timeout', '1', true);
        FOREACH v_name IN ARRAY names LOOP
            BEGIN
                PERFORM messages._make_topics(ARRAY[v_name]);
            EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                v_are_made := false;
            END;
        END LOOP;
    END;
    PERFORM set_config('lock_timeout', v_timeout, true);
    RETURN v_are_made;
END
$$;

COMMENT ON FUNCTION messages._make_ruled_topics IS
    'Make the topics that rules name; false if an open transaction is making one of them.';


CREATE OR REPLACE FUNCTION messages._follow_rules(
    former psqlmessages_auth[],
    idents text[],
    topics text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_are_made boolean := true;
    v_channels jsonb;
    v_queues bigint[];
    v_nodes bigint[];
    v_lost bigint[];
    v_deadline timestamp with time zone;
    v_settled record;
BEGIN
    IF topics IS NOT NULL THEN
        v_are_made := messages._make_ruled_topics(topics);
    END IF;
    IF EXISTS (SELECT FROM unnest(former) AS f WHERE f.type = 'Queue') OR idents IS NULL THEN
        v_channels := messages._queue_channels();
        v_queues := messages._move_channels();
    END IF;
    v_nodes := messages._nodes_named(idents);
    IF v_nodes <> '{}' THEN
        v_lost := ARRAY(
            SELECT c.id FROM psqlmessages_client AS c
            WHERE c.id = ANY (v_nodes) AND NOT messages._has_rule(c.role, c.ident)
            UNION
            SELECT m.client_id FROM messages._lost_memberships(v_nodes) AS l (id)
            JOIN psqlmessages_membership AS m ON m.id = l.id
            UNION
            SELECT o.client_id FROM messages._lost_observations(v_nodes) AS l (id)
            JOIN psqlmessages_observation AS o ON o.id = l.id
        );
        IF v_lost <> '{}' THEN
            -- Lock their rows by polling: waits for one lock after the other would have no common limit. Continue
            -- after a moment if other transactions have locked some.
            v_deadline := clock_timestamp() + make_interval(secs => messages._remaining_lock_wait_ms() / 1000.0);
            WHILE NOT messages._try_lock_nodes(v_lost) AND clock_timestamp() < v_deadline LOOP
                PERFORM pg_sleep(0.01);
            END LOOP;
        END IF;
        SELECT * INTO v_settled FROM messages._settle(v_lost, messages._subscribed_topics(v_nodes), former);
        PERFORM messages._refresh_timeouts(v_nodes);
        PERFORM messages._note_unfinished(v_settled.left_topics, v_settled.left_nodes, NULL);
    END IF;
    PERFORM messages._note_unfinished(NULL, NULL, v_queues);
    -- The snapshot does not show later nodes and members.
    IF NOT v_are_made OR NOT messages._holds_rules_lock() OR current_setting('transaction_isolation') <> 'read committed' THEN
        INSERT INTO messages._recheck (idents, topics, channels) VALUES (idents, topics, v_channels);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._follow_rules IS
    'Apply changed rules to topics and connected nodes. former: the old rules; idents, topics: the names in them; all nodes if idents is null.';


CREATE OR REPLACE FUNCTION messages._nodes_named(
    idents text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    IF idents IS NULL THEN
        RETURN ARRAY(SELECT c.id FROM psqlmessages_client AS c);
    END IF;
    RETURN ARRAY(
        SELECT DISTINCT c.id
        FROM psqlmessages_client AS c
        CROSS JOIN LATERAL unnest(messages._patterns(c.ident)) AS p (pattern)
        WHERE p.pattern = ANY (idents)
    );
END
$$;

COMMENT ON FUNCTION messages._nodes_named IS
    'The connected nodes that match these names and patterns; all if null.';


CREATE OR REPLACE FUNCTION messages._rules_change()
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

COMMENT ON FUNCTION messages._rules_change IS
    'Before any statement that changes rules.';


CREATE OR REPLACE FUNCTION messages._rules_changed()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    CASE TG_OP
    WHEN 'INSERT' THEN
        PERFORM messages._follow_rules(
            '{}',
            (SELECT array_agg(DISTINCT n.ident::text) FROM new_rules AS n),
            (SELECT array_agg(DISTINCT n.dest::text) FROM new_rules AS n
             WHERE n.type = 'Topic' AND right(n.dest, 1) <> '*')
        );
    WHEN 'UPDATE' THEN
        PERFORM messages._follow_rules(
            (SELECT array_agg(o::psqlmessages_auth) FROM old_rules AS o),
            (SELECT array_agg(r.ident::text)
             FROM (SELECT o.ident FROM old_rules AS o UNION SELECT n.ident FROM new_rules AS n) AS r),
            (SELECT array_agg(DISTINCT n.dest::text) FROM new_rules AS n
             WHERE n.type = 'Topic' AND right(n.dest, 1) <> '*')
        );
    WHEN 'DELETE' THEN
        PERFORM messages._follow_rules(
            (SELECT array_agg(o::psqlmessages_auth) FROM old_rules AS o),
            (SELECT array_agg(DISTINCT o.ident::text) FROM old_rules AS o),
            NULL
        );
    WHEN 'TRUNCATE' THEN
        PERFORM messages._follow_rules('{}', NULL, NULL);
    END CASE;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._rules_changed IS
    'After any statement that changes rules.';


-- The role that a rule was saved for, because a later role may have the same name. This is no column of the Django model,
-- and permission checks do not read it.
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


CREATE OR REPLACE FUNCTION messages._note_role()
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

COMMENT ON FUNCTION messages._note_role IS
    'Store the oid of the role in the rule, with the identity of this database; null if there is no such role.';


CREATE OR REPLACE TRIGGER note_role
BEFORE INSERT OR UPDATE ON psqlmessages_auth
FOR EACH ROW EXECUTE FUNCTION messages._note_role();

CREATE OR REPLACE TRIGGER rules_change
BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON psqlmessages_auth
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_change();

CREATE OR REPLACE TRIGGER rules_inserted
AFTER INSERT ON psqlmessages_auth
REFERENCING NEW TABLE AS new_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_changed();

CREATE OR REPLACE TRIGGER rules_updated
AFTER UPDATE ON psqlmessages_auth
REFERENCING OLD TABLE AS old_rules NEW TABLE AS new_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_changed();

CREATE OR REPLACE TRIGGER rules_deleted
AFTER DELETE ON psqlmessages_auth
REFERENCING OLD TABLE AS old_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_changed();

CREATE OR REPLACE TRIGGER rules_truncated
AFTER TRUNCATE ON psqlmessages_auth
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_changed();


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
    'For the administrator: deregister one node of any session; other nodes of the session stay. False if it is not connected.';
