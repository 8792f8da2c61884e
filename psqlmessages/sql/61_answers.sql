-- Answers: who was asked answers with the token received, and nobody else.

CREATE OR REPLACE FUNCTION messages._split_token(
    token text,
    OUT topic_id bigint,
    OUT mac text,
    OUT timeout text,
    OUT own text
)
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    v_crypt text := split_part(token, ' ', 1);
    v_topic text := CASE WHEN position('.' IN v_crypt) > 0 THEN split_part(v_crypt, '.', 1) END;
BEGIN
    timeout := split_part(token, ' ', 2);
    own := substr(token, length(v_crypt) + length(timeout) + 3);
    IF length(v_topic) NOT BETWEEN 1 AND 18 OR translate(v_topic, '0123456789', '') <> ''
        OR length(timeout) NOT BETWEEN 1 AND 10 OR translate(timeout, '0123456789', '') <> ''
        OR own = ''
    THEN
        RETURN;
    END IF;
    mac := CASE WHEN v_topic IS NULL THEN v_crypt ELSE substr(v_crypt, length(v_topic) + 2) END;
    IF length(mac) <> 32 OR translate(mac, '0123456789abcdef', '') <> '' THEN
        mac := NULL;
    END IF;
    topic_id := v_topic;
END
$$;

COMMENT ON FUNCTION messages._split_token IS
    'The parts of <crypt> <timeout> <token>, where crypt is the MAC, with the id of a topic in front where a topic was asked. mac is null where it is malformed.';


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
    v_fault json;
BEGIN
    PERFORM messages._log_command(command, node);
    SELECT * INTO v_me FROM messages._acting();
    IF v_me.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    PERFORM messages._evaluate_if_due();
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
    ELSIF NOT messages._is_known(node) THEN
        RETURN messages._error(19, node);
    END IF;
    SELECT c.id, c.session_id, s.channel INTO v_asker
    FROM psqlmessages_client AS c
    JOIN psqlmessages_session AS s ON s.id = c.session_id
    WHERE c.ident = node AND messages._has_rule(c.role, c.ident);
    IF v_token.topic_id IS NULL THEN
        v_answerer := 'node ' || to_json(v_me.ident);
    ELSIF messages._listens(v_me.id, v_token.topic_id) THEN
        v_answerer := 'topic ' || v_token.topic_id;
    END IF;
    IF v_token.mac IS DISTINCT FROM messages._mac(v_asker.id, v_answerer, v_token.timeout, v_token.own) THEN
        RETURN messages._error(20, v_me.ident, node, token);
    ELSIF messages._is_gone(v_asker.session_id) THEN
        RETURN messages._error(17, node);
    END IF;
    v_fault := messages._content_fault(NULL, enc, octet_length(param));
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    PERFORM messages._deliver(
        v_asker.channel, v_token.timeout::int,
        '"Type":"Return","Size":' || octet_length(coalesce(param, '')) || ',"To":' || to_json(node)
            || ',"Token":' || to_json(v_token.own) || ',"From":' || to_json(v_me.ident)
            || CASE WHEN enc <> '' THEN ',"Enc":"' || enc || '"' ELSE '' END || failure,
        coalesce(param, ''), v_asker.id
    );
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._return IS
    'return and return_error: check the token and deliver. failure: what the header of a failure has besides.';


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
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_size int := octet_length(param);
    v_rest text := substr(token, 34);
    v_channel text;
    v_header text;
BEGIN
    -- The answer to a node: its seal is over all that follows it in the token.
    SELECT p.channel,
           '"Type":"Return","Size":' || v_size || ',"To":' || to_json(node)
               || ',"Token":' || to_json(substr(v_rest, position(' ' IN v_rest) + 1))
               || ',"From":' || to_json(p.own_ident) || coalesce(',"Enc":"' || enc || '"', '')
               || ',"Id":' || nextval('messages._message_id')
    INTO v_channel, v_header
    FROM messages._counterpart(node) AS p
    WHERE left(token, 33) = messages._sealed(
              p.inner_pad, p.outer_pad, p.id || ' node ' || to_json(p.own_ident) || ' ' || v_rest
          ) || ' '
      AND messages._is_settled()
      AND (p.is_of_own_session OR NOT pg_try_advisory_xact_lock_shared(1886612839, p.session_id))
      AND v_size <= 7996 AND octet_length(token) <= 1100 AND (enc IS NULL OR enc IN ('b64', 'json'));
    IF v_size + octet_length(v_header) <= 7996 THEN
        IF pg_notify(v_channel, '{' || v_header || E'}\n' || param) IS NULL THEN
            NULL;
        END IF;
    ELSE
        RETURN messages._return('return', node, token, param, enc, '');
    END IF;
    IF messages._is_evaluated() IS NOT TRUE THEN
        PERFORM messages._log_command('return', node);
        PERFORM messages._evaluate_if_due();
    END IF;
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.return IS
    'Answer who asked, with the token received: it is the only permission needed. enc: b64 or json, where the body is one. Errors: 50, 54, 15, 14, 18, 19, 20, 17, 55, 51.';


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
    'Answer that the request failed: the answer''s header has Err 56, its body is the reason. Errors: 50, 54, 15, 14, 18, 19, 20, 17, 51.';
