-- Rules: permissions of roles, nodes and patterns, all looked up by index.

-- The rules lock is the lock on this table. A state change (a node or a subscription starts or ends, a node joins or
-- leaves a topic) shares it until its commit, so any role can hold it for a long time. A change of rules waits up to
-- 300 ms for the exclusive lock. If it does not get the lock, it continues and lists the remaining work in _recheck and
-- _unfinished. The lock is on a table and not on a row, because PostgreSQL grants table locks in the order of requests.
CREATE TABLE IF NOT EXISTS messages._rules_lock (
    id boolean PRIMARY KEY DEFAULT true,
    CONSTRAINT rules_lock_has_one_row CHECK (id)
);
INSERT INTO messages._rules_lock DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Changes of rules lock this row, so that they run one after the other. version: increases with each change.
CREATE TABLE IF NOT EXISTS messages._rules (
    id boolean PRIMARY KEY DEFAULT true,
    version bigint NOT NULL DEFAULT 0,
    CONSTRAINT rules_has_one_row CHECK (id)
);
INSERT INTO messages._rules DEFAULT VALUES ON CONFLICT DO NOTHING;

-- The ids of the last transaction that changed rules and of the last that began to observe topics. They are stored in
-- sequences because transactions with older snapshots must see them too.
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._rules_xact MINVALUE 0 START 0;
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._observation_xact MINVALUE 0 START 0;

-- A change of rules that did not get the rules lock inserts a row. State changes that ran at the same time may have
-- read the old rules and commit later. So each housekeeping repeats the checks until no transaction older than horizon
-- runs; the first housekeeping sets horizon. idents: the names and patterns of the nodes to check, null for all.
-- topics: the names of topics to create, null for none. channels: the former channels of queues by name, because a
-- session may have begun to LISTEN on one; null if no permission for a queue was removed.
CREATE TABLE IF NOT EXISTS messages._recheck (
    id bigint GENERATED ALWAYS AS IDENTITY,
    idents text[],
    topics text[],
    channels jsonb,
    horizon xid8
);

-- The topics, nodes and queues whose rows a change of rules could not update, because another transaction had locked
-- them. Until housekeeping updates a topic's row, each send to the topic checks the rules of all its receivers.
CREATE TABLE IF NOT EXISTS messages._unfinished (
    id bigint GENERATED ALWAYS AS IDENTITY,
    topic_id bigint,
    client_id bigint,
    queue_id bigint,
    CONSTRAINT unfinished_is_about_one_thing CHECK (num_nonnulls(topic_id, client_id, queue_id) = 1)
);

-- Has a value if _unfinished may have a row. It is a sequence because a send reads a sequence faster than a table. The
-- value is a transaction id: when no older transaction runs, all transactions that wrote a row have ended.
CREATE SEQUENCE IF NOT EXISTS messages._unfinished_xact;

-- Seconds since the epoch until which housekeeping does not repeat the checks of _recheck and _unfinished.
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._rechecks_paused_until;


CREATE OR REPLACE FUNCTION messages._rules_are_applied()
RETURNS boolean
LANGUAGE sql
VOLATILE
AS $$
    SELECT pg_sequence_last_value('messages._unfinished_xact') IS NULL
$$;

COMMENT ON FUNCTION messages._rules_are_applied IS
    'Whether all changes of rules are finished, so that the stored permissions and channels agree with the rules. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._share_rules_lock()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_last xid8;
BEGIN
    -- Draw the transaction id before the lock: then it is below _recheck.horizon if this transaction reads old rules.
    PERFORM pg_current_xact_id();
    LOCK TABLE messages._rules_lock IN ROW SHARE MODE;
    IF current_setting('transaction_isolation') = 'read committed' THEN
        RETURN;
    END IF;
    FOR v_last IN
        SELECT r.last_value::text::xid8 FROM messages._rules_xact AS r
        UNION ALL SELECT o.last_value::text::xid8 FROM messages._observation_xact AS o
    LOOP
        CONTINUE WHEN v_last = pg_current_xact_id() OR pg_visible_in_snapshot(v_last, pg_current_snapshot());
        BEGIN
            PERFORM pg_xact_status(v_last);
        EXCEPTION WHEN invalid_parameter_value THEN
            -- This server has not reached this id yet: the value came with a dump of another server.
            CONTINUE;
        END;
        RAISE EXCEPTION 'could not serialize access: rules have changed since this transaction began'
            USING ERRCODE = 'serialization_failure', HINT = 'The transaction might succeed if retried.';
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._share_rules_lock IS
    'Share the rules lock before a state change reads rules: until this commit, no change of rules holds it alone. Above READ COMMITTED, raise 40001 if rules or observations may have changed after the snapshot of this transaction.';


