-- Sending as a node without a session: from web workers and through transaction poolers.

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
    v_client record;
    v_topic psqlmessages_topic;
    v_is_kept boolean;
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
    SELECT c.id, c.session_id INTO v_client
    FROM psqlmessages_client AS c WHERE c.ident = topic_send_as.ident AND c.role = session_user;
    IF token <> '' AND (v_client.id IS NULL OR messages._is_gone(v_client.session_id)) THEN
        RETURN messages._error(17, ident);
    END IF;
    v_fault := messages._content_fault(token, enc, octet_length(message));
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    v_is_kept := (v_topic.subscriptions > 0 OR v_topic.retention > 0)
        AND messages._store_sent(topic, ident, ARRAY[message], enc);
    IF v_topic.listeners = 0 AND NOT v_is_kept THEN
        RETURN messages._error(10, topic);
    END IF;
    SELECT r.timeout INTO v_timeout FROM messages._rights(session_user, ident, 'Topic', topic) AS r;
    IF v_timeout IS NULL THEN
        -- The last rule for it went away this moment.
        RETURN messages._error(2, 'Topic', topic);
    END IF;
    v_header := messages._topic_header(
        ',"To":' || to_json(topic) || ',"From":' || to_json(ident),
        v_topic.id, v_client.id, v_timeout, token, enc
    );
    PERFORM messages._notify_all(v_topic.id, v_timeout, v_header, v_topic.channels, ARRAY[message], octet_length(message));
    PERFORM messages._evaluate_if_due();
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_send_as IS
    'Send as a node without a session: no init, no topic_notify; works through transaction poolers. With a token the node must be connected by the same role: it gets the answers. Errors: 54, 1, 15, 16, 9, 2, 3, 17, 55, 51, 10.';
