-- Sends: the hot path. A send reads one membership row, which says what the node may do and holds
-- the fixed part of the header, and one topic row, which holds the channels to notify.

CREATE OR REPLACE FUNCTION messages._route(
    topic text,
    OUT topic_id bigint,
    OUT client_id bigint,
    OUT ident text,
    OUT timeout int,
    OUT header text,
    OUT listeners int,
    OUT channels text[]
)
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    SELECT t.id, m.client_id, t.listeners, t.channels, m.timeout, m.header
    INTO topic_id, client_id, listeners, channels, timeout, header
    FROM psqlmessages_topic AS t
    JOIN psqlmessages_membership AS m ON m.topic_id = t.id
    WHERE t.name = topic
      AND m.client_id = messages._node_id()
      AND m.kind = 'notify'
      AND m.channel = current_setting('messages.channel', true)
      AND m.pid = pg_backend_pid()
      AND m.role = session_user;
END
$$;

COMMENT ON FUNCTION messages._route IS
    'What the acting node needs to send to a topic; all columns null where it is no notifier.';


CREATE OR REPLACE FUNCTION messages._send_fault(
    topic text,
    token text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_node record;
BEGIN
    SELECT * INTO v_node FROM messages._acting();
    IF v_node.id IS NULL THEN
        RETURN messages._error(50);
    ELSIF octet_length(token) > 1000 THEN
        RETURN messages._error(54);
    END IF;
    RETURN coalesce(
        messages._topic_fault(v_node.role, v_node.ident, topic, 'W', false),
        messages._error(21, v_node.ident, topic)
    );
END
$$;

COMMENT ON FUNCTION messages._send_fault IS
    'Why the acting node, without a route, may not send to a topic.';


CREATE OR REPLACE FUNCTION messages._content_fault(
    token text,
    enc text,
    size bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_max bigint;
BEGIN
    IF octet_length(token) > 1000 THEN
        RETURN messages._error(54);
    ELSIF enc NOT IN ('b64', 'json') THEN
        RETURN messages._error(55, left(enc, 100));
    ELSIF size > 8192 THEN
        SELECT s.max_body_bytes INTO v_max FROM messages._settings AS s;
        IF size > v_max THEN
            RETURN messages._error(51, size::text, v_max::text);
        END IF;
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._content_fault IS
    'Errors 54, 55 and 51 of a token, an encoding and a body of this many bytes, or null. The maximum is never under 8,192.';


CREATE OR REPLACE FUNCTION messages._topic_header(
    header text,
    topic_id bigint,
    client_id bigint,
    timeout int,
    token text,
    enc text
)
RETURNS text
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN header
        || CASE WHEN token <> '' THEN ',"Token":' || to_json(
            topic_id || '.' || messages._mac(client_id, 'topic ' || topic_id, timeout, token)
            || ' ' || timeout || ' ' || token
        ) ELSE '' END
        || CASE WHEN enc <> '' THEN ',"Enc":"' || enc || '"' ELSE '' END;
END
$$;

COMMENT ON FUNCTION messages._topic_header IS
    'The fixed part of a topic header with token and encoding added.';


CREATE OR REPLACE FUNCTION messages.topic_send(
    topic text,
    message text,
    token text DEFAULT NULL,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_route record;
    v_size int := octet_length(message);
    v_fault json;
    v_header text;
    v_payload text;
    v_channel text;
BEGIN
    IF current_setting('client_min_messages') ^@ 'debug' THEN
        PERFORM messages._log_command('topic_send', topic);
    END IF;
    SELECT * INTO v_route FROM messages._route(topic);
    IF v_route.topic_id IS NULL THEN
        RETURN messages._send_fault(topic, token);
    END IF;
    IF v_size > 8192 OR token IS NOT NULL OR enc IS NOT NULL THEN
        v_fault := messages._content_fault(token, enc, v_size);
        IF v_fault IS NOT NULL THEN
            RETURN v_fault;
        END IF;
        v_route.header := messages._topic_header(
            v_route.header, v_route.topic_id, v_route.client_id, v_route.timeout, token, enc
        );
    END IF;
    IF v_route.listeners = 0 THEN
        RETURN messages._error(10, topic);
    END IF;
    v_header := '"Type":"Topic","Size":' || coalesce(v_size, 0) || v_route.header
        || ',"Id":' || nextval('messages._message_id');
    IF octet_length(v_header) + v_size > 7996 THEN
        v_payload := messages._keep(v_route.timeout, v_header, message, v_route.topic_id, NULL);
    ELSE
        v_payload := '{' || v_header || E'}\n' || coalesce(message, '');
    END IF;
    FOREACH v_channel IN ARRAY v_route.channels LOOP
        PERFORM pg_notify(v_channel, v_payload);
    END LOOP;
    IF current_setting('messages.evaluated', true)
        IS DISTINCT FROM extract(epoch FROM clock_timestamp())::bigint::text
    THEN
        PERFORM messages._schedule_evaluation();
    END IF;
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_send IS
    'Send to every listener of a topic, at commit. token: receivers may answer with it. enc: b64 or json, where the body is one. Errors: 50, 54, 1, 9, 2, 3, 21, 55, 51, 10.';


CREATE OR REPLACE FUNCTION messages._send_many(
    topic_id bigint,
    timeout int,
    header text,
    channels text[],
    messages text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF (SELECT max(octet_length(b.body)) FROM unnest(messages) AS b (body)) + octet_length(header) <= 7930 THEN
        PERFORM pg_notify(c.channel, m.payload)
        FROM (
            SELECT '{"Type":"Topic","Size":' || octet_length(coalesce(b.body, '')) || header
                || ',"Id":' || nextval('messages._message_id') || E'}\n' || coalesce(b.body, '')
            FROM unnest(messages) AS b (body)
            OFFSET 0
        ) AS m (payload)
        CROSS JOIN unnest(channels) AS c (channel);
    ELSE
        PERFORM pg_notify(c.channel, m.payload)
        FROM (
            SELECT messages._topic_payload(topic_id, timeout, header, coalesce(b.body, ''))
            FROM unnest(messages) AS b (body)
            OFFSET 0
        ) AS m (payload)
        CROSS JOIN unnest(channels) AS c (channel);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._send_many IS
    'Notify every channel of every body, in order, in one statement.';


CREATE OR REPLACE FUNCTION messages._topic_payload(
    topic_id bigint,
    timeout int,
    header text,
    message text
)
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
    v_header text := '"Type":"Topic","Size":' || octet_length(message) || header
        || ',"Id":' || nextval('messages._message_id');
BEGIN
    IF octet_length(v_header) + octet_length(message) > 7996 THEN
        RETURN messages._keep(timeout, v_header, message, topic_id, NULL);
    END IF;
    RETURN '{' || v_header || E'}\n' || message;
END
$$;

COMMENT ON FUNCTION messages._topic_payload IS
    'The payload of one topic message; a body over the limit is kept.';


CREATE OR REPLACE FUNCTION messages.topic_send_many(
    topic text,
    messages text[],
    token text DEFAULT NULL,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_route record;
    v_fault json;
BEGIN
    PERFORM messages._log_command('topic_send_many', topic);
    SELECT * INTO v_route FROM messages._route(topic);
    IF v_route.topic_id IS NULL THEN
        RETURN messages._send_fault(topic, token);
    END IF;
    v_fault := messages._content_fault(
        token, enc, (SELECT max(octet_length(b.body)) FROM unnest(messages) AS b (body))
    );
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    ELSIF v_route.listeners = 0 THEN
        RETURN messages._error(10, topic);
    END IF;
    PERFORM messages._send_many(
        v_route.topic_id, v_route.timeout,
        messages._topic_header(
            v_route.header, v_route.topic_id, v_route.client_id, v_route.timeout, token, enc
        ),
        v_route.channels, messages
    );
    PERFORM messages._evaluate_if_due();
    RETURN ('{"Err":"0","Count":' || coalesce(array_length(messages, 1), 0) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.topic_send_many IS
    'Send many bodies to a topic in one call, checked once. Count: how many. Errors: as topic_send; then nothing is sent.';


CREATE OR REPLACE FUNCTION messages.topic_send_as(
    ident text,
    topic text,
    message text,
    token text DEFAULT NULL,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_fault json;
    v_client bigint;
    v_topic psqlmessages_topic;
    v_timeout int;
    v_header text;
BEGIN
    PERFORM messages._log_command('topic_send_as', ident, topic);
    IF length(ident) > 100 OR length(topic) > 100 OR octet_length(token) > 1000 THEN
        RETURN messages._error(54);
    ELSIF coalesce(topic, '') = '' THEN
        RETURN messages._error(1);
    ELSIF coalesce(ident, '') = '' THEN
        RETURN messages._error(15);
    ELSIF right(ident, 1) = '*' OR NOT messages._is_known(ident) THEN
        RETURN messages._error(16, ident);
    END IF;
    v_fault := messages._topic_fault(session_user, ident, topic, 'W', false);
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    SELECT c.id INTO v_client
    FROM psqlmessages_client AS c WHERE c.ident = topic_send_as.ident AND c.role = session_user;
    IF token <> '' AND v_client IS NULL THEN
        RETURN messages._error(17, ident);
    END IF;
    v_fault := messages._content_fault(token, enc, octet_length(message));
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    IF v_topic.listeners = 0 THEN
        RETURN messages._error(10, topic);
    END IF;
    SELECT r.timeout INTO v_timeout FROM messages._rights(session_user, ident, 'Topic', topic) AS r;
    v_header := messages._topic_header(
        ',"To":' || to_json(topic) || ',"From":' || to_json(ident),
        v_topic.id, v_client, v_timeout, token, enc
    );
    PERFORM messages._send_many(v_topic.id, v_timeout, v_header, v_topic.channels, ARRAY[message]);
    PERFORM messages._evaluate_if_due();
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_send_as IS
    'Send as a node without a session: no init, no topic_notify; works through transaction poolers. With a token the node must be connected by the same role: it gets the answers. Errors: 54, 1, 15, 16, 9, 2, 3, 17, 55, 51, 10.';


CREATE OR REPLACE FUNCTION messages._evaluate_if_due()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF current_setting('messages.evaluated', true)
        IS DISTINCT FROM extract(epoch FROM clock_timestamp())::bigint::text
    THEN
        PERFORM messages._schedule_evaluation();
    END IF;
END
$$;

COMMENT ON FUNCTION messages._evaluate_if_due IS
    'Schedule an evaluation unless this session did within this second. Compared as text: the setting is the caller''s to forge.';
