-- Rules: who may do what, looked up by index for names and patterns alike.

-- State changes share a lock on this table and changes of rules take it alone, so that no state is
-- built on a rule that is being removed. Table locks queue in order: nobody starves, as with row locks.
-- The row tells older snapshots that rules changed, and which role memberships were last acted on: NaN
-- where rules were changed by a transaction that did not see all nodes.
CREATE TABLE IF NOT EXISTS messages._gate (
    id boolean PRIMARY KEY DEFAULT true,
    version bigint NOT NULL DEFAULT 0,
    role_memberships numeric,
    CONSTRAINT gate_has_one_row CHECK (id)
);
INSERT INTO messages._gate DEFAULT VALUES ON CONFLICT DO NOTHING;


CREATE OR REPLACE FUNCTION messages._share_gate()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    LOCK TABLE messages._gate IN ROW SHARE MODE;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- Raises 40001 where the gate was closed after this transaction's snapshot.
        PERFORM FROM messages._gate FOR SHARE;
    END IF;
END
$$;

COMMENT ON FUNCTION messages._share_gate IS
    'Before rules are read for a change of state: none of them changes until the commit.';


CREATE OR REPLACE FUNCTION messages._bound_waits()
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
    v_patience text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', CASE v_patience WHEN '0' THEN '10s' ELSE v_patience END, true);
    RETURN v_patience;
END
$$;

COMMENT ON FUNCTION messages._bound_waits IS
    'Wait for no lock longer than lock_timeout, or 10 s where there is none; answers what it was, to be set again.';


CREATE OR REPLACE FUNCTION messages._close_gate()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    -- All who come later wait behind us: better an error than a standstill.
    v_patience text := messages._bound_waits();
BEGIN
    BEGIN
        LOCK TABLE messages._gate IN EXCLUSIVE MODE;
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'rules cannot be changed now: a transaction that called init, deinit or a topic function is still open'
            USING ERRCODE = 'lock_not_available',
                HINT = 'End it, and try again: psqlmessages doctor names who sits in a transaction.';
    END;
    PERFORM set_config('lock_timeout', v_patience, true);
    UPDATE messages._gate SET version = version + 1;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- Nodes and members may have come after this snapshot: the next evaluation looks at all.
        UPDATE messages._gate SET role_memberships = 'NaN';
    END IF;
END
$$;

COMMENT ON FUNCTION messages._close_gate IS
    'Before rules change: wait for state changes under way (lock_timeout, or 10 s), and hold up new ones until the commit.';


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
    -- No rule holds more: a name of a megabyte must not cost its square.
    FOR v_length IN 1 .. least(length(v_prefix), 100) LOOP
        v_patterns := v_patterns || (left(v_prefix, v_length) || '*');
    END LOOP;
    RETURN v_patterns;
END
$$;

COMMENT ON FUNCTION messages._patterns IS
    'What a rule may hold to match this name: the name itself and each prefix with *. For a pattern: the patterns that cover it.';


CREATE OR REPLACE FUNCTION messages._last_name(
    prefix text
)
RETURNS text
LANGUAGE plpgsql
STABLE STRICT
AS $$
BEGIN
    -- No name has more than 100 characters, and none of UTF-8 is behind this one.
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
    'Up to where an index has to be read for the names with this prefix: there may be others in between, in encodings other than UTF8.';


CREATE OR REPLACE FUNCTION messages._names_like(
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

COMMENT ON FUNCTION messages._names_like IS
    'Of what a name or pattern means, where the index has to be read: from low to high what starts with low. Inlined where it is called, and by OFFSET worked out once.';


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
    'Whether who logged in is that role or a member that inherits from it; false for roles that do not exist.';


CREATE OR REPLACE FUNCTION messages._rights(
    role text,
    ident text,
    type text,
    dest text
)
RETURNS TABLE (
    can_write boolean,
    can_read boolean,
    can_observe boolean,
    timeout int
)
LANGUAGE sql
STABLE
AS $$
    SELECT bool_or(a.mode IN ('W', 'RW')), bool_or(a.mode IN ('R', 'RW')), bool_or(a.mode = 'O'),
           max(a.timeout)
    FROM psqlmessages_auth AS a
    -- As subqueries: once for the call, and not for each rule where the table is small.
    WHERE a.ident = ANY ((SELECT messages._patterns(_rights.ident))::text[])
      AND a.type = _rights.type
      AND a.dest = ANY ((SELECT messages._patterns(_rights.dest))::text[])
      AND (a.role = _rights.role OR messages._is_member(_rights.role, a.role))
$$;

COMMENT ON FUNCTION messages._rights IS
    'What all matching rules together allow: one row, all columns null where no rule matches. timeout: the longest, in seconds. Inlined where it is called.';


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
-- By the index: most rules may be for other roles.
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    -- As it mostly is. The catalogues of roles take a new backend ten times as long to plan.
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
    'Whether any rule is for who logged in, as any node; true for the owner.';


CREATE OR REPLACE FUNCTION messages._is_owner()
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT pg_catalog.pg_has_role(session_user, k.relowner, 'USAGE')
    FROM pg_catalog.pg_class AS k WHERE k.oid = 'psqlmessages_auth'::regclass
$$;

COMMENT ON FUNCTION messages._is_owner IS
    'Whether who logged in owns the tables: rules do not bind it.';


CREATE OR REPLACE FUNCTION messages._allowed(
    type text,
    modes text[]
)
RETURNS text[]
LANGUAGE sql
STABLE
AS $$
    SELECT ARRAY(
        SELECT a.dest::text FROM psqlmessages_auth AS a
        WHERE a.type = _allowed.type AND a.mode = ANY (modes)
          AND a.role IN (
              SELECT r.rolname::text FROM pg_catalog.pg_roles AS r
              WHERE pg_catalog.pg_has_role(session_user, r.oid, 'USAGE')
          )
        UNION
        SELECT '*' WHERE messages._is_owner()
    )
$$;

COMMENT ON FUNCTION messages._allowed IS
    'The topics or queues, or patterns of them, that this role may use in one of these modes as some node; * for the owner.';


CREATE OR REPLACE FUNCTION messages._is_known(
    ident text
)
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT EXISTS (
        SELECT FROM psqlmessages_auth AS a WHERE a.ident = ANY (messages._patterns(_is_known.ident))
    )
$$;

COMMENT ON FUNCTION messages._is_known IS
    'Whether a rule of any role names this ident.';


CREATE OR REPLACE FUNCTION messages._topic_fault(
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
    SELECT * INTO v_rights FROM messages._rights(role, ident, 'Topic', topic);
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

COMMENT ON FUNCTION messages._topic_fault IS
    'Why a node may not use a topic (errors 54, 1, 9, 2, 3 in this order), or null. mode: W, R, O or empty for any rule.';
