-- Rules: permissions of roles, nodes and patterns, all looked up by index.

-- The gate, a lock on this table. State changes share it until their commit, so a role can hold it as long as it likes.
-- A change of rules waits a moment for the exclusive lock and goes on without it: _recheck and _unfinished then list
-- the remaining work. It is a table lock because table locks are granted in order.
CREATE TABLE IF NOT EXISTS messages._gate (
    id boolean PRIMARY KEY DEFAULT true,
    CONSTRAINT gate_has_one_row CHECK (id)
);
INSERT INTO messages._gate DEFAULT VALUES ON CONFLICT DO NOTHING;
DO $$
BEGIN
    -- Columns of older installations.
    IF EXISTS (
        SELECT FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = 'messages._gate'::regclass AND a.attname = 'version' AND NOT a.attisdropped
    ) THEN
        ALTER TABLE messages._gate DROP COLUMN version, DROP COLUMN role_memberships;
    END IF;
END
$$;

-- Changes of rules lock this row, so that they run one after the other.
CREATE TABLE IF NOT EXISTS messages._rules (
    id boolean PRIMARY KEY DEFAULT true,
    version bigint NOT NULL DEFAULT 0,
    CONSTRAINT rules_has_one_row CHECK (id)
);
INSERT INTO messages._rules DEFAULT VALUES ON CONFLICT DO NOTHING;

-- The last transaction that changed rules, and the last that began to observe topics. In sequences, because older
-- snapshots see their values too.
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._rules_xact MINVALUE 0 START 0;
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._observation_xact MINVALUE 0 START 0;

-- Checks that each housekeeping repeats after a change of rules without the gate: transactions that change state at the
-- same time may have read the old rules and commit later. horizon: when no older transaction runs, these have ended.
-- idents: the nodes to check, null for all. topics: the topics that the rules name. channels: the former channels of
-- queues by name, as a session may have begun to LISTEN on one; null if no permission for a queue was removed.
CREATE TABLE IF NOT EXISTS messages._recheck (
    id bigint GENERATED ALWAYS AS IDENTITY,
    idents text[],
    topics text[],
    channels jsonb,
    horizon xid8
);

-- Rows that a change of rules could not update, because a transaction has locked them. Until housekeeping has updated
-- them, each send to such a topic checks the rules of all its receivers.
CREATE TABLE IF NOT EXISTS messages._unfinished (
    id bigint GENERATED ALWAYS AS IDENTITY,
    topic_id bigint,
    client_id bigint,
    queue_id bigint,
    CONSTRAINT unfinished_is_about_one_thing CHECK (num_nonnulls(topic_id, client_id, queue_id) = 1)
);

-- Has a value if _unfinished may have a row: a send reads a sequence faster than a table. The value is a transaction id:
-- when no older transaction runs, all transactions that wrote a row have ended.
CREATE SEQUENCE IF NOT EXISTS messages._unfinished_xact;

-- Seconds since the epoch until which housekeeping does not repeat the checks of _recheck and _unfinished.
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._rechecks_rest_until;


CREATE OR REPLACE FUNCTION messages._rules_are_applied()
RETURNS boolean
LANGUAGE sql
VOLATILE
AS $$
    SELECT pg_sequence_last_value('messages._unfinished_xact') IS NULL
$$;

COMMENT ON FUNCTION messages._rules_are_applied IS
    'Whether no change of rules is unfinished, so that the stored rows agree with the rules. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._share_rules_lock()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- Before the lock, for _recheck.horizon: a transaction that reads old rules later has a lower id.
    PERFORM pg_current_xact_id();
    LOCK TABLE messages._gate IN ROW SHARE MODE;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM messages._check_snapshot();
    END IF;
END
$$;

COMMENT ON FUNCTION messages._share_rules_lock IS
    'Share the gate before a state change reads rules: no change of rules that holds the gate runs until this commit.';