CREATE OR REPLACE FUNCTION messages._limit_lock_wait()
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
    v_timeout text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', CASE v_timeout WHEN '0' THEN '10s' ELSE v_timeout END, true);
    RETURN v_timeout;
END
$$;

COMMENT ON FUNCTION messages._limit_lock_wait IS
    'Set lock_timeout to 10 s if it is 0, and return the former value for the caller to restore.';


CREATE OR REPLACE FUNCTION messages._remaining_lock_wait_ms()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_now float8 := date_part('epoch', clock_timestamp());
    v_until text := coalesce(current_setting('messages.rule_change_deadline', true), '');
BEGIN
    IF v_until !~ '^[0-9]+([.][0-9]+)?$' THEN
        v_until := (v_now + 0.6)::text;
        PERFORM set_config('messages.rule_change_deadline', v_until, true);
    END IF;
    RETURN greatest(1, least(600, 1000 * (v_until::float8 - v_now)))::int;
END
$$;

COMMENT ON FUNCTION messages._remaining_lock_wait_ms IS
    'The milliseconds for which a change of rules may wait for locks. All changes of a transaction share 600 ms; after that the result is 1.';


CREATE OR REPLACE FUNCTION messages._lock_rules()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_timeout text := messages._limit_lock_wait();
BEGIN
    BEGIN
        UPDATE messages._rules SET version = version + 1;
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'rules cannot be changed now: another change of rules is not committed yet'
            USING ERRCODE = 'lock_not_available',
                HINT = 'Commit it or roll it back, and try again: psqlmessages doctor lists open transactions.';
    END;
    PERFORM setval('messages._rules_xact', pg_current_xact_id()::text::bigint);
    IF NOT messages._holds_rules_lock() THEN
        PERFORM set_config('lock_timeout', least(300, messages._remaining_lock_wait_ms())::text, true);
        BEGIN
            LOCK TABLE messages._rules_lock IN EXCLUSIVE MODE;
            PERFORM set_config('messages.rules_lock_holder', pg_current_xact_id()::text, true);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE DEBUG 'rules are changed without the rules lock, because open transactions hold it';
        END;
    END IF;
    PERFORM set_config('lock_timeout', v_timeout, true);
END
$$;

COMMENT ON FUNCTION messages._lock_rules IS
    'Before rules change: wait for other changes of rules (lock_timeout, or 10 s), then up to 300 ms for the exclusive rules lock. If other transactions hold the rules lock longer, continue without it.';


CREATE OR REPLACE FUNCTION messages._holds_rules_lock()
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce(
        current_setting('messages.rules_lock_holder', true) = pg_current_xact_id_if_assigned()::text, false
    )
$$;

COMMENT ON FUNCTION messages._holds_rules_lock IS
    'Whether this transaction holds the exclusive rules lock, so that no state changes at the same time. The caller can forge the setting: ask only in changes of rules, whose role is trusted. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._patterns(
    name text
)
RETURNS text[]
LANGUAGE plpgsql
IMMUTABLE STRICT PARALLEL SAFE
AS $$
DECLARE
    v_prefix text := name;
    v_patterns text[] := '{*}';
BEGIN
    IF right(name, 1) = '*' THEN
        v_prefix := left(name, -1);
    ELSE
        v_patterns := ARRAY[name, '*'];
    END IF;
    -- Names in rules have at most 100 characters. Without the limit, the patterns of a long name would fill the memory.
    FOR v_length IN 1 .. least(length(v_prefix), 100) LOOP
        v_patterns := v_patterns || (left(v_prefix, v_length) || '*');
    END LOOP;
    RETURN v_patterns;
END
$$;

COMMENT ON FUNCTION messages._patterns IS
    'The values in rules that match a name: the name itself, *, and each prefix of the name followed by *. For a pattern: the patterns that include it.';


CREATE OR REPLACE FUNCTION messages._prefix_upper_bound(
    prefix text
)
RETURNS text
LANGUAGE plpgsql
STABLE STRICT
AS $$
BEGIN
    -- Names have at most 100 characters, so in UTF-8 no name with this prefix sorts after this value.
    IF getdatabaseencoding() = 'UTF8' THEN
        RETURN prefix || repeat(chr(1114111), 100);
    END IF;
    RETURN greatest(
        (SELECT max(c.ident) FROM psqlmessages_client AS c),
        (SELECT max(t.name) FROM psqlmessages_topic AS t),
        (SELECT max(q.name) FROM psqlmessages_queue AS q),
        (SELECT max(a.dest) FROM psqlmessages_auth AS a)
    );
