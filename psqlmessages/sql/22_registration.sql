-- Registration: init, deinit, crash and use.

CREATE OR REPLACE FUNCTION messages._register(
    ident text,
    OUT node_id bigint,
    OUT is_new boolean,
    OUT fault json
)
LANGUAGE plpgsql
AS $$
DECLARE
    v_session int := messages._find_session();
    v_other record;
BEGIN
    IF v_session IS NOT NULL THEN
        IF v_session NOT IN (SELECT messages._live_sessions()) THEN
            -- Its lock was given back by force, so for all others it has crashed.
            PERFORM messages._bury(v_session);
            v_session := NULL;
        ELSE
            -- A change of rules that ends its last node leaves the session to us.
            PERFORM FROM psqlmessages_session AS s WHERE s.id = v_session FOR KEY SHARE;
            IF NOT FOUND THEN
                v_session := NULL;
            END IF;
        END IF;
    END IF;
    LOOP
        SELECT c.id, c.session_id, s.role, s.pid
        INTO v_other
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
            -- Not inserted: another session registered the name meanwhile; look again.
            EXIT WHEN node_id IS NOT NULL;
        ELSIF v_other.session_id = v_session THEN
            node_id := v_other.id;
            is_new := false;
            EXIT;
        ELSIF v_other.session_id NOT IN (SELECT messages._live_sessions()) THEN
            -- This node alone: somebody may hold a topic of another one. Evaluation buries the rest.
            PERFORM messages._end_node(v_other.id, 'crash', false);
        ELSE
            fault := CASE v_other.role
                WHEN session_user THEN messages._error(8, ident, v_other.pid::text)
                ELSE messages._error(7, ident, v_other.pid::text, v_other.role)
            END;
            EXIT;
        END IF;
    END LOOP;
    IF fault IS NOT NULL THEN
        PERFORM messages._close_empty_session(v_session);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._register IS
    'Register a node on this connection''s session, or say who holds the name. A dead holder is ended first.';


CREATE OR REPLACE FUNCTION messages.init(
    ident text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_allowed boolean;
    v_node record;
    v_channel text;
BEGIN
    PERFORM messages._log_command('init', ident);
    IF length(ident) > 100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(ident, '') = '' THEN
        RETURN messages._error(4);
    END IF;
    PERFORM messages._schedule_evaluation();
    v_allowed := right(ident, 1) <> '*' AND messages._has_rule(session_user, ident);
    IF v_allowed THEN
        PERFORM messages._begin_change();
        v_allowed := messages._has_rule(session_user, ident);
    END IF;
    IF NOT v_allowed THEN
        RETURN messages._error(5, ident);
    END IF;
    SELECT * INTO v_node FROM messages._register(ident);
    IF v_node.fault IS NOT NULL THEN
        RETURN v_node.fault;
    END IF;
    v_channel := current_setting('messages.channel');
    PERFORM set_config('messages.node', v_node.node_id::text, false);
    -- Also for a node that is there already: UNLISTEN or a rollback may have ended the listening.
    EXECUTE format('LISTEN %I', v_channel);
    IF v_node.is_new THEN
        IF EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.ident = init.ident) THEN
            PERFORM messages._rebuild_subscribed(ARRAY[v_node.node_id]);
        END IF;
        PERFORM messages._emit_node('connect', ident, false);
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
    'Register a node on this connection and LISTEN on the session''s channel. Already: 1 where this session had registered it. Errors: 54, 4, 5, 7, 8; 6 as a warning.';


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
    PERFORM messages._schedule_evaluation();
    v_session := messages._find_session();
    SELECT c.id INTO v_node
    FROM psqlmessages_client AS c
    WHERE c.ident = _deregister.ident AND c.session_id = v_session;
    IF v_node IS NULL THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._begin_change();
    PERFORM messages._end_node(v_node, evt, false);
    SELECT max(c.id) INTO v_node FROM psqlmessages_client AS c WHERE c.session_id = v_session;
    IF v_node IS NULL THEN
        EXECUTE format('UNLISTEN %I', current_setting('messages.channel'));
        PERFORM messages._close_empty_session(v_session);
    ELSIF NOT EXISTS (SELECT FROM messages._acting() AS a WHERE a.id IS NOT NULL) THEN
        PERFORM set_config('messages.node', v_node::text, false);
    END IF;
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._deregister IS
    'deinit and crash: end a node of this session, and the session with its last one.';


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
    'Deregister a node of this session; its listening and sending end first. Already: 1 where it was not registered here. Errors: 54.';


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
    'As deinit, but the others are told of a crash: for gateways that lost the program behind a node. Errors: 54.';


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
    'Choose which node of this session acts in the calls that follow. Errors: 50, 54, 53.';