CREATE OR REPLACE FUNCTION messages._check_snapshot()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_last xid8;
BEGIN
    FOR v_last IN
        SELECT r.last_value::text::xid8 FROM messages._rules_xact AS r
        UNION ALL SELECT o.last_value::text::xid8 FROM messages._observation_xact AS o
    LOOP
        CONTINUE WHEN v_last = pg_current_xact_id() OR pg_visible_in_snapshot(v_last, pg_current_snapshot());
        BEGIN
            PERFORM pg_xact_status(v_last);
        EXCEPTION WHEN invalid_parameter_value THEN
            -- This id is not used yet: it came with a dump of another server.
            CONTINUE;
        END;
        RAISE EXCEPTION 'could not serialize access: rules have changed since this transaction began'
            USING ERRCODE = 'serialization_failure', HINT = 'The transaction might succeed if retried.';
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._check_snapshot IS
    'Above READ COMMITTED: raise 40001 if rules or observations may have changed after the snapshot of this transaction.';


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
    'Set lock_timeout to 10 s if it is 0. Returns the former value, for the caller to restore.';


CREATE OR REPLACE FUNCTION messages._remaining_lock_wait_ms()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_now float8 := date_part('epoch', clock_timestamp());
    v_until text := coalesce(current_setting('messages.changes_wait_until', true), '');
BEGIN
    IF v_until !~ '^[0-9]+([.][0-9]+)?$' THEN
        v_until := (v_now + 0.6)::text;
        PERFORM set_config('messages.changes_wait_until', v_until, true);
    END IF;
    RETURN greatest(1, least(600, 1000 * (v_until::float8 - v_now)))::int;
END
$$;

COMMENT ON FUNCTION messages._remaining_lock_wait_ms IS
    'How many milliseconds changes of rules in this transaction may still wait for locks: 600 in all, then 1 each.';


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
                HINT = 'End it, and try again: psqlmessages doctor names who sits in a transaction.';
    END;
    PERFORM setval('messages._rules_xact', pg_current_xact_id()::text::bigint);
    IF NOT messages._holds_rules_lock() THEN
        PERFORM set_config('lock_timeout', least(300, messages._remaining_lock_wait_ms())::text, true);
        BEGIN
            LOCK TABLE messages._gate IN EXCLUSIVE MODE;
            PERFORM set_config('messages.has_gate', pg_current_xact_id()::text, true);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE DEBUG 'rules are changed beside open transactions';
        END;
    END IF;
    PERFORM set_config('lock_timeout', v_timeout, true);
END
$$;

COMMENT ON FUNCTION messages._lock_rules IS
    'Before rules change: wait for other changes of rules (lock_timeout, or 10 s), then up to 300 ms for the gate. Continues without the gate if a transaction keeps it.';


CREATE OR REPLACE FUNCTION messages._holds_rules_lock()
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN coalesce(current_setting('messages.has_gate', true) = pg_current_xact_id_if_assigned()::text, false);
END
$$;

COMMENT ON FUNCTION messages._holds_rules_lock IS
    'Whether this change of rules holds the gate alone, so that no state changes beside it. Only changes of rules set the setting that it reads.';


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
    -- Rules have at most 100 characters; the limit keeps a name of a megabyte from costing its square.
    FOR v_length IN 1 .. least(length(v_prefix), 100) LOOP
        v_patterns := v_patterns || (left(v_prefix, v_length) || '*');
    END LOOP;
    RETURN v_patterns;
END
$$;

COMMENT ON FUNCTION messages._patterns IS
    'The rule values that match a name: the name itself, and each of its prefixes with *. For a pattern: the patterns that cover it.';


CREATE OR REPLACE FUNCTION messages._last_name(
    prefix text
)
RETURNS text
LANGUAGE plpgsql
STABLE STRICT
AS $$
BEGIN
    -- Names have at most 100 characters, and none sorts after this one in UTF-8.
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

COMMENT ON FUNCTION messages._last_name IS
    'The upper end of the index range of names with this prefix. Encodings other than UTF-8 may have other names in this range.';