END
$$;

COMMENT ON FUNCTION messages._prefix_upper_bound IS
    'An upper bound of the names that begin with this prefix, for an index range. In encodings other than UTF-8 the range may also include other names.';


CREATE OR REPLACE FUNCTION messages._name_range(
    pattern text
)
RETURNS TABLE (low text, high text)
LANGUAGE sql
STABLE
AS $$
    SELECT CASE WHEN right(pattern, 1) = '*' THEN left(pattern, -1) ELSE pattern END,
           CASE WHEN right(pattern, 1) = '*' THEN messages._prefix_upper_bound(left(pattern, -1)) ELSE pattern END
    OFFSET 0
$$;

COMMENT ON FUNCTION messages._name_range IS
    'The index range of the names that match a name or pattern: those from low to high that also start with low. Inlined where it is called; OFFSET makes it run once.';


CREATE OR REPLACE FUNCTION messages._is_member(
    login text,
    role text
)
RETURNS boolean
LANGUAGE sql
STABLE STRICT
AS $$
    SELECT login = role OR EXISTS (
        SELECT FROM pg_catalog.pg_roles AS r
        JOIN pg_catalog.pg_roles AS l ON l.rolname = login
        WHERE r.rolname = _is_member.role AND pg_catalog.pg_has_role(l.oid, r.oid, 'USAGE')
    )
$$;

COMMENT ON FUNCTION messages._is_member IS
    'Whether a login role is the other role or inherits its privileges; false if one of them does not exist.';


CREATE OR REPLACE FUNCTION messages._permissions(
    role text,
    ident text,
    type text,
    dest text
)
RETURNS TABLE (
    can_write boolean,
    can_read boolean,
    can_observe boolean,
    can_administer boolean,
    timeout int
)
LANGUAGE sql
STABLE
AS $$
    SELECT bool_or(a.mode IN ('W', 'RW', 'A')), bool_or(a.mode IN ('R', 'RW', 'A')), bool_or(a.mode = 'O'),
           bool_or(a.mode = 'A'), max(a.timeout)
    FROM psqlmessages_auth AS a
    -- As subqueries the patterns are computed once per call: otherwise a plan for a small table computes them per rule.
    WHERE a.ident = ANY ((SELECT messages._patterns(_permissions.ident))::text[])
      AND a.type = _permissions.type
      AND a.dest = ANY ((SELECT messages._patterns(_permissions.dest))::text[])
      AND (a.role = _permissions.role OR messages._is_member(_permissions.role, a.role))
$$;

COMMENT ON FUNCTION messages._permissions IS
    'The permissions that all matching rules give together: one row, with all columns null if no rule matches. timeout: the longest of the rules, in seconds. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._has_rule(
    role text,
    ident text
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE a.ident = ANY ((SELECT messages._patterns(_has_rule.ident))::text[])
          AND (a.role = _has_rule.role OR messages._is_member(_has_rule.role, a.role))
    );
END
$$;

COMMENT ON FUNCTION messages._has_rule IS
    'Whether any rule allows this role to act as this node.';


CREATE OR REPLACE FUNCTION messages._has_any_rule()
RETURNS boolean
LANGUAGE plpgsql
STABLE
-- Use the index, because most rules may be for other roles.
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    -- The common case first: in a new backend, planning the query below takes ten times as long.
    IF EXISTS (SELECT FROM psqlmessages_auth AS a WHERE a.role = session_user) THEN
        RETURN true;
    END IF;
    RETURN EXISTS (
        SELECT FROM pg_catalog.pg_roles AS r
        WHERE pg_catalog.pg_has_role(session_user, r.oid, 'USAGE')
          AND (
              EXISTS (SELECT FROM psqlmessages_auth AS a WHERE a.role = r.rolname)
              OR r.oid = (
                  SELECT k.relowner FROM pg_catalog.pg_class AS k WHERE k.oid = 'psqlmessages_auth'::regclass
              )
          )
    );
END
$$;

COMMENT ON FUNCTION messages._has_any_rule() IS
    'Whether this role has a rule for any node; true for the owner of the tables and its members.';


