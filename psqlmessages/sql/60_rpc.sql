-- RPC: a node sends a request to another node. The reply token authorizes only that node to answer.
-- A NOTIFY payload has at most 7,999 bytes: 7,996 for header and body, 3 for the braces and newline around the header.

-- The secret key of the reply tokens, combined with the two pads of HMAC.
CREATE TABLE IF NOT EXISTS messages._secret (
    id boolean PRIMARY KEY DEFAULT true,
    inner_pad bytea NOT NULL,
    outer_pad bytea NOT NULL,
    CONSTRAINT secret_has_one_row CHECK (id)
);

CREATE OR REPLACE FUNCTION messages._make_secret()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_key bytea := sha256(
        uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
        || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
    );
    v_inner bytea := decode(repeat('36', 64), 'hex');
    v_outer bytea := decode(repeat('5c', 64), 'hex');
BEGIN
    FOR v_byte IN 0 .. 31 LOOP
        v_inner := set_byte(v_inner, v_byte, get_byte(v_inner, v_byte) # get_byte(v_key, v_byte));
        v_outer := set_byte(v_outer, v_byte, get_byte(v_outer, v_byte) # get_byte(v_key, v_byte));
    END LOOP;
    INSERT INTO messages._secret (inner_pad, outer_pad) VALUES (v_inner, v_outer)
    ON CONFLICT DO NOTHING;
END
$$;

COMMENT ON FUNCTION messages._make_secret IS
    'Draw the secret from the strong random source of PostgreSQL, if there is none yet.';

SELECT messages._make_secret();


CREATE OR REPLACE FUNCTION messages._hmac(
    inner_pad bytea,
    outer_pad bytea,
    content text
)
RETURNS text
LANGUAGE sql
STABLE
AS $$
    SELECT left(encode(sha256(outer_pad || sha256(inner_pad || convert_to(content, 'UTF8'))), 'hex'), 32)
$$;

COMMENT ON FUNCTION messages._hmac IS
    '128 bits of the HMAC-SHA-256 of this content, in hexadecimal digits. inner_pad, outer_pad: from _secret. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._reply_token_mac(
    asker bigint,
    answerer text,
    timeout text,
    token text
)
RETURNS text
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN (
        SELECT messages._hmac(
            s.inner_pad, s.outer_pad, asker || ' ' || answerer || ' ' || timeout || ' ' || token
        )
        FROM messages._secret AS s
    );
END
$$;

COMMENT ON FUNCTION messages._reply_token_mac IS
    'The MAC that begins a reply token. It covers the registration of the asking node, the answerer, timeout and token. answerer: who may answer, as node <name in JSON> or topic <id>.';


CREATE OR REPLACE FUNCTION messages._rpc_endpoints(
    node text
)
RETURNS TABLE (
    own_id bigint,
    own_ident text,
    id bigint,
    channel text,
    inner_pad bytea,
    outer_pad bytea
)
LANGUAGE sql
STABLE
AS $$
    -- LIMIT forces one lookup after the other: the plan of a join, made while a few nodes are connected, may read
    -- thousands later.
    SELECT me.id, me.ident, c.id, s.channel, k.inner_pad, k.outer_pad
    FROM (
        SELECT m.id, m.ident, m.session_id FROM psqlmessages_client AS m
        WHERE m.id = messages._unverified_node_id() LIMIT 1
    ) AS me
    CROSS JOIN LATERAL (
        SELECT o.id FROM psqlmessages_session AS o
        WHERE o.id = me.session_id
          AND o.channel = current_setting('messages.channel', true)
          AND o.pid = pg_backend_pid()
          AND o.role = session_user
        LIMIT 1
    ) AS own
    CROSS JOIN (
        SELECT other.id, other.session_id FROM psqlmessages_client AS other
        WHERE other.ident = node LIMIT 1
    ) AS c
    CROSS JOIN LATERAL (
        SELECT t.id, t.channel FROM psqlmessages_session AS t WHERE t.id = c.session_id LIMIT 1
    ) AS s
    CROSS JOIN messages._secret AS k
    -- The other session is alive: its backend still holds its lock, as in _session_has_ended.
    WHERE (s.id = own.id OR NOT pg_try_advisory_xact_lock_shared(1886612839, s.id))
      AND messages._rules_are_applied()
$$;

COMMENT ON FUNCTION messages._rpc_endpoints IS
    'What a request or answer to another node needs: the acting node (own_id, own_ident), the other node and its channel, and the secret. No row if one of the nodes is not connected, or if a change of rules is unfinished. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._notify_node(
    channel text,
    timeout int,
    header text,
    message text,
    client_id bigint
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_header text := header || ',"Id":' || nextval('messages._message_id');
BEGIN
    IF octet_length(v_header) + octet_length(message) > 7996 THEN
        PERFORM pg_notify(channel, messages._store_body(timeout, v_header, message, NULL, client_id));
    ELSE
        PERFORM pg_notify(channel, '{' || v_header || E'}\n' || message);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._notify_node IS
    'Notify one node. A body over the NOTIFY limit is stored for this registration of the node, for timeout seconds.';


CREATE OR REPLACE FUNCTION messages._rpc(
    node text,
    token text,
    param text,
    enc text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_me record;
    v_permissions record;
    v_target record;
    v_error json;
BEGIN
    PERFORM messages._log_command('rpc', node);
    SELECT * INTO v_me FROM messages._acting_node();
    IF v_me.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    PERFORM messages._schedule_housekeeping_if_due();
    IF length(node) > 100 OR octet_length(token) > 1000 THEN
        RETURN messages._error(54);
    ELSIF coalesce(node, '') = '' THEN
        RETURN messages._error(15);
    ELSIF coalesce(token, '') = '' THEN
        RETURN messages._error(14);
    ELSIF right(node, 1) = '*' OR NOT messages._is_known_node(node) THEN
        RETURN messages._error(16, node);
    END IF;
    SELECT * INTO v_permissions FROM messages._permissions(v_me.role, v_me.ident, 'Rpc', node);
    IF v_permissions.timeout IS NULL THEN
        RETURN messages._error(2, 'Rpc', node);
    ELSIF NOT v_permissions.can_write THEN
        RETURN messages._error(3, 'W', 'Rpc', node);
    END IF;
    -- While a change of rules is unfinished, a node that lost its last rule may still have a row. In the common case,
    -- _rules_are_applied excludes this.
    SELECT c.id, c.session_id, s.channel INTO v_target
    FROM psqlmessages_client AS c
    JOIN psqlmessages_session AS s ON s.id = c.session_id
    WHERE c.ident = node AND messages._has_rule(c.role, c.ident);
    IF v_target.id IS NULL OR messages._session_has_ended(v_target.session_id) THEN
        RETURN messages._error(17, node);
    END IF;
    v_error := messages._content_error(token, enc, octet_length(param));
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    -- Read the rules again immediately before the delivery: each statement has a snapshot of its own, and another
    -- transaction may have removed the last rule since the first look.
    SELECT * INTO v_permissions FROM messages._permissions(v_me.role, v_me.ident, 'Rpc', node);
    IF v_permissions.timeout IS NULL THEN
        RETURN messages._error(2, 'Rpc', node);
    END IF;
    PERFORM messages._notify_node(
        v_target.channel, v_permissions.timeout,
        '"Type":"Rpc","Size":' || octet_length(coalesce(param, '')) || ',"To":' || to_json(node)
            || ',"Token":' || to_json(
                messages._reply_token_mac(
                    v_me.id, 'node ' || to_json(node), v_permissions.timeout::text, token
                ) || ' ' || v_permissions.timeout || ' ' || token
            )
            || ',"From":' || to_json(v_me.ident)
            || CASE WHEN enc <> '' THEN ',"Enc":"' || enc || '"' ELSE '' END,
        coalesce(param, ''), v_target.id
    );
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._rpc IS
    'The implementation of rpc for requests of any size: send the request, or return the error.';


CREATE OR REPLACE FUNCTION messages.rpc(
    node text,
    token text,
    param text,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_size int := octet_length(param);
    v_channel text;
    v_header text;
BEGIN
    -- One statement handles the common case, as in topic_send: a small request without an error. Otherwise _rpc runs:
    -- the statement finds no row, so the header is null, or header and body are too long together.
    SELECT p.channel,
           '"Type":"Rpc","Size":' || v_size || ',"To":' || to_json(node)
               || ',"Token":' || to_json(messages._hmac(
                   p.inner_pad, p.outer_pad,
                   p.own_id || ' node ' || to_json(node) || ' ' || r.timeout || ' ' || token
               ) || ' ' || r.timeout || ' ' || token)
               || ',"From":' || to_json(p.own_ident) || coalesce(',"Enc":"' || enc || '"', '')
               || ',"Id":' || nextval('messages._message_id')
    INTO v_channel, v_header
    FROM messages._rpc_endpoints(node) AS p
    CROSS JOIN LATERAL messages._permissions(session_user, p.own_ident, 'Rpc', node) AS r
    WHERE r.can_write AND v_size <= 7996 AND token <> '' AND octet_length(token) <= 1000
      AND (enc IS NULL OR enc IN ('b64', 'json'));
    IF v_size + octet_length(v_header) <= 7996 THEN
        -- IF and not PERFORM: a simple expression takes a third of the time.
        IF pg_notify(v_channel, '{' || v_header || E'}\n' || param) IS NULL THEN
            NULL;
        END IF;
    ELSE
        RETURN messages._rpc(node, token, param, enc);
    END IF;
    IF messages._nothing_is_due() IS NOT TRUE THEN
        PERFORM messages._log_command('rpc', node);
        PERFORM messages._schedule_housekeeping_if_due();
    END IF;
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.rpc(text, text, text, text) IS
    'Send a request to a node; the answer arrives with the token. enc: the encoding of the body, b64 or json. Errors: 50, 54, 15, 14, 16, 2, 3, 17, 55, 51.';


CREATE OR REPLACE FUNCTION messages.rpc_many(
    nodes text[],
    tokens text[],
    params text[],
    encs text[] DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
AS $$
DECLARE
    v_answers text;
BEGIN
    IF (SELECT a.id FROM messages._acting_node() AS a) IS NULL THEN
        RETURN messages._error(50);
    END IF;
    -- One statement processes all requests in order: it sends those that are the common case of rpc, and calls _rpc for
    -- each of the others.
    WITH requests AS MATERIALIZED (
        SELECT u.node, u.token, u.param, u.enc, u.ordinal
        FROM unnest(nodes, tokens, params, encs) WITH ORDINALITY AS u (node, token, param, enc, ordinal)
    ), targets AS MATERIALIZED (
        SELECT d.node, p.*, r.timeout
        FROM (SELECT DISTINCT e.node FROM requests AS e) AS d
        CROSS JOIN LATERAL messages._rpc_endpoints(d.node) AS p
        CROSS JOIN LATERAL messages._permissions(session_user, p.own_ident, 'Rpc', d.node) AS r
        WHERE r.can_write
    )
    SELECT string_agg(
        CASE
            WHEN c.payload IS NULL THEN coalesce(
                nullif(messages._rpc(c.node, c.token, c.param, c.enc)::text, '{"Err":"0"}'), 'null'
            )
            -- Always true: pg_notify returns void, which is not null.
            WHEN pg_notify(c.channel, c.payload) IS NOT NULL THEN 'null'
        END, ','
    )
    INTO v_answers
    -- OFFSET 0 makes PostgreSQL compute each header and each payload once.
    FROM (
        SELECT h.*, CASE WHEN octet_length(h.param) + octet_length(h.header) <= 7996
                         THEN '{' || h.header || E'}\n' || h.param END AS payload
        FROM (
            SELECT e.*, n.channel,
                   CASE
                       WHEN e.token <> '' AND octet_length(e.token) <= 1000
                           AND octet_length(e.param) <= 7996 AND (e.enc IS NULL OR e.enc IN ('b64', 'json'))
                       THEN '"Type":"Rpc","Size":' || octet_length(e.param) || ',"To":' || to_json(e.node)
                           || ',"Token":' || to_json(messages._hmac(
                               n.inner_pad, n.outer_pad,
                               n.own_id || ' node ' || to_json(e.node) || ' ' || n.timeout || ' ' || e.token
                           ) || ' ' || n.timeout || ' ' || e.token)
                           || ',"From":' || to_json(n.own_ident) || coalesce(',"Enc":"' || e.enc || '"', '')
                           || ',"Id":' || nextval('messages._message_id')
                   END AS header
            FROM requests AS e LEFT JOIN targets AS n ON n.node = e.node
            ORDER BY e.ordinal OFFSET 0
        ) AS h
        OFFSET 0
    ) AS c;
    IF messages._nothing_is_due() IS NOT TRUE THEN
        PERFORM messages._log_command('rpc_many');
        PERFORM messages._schedule_housekeeping_if_due();
    END IF;
    RETURN '{"Err":"0","Answers":[' || coalesce(v_answers, '') || ']}';
END
$$;

COMMENT ON FUNCTION messages.rpc_many IS
    'Send many requests in one call, each to its node and with its token. The arrays have one entry for each request. Answers: for each request, in order, null or the error that rpc returns. Errors: 50.';

-- Answers to requests, authorized by the reply token received.

CREATE OR REPLACE FUNCTION messages._split_token(
    token text,
    OUT topic_id bigint,
    OUT mac text,
    OUT timeout text,
    OUT asker_token text
)
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    v_proof text := split_part(token, ' ', 1);
    v_topic text := CASE WHEN position('.' IN v_proof) > 0 THEN split_part(v_proof, '.', 1) END;
BEGIN
    timeout := split_part(token, ' ', 2);
    asker_token := substr(token, length(v_proof) + length(timeout) + 3);
    -- Without a topic its conditions are null, which IF treats as false.
    IF length(v_topic) NOT BETWEEN 1 AND 18 OR translate(v_topic, '0123456789', '') <> ''
        OR length(timeout) NOT BETWEEN 1 AND 10 OR translate(timeout, '0123456789', '') <> ''
        OR asker_token = ''
    THEN
        RETURN;
    END IF;
    mac := CASE WHEN v_topic IS NULL THEN v_proof ELSE substr(v_proof, length(v_topic) + 2) END;
    IF length(mac) <> 32 OR translate(mac, '0123456789abcdef', '') <> '' THEN
        mac := NULL;
    END IF;
    topic_id := v_topic;
END
$$;

COMMENT ON FUNCTION messages._split_token IS
    'Split a reply token, which is <crypt> <timeout> <token of the asking node>. crypt is the MAC, or <topic id>.<MAC> if the request was sent to a topic. mac is null if the reply token is malformed.';


CREATE OR REPLACE FUNCTION messages._return(
    command text,
    node text,
    token text,
    param text,
    enc text,
    failure text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_me record;
    v_asker record;
    v_token record;
    v_answerer text;
    v_error json;
BEGIN
    PERFORM messages._log_command(command, node);
    SELECT * INTO v_me FROM messages._acting_node();
    IF v_me.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    PERFORM messages._schedule_housekeeping_if_due();
    -- The token of the asking node has at most 1,000 bytes; MAC, topic and timeout before it have less than 100.
    IF length(node) > 100 OR octet_length(token) > 1100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(node, '') = '' THEN
        RETURN messages._error(15);
    ELSIF coalesce(token, '') = '' THEN
        RETURN messages._error(14);
    END IF;
    SELECT * INTO v_token FROM messages._split_token(token);
    IF v_token.mac IS NULL THEN
        RETURN messages._error(18);
    ELSIF NOT messages._is_known_node(node) THEN
        RETURN messages._error(19, node);
    END IF;
    -- As in _rpc, the other node must still have a rule.
    SELECT c.id, c.session_id, s.channel INTO v_asker
    FROM psqlmessages_client AS c
    JOIN psqlmessages_session AS s ON s.id = c.session_id
    WHERE c.ident = node AND messages._has_rule(c.role, c.ident);
    IF v_token.topic_id IS NULL THEN
        v_answerer := 'node ' || to_json(v_me.ident);
    ELSIF messages._is_listener(v_me.id, v_token.topic_id) THEN
        v_answerer := 'topic ' || v_token.topic_id;
    END IF;
    -- The computed MAC is null if the asking node is not registered or this node may not answer.
    IF v_token.mac IS DISTINCT FROM messages._reply_token_mac(
        v_asker.id, v_answerer, v_token.timeout, v_token.asker_token
    ) THEN
        RETURN messages._error(20, v_me.ident, node, token);
    ELSIF messages._session_has_ended(v_asker.session_id) THEN
        RETURN messages._error(17, node);
    END IF;
    v_error := messages._content_error(NULL, enc, octet_length(param));
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    PERFORM messages._notify_node(
        v_asker.channel, v_token.timeout::int,
        '"Type":"Return","Size":' || octet_length(coalesce(param, '')) || ',"To":' || to_json(node)
            || ',"Token":' || to_json(v_token.asker_token) || ',"From":' || to_json(v_me.ident)
            || CASE WHEN enc <> '' THEN ',"Enc":"' || enc || '"' ELSE '' END || failure,
        coalesce(param, ''), v_asker.id
    );
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._return IS
    'The implementation of return and return_error for answers of any size: check the reply token and deliver the answer. failure: further header fields if the request failed.';


CREATE OR REPLACE FUNCTION messages.return(
    node text,
    token text,
    param text,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_size int := octet_length(param);
    v_rest text := substr(token, 34);
    v_channel text;
    v_header text;
BEGIN
    -- One statement handles the common case: a small answer to a request to a node, without an error. Then the token
    -- begins with the MAC and a space, 33 characters, and the MAC covers the rest. Otherwise _return runs:
    -- the statement finds no row, so the header is null, or header and body are too long together.
    SELECT p.channel,
           '"Type":"Return","Size":' || v_size || ',"To":' || to_json(node)
               || ',"Token":' || to_json(substr(v_rest, position(' ' IN v_rest) + 1))
               || ',"From":' || to_json(p.own_ident) || coalesce(',"Enc":"' || enc || '"', '')
               || ',"Id":' || nextval('messages._message_id')
    INTO v_channel, v_header
    FROM messages._rpc_endpoints(node) AS p
    WHERE left(token, 33) = messages._hmac(
              p.inner_pad, p.outer_pad, p.id || ' node ' || to_json(p.own_ident) || ' ' || v_rest
          ) || ' '
      AND v_size <= 7996 AND octet_length(token) <= 1100 AND (enc IS NULL OR enc IN ('b64', 'json'));
    IF v_size + octet_length(v_header) <= 7996 THEN
        IF pg_notify(v_channel, '{' || v_header || E'}\n' || param) IS NULL THEN
            NULL;
        END IF;
    ELSE
        RETURN messages._return('return', node, token, param, enc, '');
    END IF;
    IF messages._nothing_is_due() IS NOT TRUE THEN
        PERFORM messages._log_command('return', node);
        PERFORM messages._schedule_housekeeping_if_due();
    END IF;
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.return(text, text, text, text) IS
    'Answer a request. token: the reply token received, which is the only permission needed. enc: the encoding of the body, b64 or json. Errors: 50, 54, 15, 14, 18, 19, 20, 17, 55, 51.';


CREATE OR REPLACE FUNCTION messages.return_many(
    nodes text[],
    tokens text[],
    params text[],
    encs text[] DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
AS $$
DECLARE
    v_answers text;
BEGIN
    IF (SELECT a.id FROM messages._acting_node() AS a) IS NULL THEN
        RETURN messages._error(50);
    END IF;
    -- One statement processes all answers in order: it sends those that are the common case of return, and calls
    -- _return for each of the others.
    WITH answers AS MATERIALIZED (
        SELECT u.node, u.token, u.param, u.enc, u.ordinal
        FROM unnest(nodes, tokens, params, encs) WITH ORDINALITY AS u (node, token, param, enc, ordinal)
    ), targets AS MATERIALIZED (
        SELECT d.node, p.*
        FROM (SELECT DISTINCT e.node FROM answers AS e) AS d
        CROSS JOIN LATERAL messages._rpc_endpoints(d.node) AS p
    )
    SELECT string_agg(
        CASE
            WHEN c.payload IS NULL THEN coalesce(
                nullif(messages._return('return', c.node, c.token, c.param, c.enc, '')::text, '{"Err":"0"}'), 'null'
            )
            -- Always true: pg_notify returns void, which is not null.
            WHEN pg_notify(c.channel, c.payload) IS NOT NULL THEN 'null'
        END, ','
    )
    INTO v_answers
    -- OFFSET 0 makes PostgreSQL compute each header and each payload once.
    FROM (
        SELECT h.*, CASE WHEN octet_length(h.param) + octet_length(h.header) <= 7996
                         THEN '{' || h.header || E'}\n' || h.param END AS payload
        FROM (
            SELECT e.*, n.channel,
                   CASE
                       WHEN left(e.token, 33) = messages._hmac(
                               n.inner_pad, n.outer_pad,
                               n.id || ' node ' || to_json(n.own_ident) || ' ' || substr(e.token, 34)
                           ) || ' ' AND octet_length(e.token) <= 1100
                           AND octet_length(e.param) <= 7996 AND (e.enc IS NULL OR e.enc IN ('b64', 'json'))
                       THEN '"Type":"Return","Size":' || octet_length(e.param) || ',"To":' || to_json(e.node)
                           || ',"Token":' || to_json(substr(e.token, 34 + position(' ' IN substr(e.token, 34))))
                           || ',"From":' || to_json(n.own_ident) || coalesce(',"Enc":"' || e.enc || '"', '')
                           || ',"Id":' || nextval('messages._message_id')
                   END AS header
            FROM answers AS e LEFT JOIN targets AS n ON n.node = e.node
            ORDER BY e.ordinal OFFSET 0
        ) AS h
        OFFSET 0
    ) AS c;
    IF messages._nothing_is_due() IS NOT TRUE THEN
        PERFORM messages._log_command('return_many');
        PERFORM messages._schedule_housekeeping_if_due();
    END IF;
    RETURN '{"Err":"0","Answers":[' || coalesce(v_answers, '') || ']}';
END
$$;

COMMENT ON FUNCTION messages.return_many IS
    'Answer many requests in one call, each with its token. The arrays have one entry for each answer. Answers: for each of them, in order, null or the error that return returns. Errors: 50.';


CREATE OR REPLACE FUNCTION messages.return_error(
    node text,
    token text,
    reason text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._return(
        'return_error', node, token, reason, NULL,
        ',"Err":"56","Errstr":' || to_json(messages._error_text(56, VARIADIC '{}'))
    );
END
$$;

COMMENT ON FUNCTION messages.return_error IS
    'Answer that a request failed: the header of the answer has Err 56, and its body is the reason. Errors: 50, 54, 15, 14, 18, 19, 20, 17, 51.';
