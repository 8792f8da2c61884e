-- Sending to topics. A send reads one membership row, with the permission and the fixed part of the header, and one
-- topic row, with the channels to notify. The common case is one statement, because PL/pgSQL prepares each expression
-- again in every transaction.

CREATE OR REPLACE FUNCTION messages._topic_route(
    topic text
)
RETURNS TABLE (
    topic_id bigint,
    client_id bigint,
    timeout int,
    header text,
    listeners int,
    channels text[],
    subscriptions int,
    retention int
)
LANGUAGE sql
STABLE
AS $$
    SELECT t.id, m.client_id, m.timeout, m.header, t.listeners, t.channels, t.subscriptions, t.retention
    FROM psqlmessages_topic AS t
    JOIN psqlmessages_membership AS m ON m.topic_id = t.id
    WHERE t.name = topic
      AND m.client_id::text = current_setting('messages.node', true)
      AND m.kind = 'notify'
      AND m.channel = current_setting('messages.channel', true)
      AND m.pid = pg_backend_pid()
      AND m.role = session_user
$$;

COMMENT ON FUNCTION messages._topic_route IS
    'What a send of the acting node to a topic needs: permission, header and channels. No row if the node is not registered as a sender. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._is_too_large(
    size bigint
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN size > (SELECT s.max_body_bytes FROM messages._settings AS s);
END
$$;

COMMENT ON FUNCTION messages._is_too_large IS
    'Whether a body of this many bytes exceeds the setting MAX_BODY_BYTES.';


CREATE OR REPLACE FUNCTION messages._content_error(
    token text,
    enc text,
    size bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF octet_length(token) > 1000 THEN
        RETURN messages._error(54);
    ELSIF enc NOT IN ('b64', 'json') THEN
        RETURN messages._error(55, left(enc, 100));
    ELSIF size > 8192 AND messages._is_too_large(size) THEN
        RETURN messages._error(
            51, size::text, (SELECT s.max_body_bytes::text FROM messages._settings AS s)
        );
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._content_error IS
    'The error of a token (54), an encoding (55) or a body of this many bytes (51), or null. MAX_BODY_BYTES is at least 8,192.';


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
            topic_id || '.' || messages._reply_token_mac(client_id, 'topic ' || topic_id, timeout::text, token)
            || ' ' || timeout || ' ' || token
        ) ELSE '' END
        || CASE WHEN enc <> '' THEN ',"Enc":"' || enc || '"' ELSE '' END;
END
$$;

COMMENT ON FUNCTION messages._topic_header IS
    'Add token and encoding to the fixed part of a topic header.';


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
    v_topic bigint;
    v_timeout int;
    v_header text;
    v_channels text[];
    v_channel text;
    v_ends_here boolean;
    v_payload text;
BEGIN
    -- One statement and one condition for the common case: each function in them costs a quarter of a microsecond, and
    -- each further expression one microsecond. v_header is null on an error, and if this is not the common case.
    -- v_ends_here: the topic has one channel, and nothing else is due.
    SELECT r.topic_id, r.timeout, r.channels, r.channels[1], r.channels[2] IS NULL AND messages._nothing_is_due(),
           CASE
               WHEN r.listeners > 0 AND r.subscriptions = 0 AND r.retention = 0 AND token IS NULL
                   AND messages._rules_are_applied()
               THEN '{"Type":"Topic","Size":' || octet_length(message) || r.header
                   || CASE
                       WHEN enc IS NULL THEN ',"Id":'
                       WHEN enc = 'json' THEN ',"Enc":"json","Id":'
                       WHEN enc = 'b64' THEN ',"Enc":"b64","Id":'
                   END || nextval('messages._message_id') || E'}\n'
           END
    INTO v_topic, v_timeout, v_channels, v_channel, v_ends_here, v_header
    FROM messages._topic_route(topic) AS r;
    -- A body of 6600 bytes fits into a notification even with the longest header.
    IF v_header IS NOT NULL AND octet_length(message) <= 6600
        AND pg_notify(v_channel, v_header || message) IS NOT NULL AND v_ends_here
    THEN
        -- A json constant: text would be parsed each time.
        RETURN '{"Err":"0"}'::json;
    ELSIF v_header IS NULL OR octet_length(message) > 8192 AND messages._is_too_large(octet_length(message)) THEN
        RETURN messages._topic_send('topic_send', topic, ARRAY[message], token, enc);
    ELSIF octet_length(v_header) + octet_length(message) <= 7999 THEN
        v_payload := v_header || message;
    ELSE
        v_payload := messages._store_body(
            v_timeout, substr(v_header, 2, length(v_header) - 3), message, v_topic, NULL
        );
    END IF;
    -- If this notifies the first channel again, PostgreSQL delivers the equal notifications of a transaction only once.
    FOREACH v_channel IN ARRAY v_channels LOOP
        -- IF and not PERFORM: a simple expression takes a third of the time.
        IF pg_notify(v_channel, v_payload) IS NULL THEN
            CONTINUE;
        END IF;
    END LOOP;
    IF messages._nothing_is_due() IS NOT TRUE THEN
        PERFORM messages._log_command('topic_send', topic);
        PERFORM messages._schedule_housekeeping_if_due();
    END IF;
    RETURN '{"Err":"0"}'::json;