CREATE OR REPLACE FUNCTION messages._allowed_destinations(
    type text,
    modes text[]
)
RETURNS text[]
LANGUAGE sql
STABLE
AS $$
    SELECT ARRAY(
        SELECT a.dest::text FROM psqlmessages_auth AS a
        WHERE a.type = _allowed_destinations.type AND a.mode = ANY (modes)
          AND a.role IN (
              SELECT r.rolname::text FROM pg_catalog.pg_roles AS r
              WHERE pg_catalog.pg_has_role(session_user, r.oid, 'USAGE')
          )
        UNION
        SELECT '*' FROM pg_catalog.pg_class AS k
        WHERE k.oid = 'psqlmessages_auth'::regclass AND pg_catalog.pg_has_role(session_user, k.relowner, 'USAGE')
    )
$$;

COMMENT ON FUNCTION messages._allowed_destinations IS
    'The names and patterns of topics or queues that rules allow this role to use, as any node, in one of these modes; * for the owner of the tables and its members. type: Topic or Queue.';


CREATE OR REPLACE FUNCTION messages._is_known_node(
    ident text
)
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT EXISTS (
        SELECT FROM psqlmessages_auth AS a WHERE a.ident = ANY (messages._patterns(_is_known_node.ident))
    )
$$;

COMMENT ON FUNCTION messages._is_known_node IS
    'Whether a rule of any role names this node.';