CREATE OR REPLACE FUNCTION messages._name_range(
    pattern text
)
RETURNS TABLE (low text, high text)
LANGUAGE sql
STABLE
AS $$
    SELECT CASE WHEN right(pattern, 1) = '*' THEN left(pattern, -1) ELSE pattern END,
           CASE WHEN right(pattern, 1) = '*' THEN messages._last_name(left(pattern, -1)) ELSE pattern END
    OFFSET 0
$$;

COMMENT ON FUNCTION messages._name_range IS
    'The index range for a name or pattern: names from low to high that start with low. Inlined where it is called; OFFSET makes it run once.';


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
    'Whether a login role is that role or inherits from it; false for roles that do not exist.';


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
    -- Subqueries run once per call, and not for each rule if the table is small.
    WHERE a.ident = ANY ((SELECT messages._patterns(_permissions.ident))::text[])
      AND a.type = _permissions.type
      AND a.dest = ANY ((SELECT messages._patterns(_permissions.dest))::text[])
      AND (a.role = _permissions.role OR messages._is_member(_permissions.role, a.role))
$$;

COMMENT ON FUNCTION messages._permissions IS
    'The permissions of all matching rules together: one row, all columns null if no rule matches. timeout: the longest, in seconds. Inlined where it is called.';


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
    'Whether any rule lets this role use this ident.';


CREATE OR REPLACE FUNCTION messages._has_any_rule(
    login text
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
-- Use the index: most rules may be for other roles.
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    -- The usual case. A new backend needs ten times as long to plan the query on the catalogues of roles.
    IF EXISTS (SELECT FROM psqlmessages_auth AS a WHERE a.role = login) THEN
        RETURN true;
    END IF;
    RETURN EXISTS (
        SELECT FROM pg_catalog.pg_roles AS r
        WHERE pg_catalog.pg_has_role(login::name, r.oid, 'USAGE')
          AND (
              EXISTS (SELECT FROM psqlmessages_auth AS a WHERE a.role = r.rolname)
              OR r.oid = (
                  SELECT k.relowner FROM pg_catalog.pg_class AS k WHERE k.oid = 'psqlmessages_auth'::regclass
              )
          )
    );
END
$$;

COMMENT ON FUNCTION messages._has_any_rule IS
    'Whether a login role has any rule, for any node; true for the owner.';


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
    'The topics or queues, or patterns of them, that this role may use in one of these modes as any node; * for the owner.';


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
    v_rights record;
BEGIN
    IF length(topic) > 100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(topic, '') = '' THEN
        RETURN messages._error(1);
    END IF;
    SELECT * INTO v_rights FROM messages._permissions(role, ident, 'Topic', topic);
    IF right(topic, 1) <> '*'
        AND NOT (makes_topic AND v_rights.timeout IS NOT NULL)
        AND NOT EXISTS (SELECT FROM psqlmessages_topic AS t WHERE t.name = topic)
        OR right(topic, 1) = '*' AND mode <> 'O'
    THEN
        RETURN messages._error(9, topic);
    ELSIF v_rights.timeout IS NULL THEN
        RETURN messages._error(2, 'Topic', topic);
    ELSIF mode = 'W' AND NOT v_rights.can_write
        OR mode = 'R' AND NOT v_rights.can_read
        OR mode = 'O' AND NOT v_rights.can_observe
    THEN
        RETURN messages._error(3, mode, 'Topic', topic);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._topic_error IS
    'Why a node may not use a topic (errors 54, 1, 9, 2, 3 in this order), or null. mode: W, R, O, or empty for any rule.';

-- Audiences: the connected nodes that may receive an event.

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
        -- OFFSET forces one index range per rule: a plan made for few nodes compares each node with each rule.
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
    'The rules that determine the audience of an event about a node: equal keys have equal audiences. topics, nodes: names in the rules of the node, null if none; rules: the Rpc rules for the node. former: rules just removed, which still count.';


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
    'The connected nodes for a key of _event_audience_key. It may list a node twice.';


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
    'The connected nodes that may share a topic with this node, or that an Rpc rule connects with it in either direction. former: rules just removed, which still count.';