END
$$;

COMMENT ON FUNCTION messages.topic_send(text, text, text, text) IS
    'Send a message to every listener of a topic at commit, and store it if a subscription or a retention needs it. token: lets listeners answer with return. enc: the encoding of the body, b64 or json. Errors: 50, 54, 1, 9, 2, 3, 21, 55, 51, 10.';


CREATE OR REPLACE FUNCTION messages._topic_send(
    command text,
    topic text,
    bodies text[],
    token text,
    enc text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_route record;
    v_node record;
    v_largest int;
    v_error json;
    v_is_stored boolean;
BEGIN
    PERFORM messages._log_command(command, topic);
    SELECT * INTO v_route FROM messages._topic_route(topic);
    IF NOT FOUND THEN
        SELECT * INTO v_node FROM messages._acting_node();
        IF v_node.id IS NULL THEN
            RETURN messages._error(50);
        ELSIF octet_length(token) > 1000 THEN
            RETURN messages._error(54);
        END IF;
        RETURN coalesce(
            messages._topic_error(v_node.role, v_node.ident, topic, 'W', false),
            messages._error(21, v_node.ident, topic)
        );
    END IF;
    IF NOT messages._rules_are_applied() THEN
        -- The membership row may be older than a change of rules.
        v_error := messages._acting_node_topic_error(topic, 'W', false);
        IF v_error IS NOT NULL THEN
            RETURN v_error;
        END IF;
    END IF;
    SELECT max(octet_length(b.body)) INTO v_largest FROM unnest(bodies) AS b (body);
    v_error := messages._content_error(token, enc, v_largest);
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    v_is_stored := (v_route.subscriptions > 0 OR v_route.retention > 0) AND messages._store_if_needed(
        topic, (SELECT c.ident FROM psqlmessages_client AS c WHERE c.id = v_route.client_id), bodies, enc
    );
    IF v_route.listeners = 0 AND NOT v_is_stored THEN
        RETURN messages._error(10, topic);
    END IF;
    PERFORM messages._notify_all(
        v_route.topic_id, v_route.timeout,
        messages._topic_header(
            v_route.header, v_route.topic_id, v_route.client_id, v_route.timeout, token, enc
        ),
        v_route.channels, bodies, v_largest
    );
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._topic_send IS
    'The implementation of topic_send and topic_send_many: send any number of bodies of any size, with or without a token, or return the error.';


CREATE OR REPLACE FUNCTION messages._notify_all(
    topic_id bigint,
    timeout int,
    header text,
    channels text[],
    bodies text[],
    largest int
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_header text := header || ',"Id":';
    v_channel text;
BEGIN
    IF NOT messages._rules_are_applied() THEN
        IF EXISTS (SELECT FROM messages._unfinished AS u WHERE u.topic_id = _notify_all.topic_id) THEN
            channels := messages._allowed_channels(topic_id);
        END IF;
    END IF;
    IF largest + octet_length(header) <= 7930 AND cardinality(channels) = 1 THEN
        -- All payloads fit into notifications of 7,999 bytes. With one channel they need not be materialized, which
        -- takes two thirds of the time.
        v_channel := channels[1];
        PERFORM count(pg_notify(v_channel, '{"Type":"Topic","Size":' || octet_length(coalesce(b.body, ''))
            || v_header || nextval('messages._message_id') || E'}\n' || coalesce(b.body, '')))
        FROM unnest(bodies) AS b (body);
    ELSE
        -- MATERIALIZED computes each payload, with its Id, once for all channels.
        PERFORM (
            WITH m (payload) AS MATERIALIZED (
                SELECT CASE
                    WHEN octet_length(p.header) + octet_length(p.body) <= 7996 THEN '{' || p.header || E'}\n' || p.body
                    ELSE messages._store_body(timeout, p.header, p.body, topic_id, NULL)
                END
                FROM (
                    SELECT '"Type":"Topic","Size":' || octet_length(coalesce(b.body, ''))
                        || v_header || nextval('messages._message_id') AS header, coalesce(b.body, '') AS body
                    FROM unnest(bodies) AS b (body) OFFSET 0
                ) AS p
            )
            SELECT count(pg_notify(c.channel, m.payload)) FROM m CROSS JOIN unnest(channels) AS c (channel)
        );
    END IF;
END
$$;

COMMENT ON FUNCTION messages._notify_all IS
    'Notify every channel of every body, in order; store a body over the NOTIFY limit as a large body. largest: the size of the largest body in bytes.';


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
    v_answer json := messages._topic_send('topic_send_many', topic, messages, token, enc);
BEGIN
    IF v_answer ->> 'Err' <> '0' THEN
        RETURN v_answer;
    END IF;
    RETURN ('{"Err":"0","Count":' || coalesce(cardinality(messages), 0) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.topic_send_many IS
    'Send many bodies to a topic in one call, with one permission check. Count: the number of bodies. On an error nothing is sent. Errors: 50, 54, 1, 9, 2, 3, 21, 55, 51, 10.';

-- Sending as a node without a session, from web workers and through transaction poolers.

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
    v_error json;
    v_client record;
    v_topic psqlmessages_topic;
    v_is_stored boolean;
    v_timeout int;
    v_header text;
BEGIN
    PERFORM messages._log_command('topic_send_as', ident, topic);
    IF octet_length(token) > 1000 THEN
        RETURN messages._error(54);
    END IF;
    v_error := messages._topic_error_as(ident, topic, 'W');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT c.id, c.session_id INTO v_client
    FROM psqlmessages_client AS c WHERE c.ident = topic_send_as.ident AND c.role = session_user;
    IF token <> '' AND (v_client.id IS NULL OR messages._session_has_ended(v_client.session_id)) THEN
        RETURN messages._error(17, ident);
    END IF;
    v_error := messages._content_error(token, enc, octet_length(message));
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    v_is_stored := (v_topic.subscriptions > 0 OR v_topic.retention > 0)
        AND messages._store_if_needed(topic, ident, ARRAY[message], enc);
    IF v_topic.listeners = 0 AND NOT v_is_stored THEN
        RETURN messages._error(10, topic);
    END IF;
    SELECT r.timeout INTO v_timeout FROM messages._permissions(session_user, ident, 'Topic', topic) AS r;
    IF v_timeout IS NULL THEN
        -- The last rule has just been removed.
        RETURN messages._error(2, 'Topic', topic);
    END IF;
    v_header := messages._topic_header(
        ',"To":' || to_json(topic) || ',"From":' || to_json(ident),
        v_topic.id, v_client.id, v_timeout, token, enc
    );
    PERFORM messages._notify_all(
        v_topic.id, v_timeout, v_header, v_topic.channels, ARRAY[message], octet_length(message)
    );
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_send_as(text, text, text, text, text) IS
    'Send as a node without a session: needs no init and no topic_notify, and works through transaction poolers. With a token, the node must be connected by the same role, because it receives the answers. Errors: 54, 1, 15, 16, 9, 2, 3, 17, 55, 51, 10.';
