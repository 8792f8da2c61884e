-- Sessions: one PostgreSQL connection, its private channel, and the nodes registered on it.
-- A session is alive while its own backend holds advisory lock (1886612839, session id).

CREATE OR REPLACE FUNCTION messages._node_id()
RETURNS bigint
LANGUAGE sql
STABLE
AS $$
    SELECT CASE
        WHEN current_setting('messages.node', true) ~ '^[0-9]{1,18}$'
        THEN current_setting('messages.node', true)::bigint
    END
$$;

COMMENT ON FUNCTION messages._node_id IS
    'The node that acts, as this session''s setting claims: to be believed only together with the channel, pid and role.';


CREATE OR REPLACE FUNCTION messages._acting(
    OUT id bigint,
    OUT ident text,
    OUT role text,
    OUT session_id int,
    OUT channel text
)
LANGUAGE plpgsql
STABLE
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    SELECT c.id, c.ident, s.role, s.id, s.channel
    INTO id, ident, role, session_id, channel
    FROM psqlmessages_session AS s
    JOIN psqlmessages_client AS c ON c.session_id = s.id
    WHERE c.id = messages._node_id()
      AND s.channel = current_setting('messages.channel', true)
      AND s.pid = pg_backend_pid()
      AND s.role = session_user
      -- One whose end is unfinished does nothing more.
      AND CASE WHEN messages._is_settled() THEN true ELSE messages._has_rule(c.role, c.ident) END;
END
$$;

COMMENT ON FUNCTION messages._acting IS
    'The node that acts in this call; all columns null where there is none (error 50).';


CREATE OR REPLACE FUNCTION messages._live_sessions()
RETURNS SETOF int
LANGUAGE sql
STABLE
AS $$
    SELECT s.id
    FROM psqlmessages_session AS s
    JOIN pg_catalog.pg_locks AS l
        ON l.locktype = 'advisory' AND l.classid = 1886612839 AND l.objsubid = 2
        AND l.objid = s.id::oid AND l.pid = s.pid AND l.mode = 'ExclusiveLock' AND l.granted
    WHERE l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
$$;

COMMENT ON FUNCTION messages._live_sessions IS
    'The sessions whose own backend still holds their lock. A lock that any other process took counts for nothing.';


CREATE OR REPLACE FUNCTION messages._is_gone(
    session int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN NOT EXISTS (
            SELECT FROM psqlmessages_session AS s WHERE s.id = session AND s.pid = pg_backend_pid()
        )
        AND pg_try_advisory_xact_lock_shared(1886612839, session);
END
$$;

COMMENT ON FUNCTION messages._is_gone IS
    'Cheaply whether another session has ended: only then its lock is free. Evaluation decides by _live_sessions, which nobody can fool.';


CREATE OR REPLACE FUNCTION messages._find_session()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_session int;
    v_channel text;
BEGIN
    SELECT s.id INTO v_session
    FROM psqlmessages_session AS s
    WHERE s.channel = current_setting('messages.channel', true)
      AND s.pid = pg_backend_pid() AND s.role = session_user;
    -- Null: this connection never had a session. Empty: one has ended, or RESET ALL took the
    -- setting, but not the lock.
    IF v_session IS NULL AND current_setting('messages.channel', true) IS NOT NULL THEN
        SELECT s.id, s.channel INTO v_session, v_channel
        FROM messages._live_sessions() AS live (id)
        JOIN psqlmessages_session AS s ON s.id = live.id
        WHERE s.pid = pg_backend_pid() AND s.role = session_user;
        PERFORM set_config('messages.channel', v_channel, false);
    END IF;
    RETURN v_session;
END
$$;

COMMENT ON FUNCTION messages._find_session IS
    'This connection''s session, or null.';


CREATE OR REPLACE FUNCTION messages._take_session_lock()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_id int;
BEGIN
    IF current_setting('messages.channel', true) IS NOT NULL THEN
        SELECT l.objid::bigint::int INTO v_id
        FROM pg_catalog.pg_locks AS l
        WHERE l.locktype = 'advisory' AND l.classid = 1886612839 AND l.objsubid = 2
          AND l.pid = pg_backend_pid() AND l.mode = 'ExclusiveLock' AND l.granted
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
          AND l.objid::bigint BETWEEN 1 AND 2147483647
          AND NOT EXISTS (SELECT FROM psqlmessages_session AS s WHERE s.id = l.objid::bigint)
        LIMIT 1;
    END IF;
    WHILE v_id IS NULL LOOP
        v_id := 1 + floor(random() * 2147483647)::int;
        IF EXISTS (SELECT FROM psqlmessages_session AS s WHERE s.id = v_id)
            OR NOT pg_try_advisory_lock(1886612839, v_id)
        THEN
            v_id := NULL;
        END IF;
    END LOOP;
    RETURN v_id;
END
$$;

COMMENT ON FUNCTION messages._take_session_lock IS
    'A session id whose lock this backend holds and whose row is not there: one left by an earlier session of this connection, or a new one.';


CREATE OR REPLACE FUNCTION messages._open_session()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_id int := messages._take_session_lock();
    v_tail text := '_' || pg_backend_pid() || replace(gen_random_uuid()::text, '-', '');
    v_head text := session_user;
BEGIN
    -- LISTEN cuts names to 63 bytes without a word, pg_notify raises: cut whole characters here.
    WHILE octet_length(v_head || v_tail) > 63 LOOP
        v_head := left(v_head, -1);
    END LOOP;
    INSERT INTO psqlmessages_session (id, pid, role, channel)
    VALUES (v_id, pg_backend_pid(), session_user, v_head || v_tail);
    PERFORM set_config('messages.channel', v_head || v_tail, false);
    RETURN v_id;
END
$$;

COMMENT ON FUNCTION messages._open_session IS
    'Begin this connection''s session: lock first, then the row.';


CREATE OR REPLACE FUNCTION messages._close_empty_session(
    session int
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF EXISTS (SELECT FROM psqlmessages_client AS c WHERE c.session_id = session) THEN
        RETURN;
    END IF;
    DELETE FROM psqlmessages_session AS s WHERE s.id = session;
    PERFORM set_config('messages.channel', '', false);
    PERFORM set_config('messages.node', '', false);
END
$$;

COMMENT ON FUNCTION messages._close_empty_session IS
    'End this connection''s session where it has no node. Its lock stays: without a row it means nothing.';
