-- Sessions: one PostgreSQL connection, its private channel, and the nodes registered on it.
-- A session is alive while its backend holds the advisory lock (1886612839, session id), in short: the session's lock.

CREATE OR REPLACE FUNCTION messages._unverified_node_id()
RETURNS bigint
LANGUAGE sql
STABLE
AS $$
    SELECT CASE
        WHEN current_setting('messages.node', true) ~ '^[0-9]{1,18}$'
        THEN current_setting('messages.node', true)::bigint
    END
$$;

COMMENT ON FUNCTION messages._unverified_node_id IS
    'The id of the acting node according to a setting, which the caller can forge: trust it only together with channel, pid and role.';


CREATE OR REPLACE FUNCTION messages._acting_node(
    OUT id bigint,
    OUT ident text,
    OUT role text,
    OUT session_id int,
    OUT channel text
)
LANGUAGE plpgsql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    SELECT c.id, c.ident, s.role, s.id, s.channel
    INTO id, ident, role, session_id, channel
    FROM psqlmessages_session AS s
    JOIN psqlmessages_client AS c ON c.session_id = s.id
    WHERE c.id = messages._unverified_node_id()
      AND s.channel = current_setting('messages.channel', true)
      AND s.pid = pg_backend_pid()
      AND s.role = session_user
      -- While a change of rules is unfinished, a node that lost its last rule may still have a row.
      AND CASE WHEN messages._rules_are_applied() THEN true ELSE messages._has_rule(c.role, c.ident) END;
END
$$;

COMMENT ON FUNCTION messages._acting_node IS
    'The node that acts in this call; all columns null if there is none (error 50).';


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
    'The sessions whose backend holds their lock. If another backend holds it, the session is not alive.';