CREATE OR REPLACE FUNCTION messages._topic_error(
    role text,
    ident text,
    topic text,
    mode text,
    makes_topic boolean
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_permissions record;
BEGIN
    IF length(topic) > 100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(topic, '') = '' THEN
        RETURN messages._error(1);
    END IF;
    SELECT * INTO v_permissions FROM messages._permissions(role, ident, 'Topic', topic);
    IF right(topic, 1) <> '*'
        AND NOT (makes_topic AND v_permissions.timeout IS NOT NULL)
        AND NOT EXISTS (SELECT FROM psqlmessages_topic AS t WHERE t.name = topic)
        OR right(topic, 1) = '*' AND mode <> 'O'
    THEN
        RETURN messages._error(9, topic);
    ELSIF v_permissions.timeout IS NULL THEN
        RETURN messages._error(2, 'Topic', topic);
    ELSIF mode = 'W' AND NOT v_permissions.can_write
        OR mode = 'R' AND NOT v_permissions.can_read
        OR mode = 'O' AND NOT v_permissions.can_observe
    THEN
        RETURN messages._error(3, mode, 'Topic', topic);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._topic_error IS
    'The error that forbids a node to use a topic (54, 1, 9, 2, 3 in this order), or null. mode: W, R, O, or empty if any rule suffices. makes_topic: whether the call creates a missing topic.';


CREATE OR REPLACE FUNCTION messages._ident_and_dest_error(
    ident text,
    dest text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF length(ident) > 100 OR length(dest) > 100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(dest, '') = '' THEN
        RETURN messages._error(1);
    ELSIF coalesce(ident, '') = '' THEN
        RETURN messages._error(15);
    ELSIF right(ident, 1) = '*' OR NOT messages._is_known_node(ident) THEN
        RETURN messages._error(16, ident);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._ident_and_dest_error IS
    'The error of the names in a call that needs no session (54, 1, 15, 16), or null. dest: a topic or queue.';


CREATE OR REPLACE FUNCTION messages._topic_error_as(
    ident text,
    topic text,
    mode text,
    makes_topic boolean DEFAULT false
)
RETURNS json
LANGUAGE sql
AS $$
    SELECT coalesce(
        messages._ident_and_dest_error(ident, topic),
        messages._topic_error(session_user, ident, topic, mode, makes_topic)
    )
$$;

COMMENT ON FUNCTION messages._topic_error_as(text, text, text, boolean) IS
    'The error that forbids this role to use a topic as a node without a session (54, 1, 15, 16, 9, 2, 3), or null. mode, makes_topic: as in _topic_error. Inlined where it is called.';

-- Audiences: the connected nodes that receive an event.

CREATE OR REPLACE FUNCTION messages._nodes_of_rules(
    rules bigint[]
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    RETURN ARRAY(
        SELECT DISTINCT c.id
        FROM psqlmessages_auth AS a
        CROSS JOIN LATERAL messages._name_range(a.ident) AS n
        -- OFFSET forces one index scan per rule: a plan made for a few nodes would compare each node with each rule.
        CROSS JOIN LATERAL (
            SELECT m.id, m.role FROM psqlmessages_client AS m
            WHERE m.ident BETWEEN n.low AND n.high AND starts_with(m.ident, n.low) OFFSET 0
        ) AS c
        WHERE a.id = ANY (rules) AND (a.role = c.role OR messages._is_member(c.role, a.role))
    );
END
$$;

COMMENT ON FUNCTION messages._nodes_of_rules IS
    'The connected nodes that these rules apply to.';


CREATE OR REPLACE FUNCTION messages._topic_audience(
    topic text
)
RETURNS bigint[]
LANGUAGE sql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
    SELECT messages._nodes_of_rules(ARRAY(
        SELECT a.id FROM psqlmessages_auth AS a
        WHERE a.type = 'Topic' AND a.dest = ANY (messages._patterns(topic))
    ))
$$;

COMMENT ON FUNCTION messages._topic_audience IS
    'The connected nodes with any rule for this topic.';


CREATE OR REPLACE FUNCTION messages._event_audience_key(
    ident text,
    former psqlmessages_auth[],
    OUT topics text[],
    OUT nodes text[],
    OUT rules bigint[]
)
LANGUAGE plpgsql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_patterns text[] := messages._patterns(ident);
BEGIN
    SELECT array_agg(DISTINCT r.dest) FILTER (WHERE r.type = 'Topic'),
           array_agg(DISTINCT r.dest) FILTER (WHERE r.type = 'Rpc')
    INTO topics, nodes
    FROM (
        SELECT a.type, a.dest FROM psqlmessages_auth AS a WHERE a.ident = ANY (v_patterns)
        UNION ALL
        SELECT f.type, f.dest FROM unnest(former) AS f WHERE f.ident = ANY (v_patterns)
    ) AS r;
    rules := ARRAY(
        SELECT a.id FROM psqlmessages_auth AS a
        WHERE a.type = 'Rpc' AND a.dest = ANY (v_patterns) ORDER BY a.id
    );
END
$$;

COMMENT ON FUNCTION messages._event_audience_key IS
    'What determines the audience of an event about a node: equal keys have equal audiences. topics, nodes: the destinations in the Topic and Rpc rules of the node, null if it has none. rules: the ids of the Rpc rules whose destination is the node. former: rules of the node that were just removed and still count.';


CREATE OR REPLACE FUNCTION messages._audience_of_key(
    topics text[],
    nodes text[],
    rules bigint[]
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_rules bigint[] := rules;
    v_audience bigint[];
BEGIN
    IF topics IS NOT NULL THEN
        v_rules := v_rules || ARRAY(
            SELECT a.id
            FROM unnest(topics) AS d (dest)
            CROSS JOIN unnest(messages._patterns(d.dest)) AS p (pattern)
            JOIN psqlmessages_auth AS a ON a.type = 'Topic' AND a.dest = p.pattern
            UNION
            SELECT a.id
            FROM unnest(topics) AS d (dest)
            CROSS JOIN LATERAL messages._name_range(d.dest) AS n
            CROSS JOIN LATERAL (
                SELECT r.id FROM psqlmessages_auth AS r
                WHERE r.type = 'Topic' AND r.dest BETWEEN n.low AND n.high
                  AND starts_with(r.dest, n.low) OFFSET 0
            ) AS a
            WHERE right(d.dest, 1) = '*'
        );
    END IF;
    v_audience := messages._nodes_of_rules(v_rules);
    IF nodes IS NOT NULL THEN
        v_audience := v_audience || ARRAY(
            SELECT DISTINCT c.id
            FROM unnest(nodes) AS d (dest)
            CROSS JOIN LATERAL messages._name_range(d.dest) AS n
            CROSS JOIN LATERAL (
                SELECT m.id FROM psqlmessages_client AS m
                WHERE m.ident BETWEEN n.low AND n.high AND starts_with(m.ident, n.low) OFFSET 0
            ) AS c
        );
    END IF;
    RETURN v_audience;
END
$$;

COMMENT ON FUNCTION messages._audience_of_key IS
    'The connected nodes of a key from _event_audience_key. A node may be listed twice.';


CREATE OR REPLACE FUNCTION messages._node_audience(
    ident text,
    former psqlmessages_auth[]
)
RETURNS bigint[]
LANGUAGE sql
STABLE
AS $$
    SELECT messages._audience_of_key(h.topics, h.nodes, h.rules) FROM messages._event_audience_key(ident, former) AS h
$$;

COMMENT ON FUNCTION messages._node_audience IS
    'The connected nodes that may share a topic with this node, or that an Rpc rule connects with it in either direction. former: rules of the node that were just removed and still count.';