CREATE OR REPLACE FUNCTION messages._session_has_ended(
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

COMMENT ON FUNCTION messages._session_has_ended IS
    'Whether a session of another connection has ended: true if its lock is free. A cheap test that another role can deceive by taking this lock, so housekeeping uses _live_sessions.';


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
    -- The setting is null if this connection never had a session. It is empty if the session has ended, or after a
    -- RESET ALL, which does not release the lock.
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
    'The session of this connection, or null. Restores the setting messages.channel if the caller has reset it.';


CREATE OR REPLACE FUNCTION messages._open_session()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_id int;
    v_suffix text := '_' || pg_backend_pid() || replace(gen_random_uuid()::text, '-', '');
    v_role text := session_user;
BEGIN
    IF current_setting('messages.channel', true) IS NOT NULL THEN
        -- Reuse the lock of an earlier session of this connection.
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
    -- The channel has at most 63 bytes: LISTEN silently cuts longer names, and pg_notify raises an error.
    WHILE octet_length(v_role || v_suffix) > 63 LOOP
        v_role := left(v_role, -1);
    END LOOP;
    INSERT INTO psqlmessages_session (id, pid, role, channel)
    VALUES (v_id, pg_backend_pid(), session_user, v_role || v_suffix);
    PERFORM set_config('messages.channel', v_role || v_suffix, false);
    RETURN v_id;
END
$$;

COMMENT ON FUNCTION messages._open_session IS
    'Start a session of this connection, and return its id: take the lock first, then insert the row.';


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
    'End the session of this connection if it has no node. Its lock is not released, and has no meaning without the row.';

-- Registration of nodes: init, deinit, crash and use.

CREATE OR REPLACE FUNCTION messages._register(
    ident text,
    OUT node_id bigint,
    OUT is_new boolean,
    OUT error json
)
LANGUAGE plpgsql
AS $$
DECLARE
    v_session int := messages._find_session();
    v_registered record;
BEGIN
    IF v_session IS NOT NULL THEN
        IF v_session NOT IN (SELECT messages._live_sessions()) THEN
            -- The caller released the lock with pg_advisory_unlock, so for all other sessions this one has crashed.
            PERFORM messages._end_dead_session(v_session);
        END IF;
        -- Lock the row, or a change of rules that ends the last node would delete the session. Null if it has ended.
        SELECT s.id INTO v_session FROM psqlmessages_session AS s WHERE s.id = v_session FOR KEY SHARE;
    END IF;
    LOOP
        SELECT c.id, c.session_id, s.role, s.pid
        INTO v_registered
        FROM psqlmessages_client AS c
        JOIN psqlmessages_session AS s ON s.id = c.session_id
        WHERE c.ident = _register.ident;
        IF NOT FOUND THEN
            v_session := coalesce(v_session, messages._open_session());
            INSERT INTO psqlmessages_client (session_id, ident, role)
            VALUES (v_session, _register.ident, session_user)
            ON CONFLICT DO NOTHING
            RETURNING id INTO node_id;
            is_new := true;
            -- If the row was not inserted, another session has just registered the name: try again.
            EXIT WHEN node_id IS NOT NULL;
        ELSIF v_registered.session_id = v_session THEN
            node_id := v_registered.id;
            is_new := false;
            EXIT;
        ELSIF v_registered.session_id NOT IN (SELECT messages._live_sessions()) THEN
            -- End only this node, because another transaction may have locked topics of the session's other nodes.
            -- Housekeeping ends those.
            PERFORM messages._end_node(v_registered.id, 'crash', false);
        ELSE
            error := CASE v_registered.role
                WHEN session_user THEN messages._error(8, ident, v_registered.pid::text)
                ELSE messages._error(7, ident, v_registered.pid::text, v_registered.role)
            END;
            EXIT;
        END IF;
    END LOOP;
    IF error IS NOT NULL THEN
        PERFORM messages._close_empty_session(v_session);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._register IS
    'Register a node on the session of this connection, or return the error if another live session has the node. If a dead session has the node, end the node first. is_new: false if this session already had the node.';


CREATE OR REPLACE FUNCTION messages.init(
    ident text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_is_allowed boolean;
    v_node record;
    v_channel text;
    v_topics bigint[];
BEGIN
    PERFORM messages._log_command('init', ident);
    IF length(ident) > 100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(ident, '') = '' THEN
        RETURN messages._error(4);
    END IF;
    PERFORM messages._schedule_housekeeping();
    v_is_allowed := right(ident, 1) <> '*' AND messages._has_rule(session_user, ident);
    IF v_is_allowed THEN
        PERFORM messages._begin_state_change();
        v_is_allowed := messages._has_rule(session_user, ident);
    END IF;
    IF NOT v_is_allowed THEN
        RETURN messages._error(5, ident);
    END IF;
    SELECT * INTO v_node FROM messages._register(ident);
    IF v_node.error IS NOT NULL THEN
        RETURN v_node.error;
    END IF;
    v_channel := current_setting('messages.channel');
    PERFORM set_config('messages.node', v_node.node_id::text, false);
    -- LISTEN even if the node is not new, because UNLISTEN or a rollback may have ended the first LISTEN.
    EXECUTE format('LISTEN %I', v_channel);
    IF v_node.is_new THEN
        IF EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.ident = init.ident) THEN
            v_topics := messages._subscribed_topics(ARRAY[v_node.node_id]);
            PERFORM messages._lock_topics(v_topics);
            PERFORM messages._rebuild_topics(v_topics);
        END IF;
        PERFORM messages._send_node_event('connect', ident, false);
    ELSE
        RAISE WARNING 'Messages err:6 %', messages._error_text(6, ident);
    END IF;
    RETURN (
        '{"Err":"0","Channel":' || to_json(v_channel)
        || CASE WHEN v_node.is_new THEN '}' ELSE ',"Already":1}' END
    )::json;
END
$$;

COMMENT ON FUNCTION messages.init IS
    'Register a node on this connection and LISTEN on the channel of the session. Channel: its name; Already: 1 if this session had registered the node. Errors: 54, 4, 5, 7, 8; 6 as a warning.';


CREATE OR REPLACE FUNCTION messages._deregister(
    command text,
    ident text,
    evt text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_session int;
    v_node bigint;
BEGIN
    PERFORM messages._log_command(command, ident);
    IF length(ident) > 100 THEN
        RETURN messages._error(54);
    END IF;
    PERFORM messages._schedule_housekeeping();
    v_session := messages._find_session();
    SELECT c.id INTO v_node
    FROM psqlmessages_client AS c
    WHERE c.ident = _deregister.ident AND c.session_id = v_session;
    IF v_node IS NULL THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._begin_state_change();
    PERFORM messages._end_node(v_node, evt, false);
    SELECT max(c.id) INTO v_node FROM psqlmessages_client AS c WHERE c.session_id = v_session;
    IF v_node IS NULL THEN
        EXECUTE format('UNLISTEN %I', current_setting('messages.channel'));
        PERFORM messages._close_empty_session(v_session);
    ELSIF NOT EXISTS (SELECT FROM messages._acting_node() AS a WHERE a.id IS NOT NULL) THEN
        PERFORM set_config('messages.node', v_node::text, false);
    END IF;
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._deregister IS
    'The implementation of deinit and crash: end a node of this session, and the session with its last node. evt: the event that other nodes receive.';


CREATE OR REPLACE FUNCTION messages.deinit(
    ident text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._deregister('deinit', ident, 'disconnect');
END
$$;

COMMENT ON FUNCTION messages.deinit IS
    'Deregister a node of this session, which ends its listening and sending. Already: 1 if it was not registered here. Errors: 54.';


CREATE OR REPLACE FUNCTION messages.crash(
    ident text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._deregister('crash', ident, 'crash');
END
$$;

COMMENT ON FUNCTION messages.crash IS
    'As deinit, but other nodes receive a crash event. For gateways, when the connection of a client was lost. Errors: 54.';


CREATE OR REPLACE FUNCTION messages.use(
    ident text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_session int := messages._find_session();
    v_node bigint;
BEGIN
    PERFORM messages._log_command('use', ident);
    IF v_session IS NULL THEN
        RETURN messages._error(50);
    ELSIF length(ident) > 100 THEN
        RETURN messages._error(54);
    END IF;
    SELECT c.id INTO v_node
    FROM psqlmessages_client AS c
    WHERE c.ident = use.ident AND c.session_id = v_session;
    IF v_node IS NULL THEN
        RETURN messages._error(53, coalesce(ident, ''));
    END IF;
    PERFORM set_config('messages.node', v_node::text, false);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.use IS
    'Choose the node of this session that acts in the following calls. Errors: 50, 54, 53.';
