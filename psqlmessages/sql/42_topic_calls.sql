-- The public topic functions that do not send.

CREATE OR REPLACE FUNCTION messages.topic_listen(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._join('listen', 'R', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_listen IS
    'Receive the messages of a topic from now on. Already: 1 where the node was listening. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_unlisten(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._leave('listen', 'R', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_unlisten IS
    'Receive no more of a topic. Already: 1 where the node was not listening. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_notify(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._join('notify', 'W', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_notify IS
    'Register as a sender of a topic: needed before topic_send. Already: 1 where the node was one. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_unnotify(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._leave('notify', 'W', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_unnotify IS
    'Be a sender of a topic no more. Already: 1 where the node was none. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages._topic_nodes_answer(
    notifiers text[],
    listeners text[]
)
RETURNS json
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT (
        '{"Err":"0","Notifiers":' || to_json(notifiers) || ',"Listeners":' || to_json(listeners) || '}'
    )::json
$$;

COMMENT ON FUNCTION messages._topic_nodes_answer IS
    'The answer of topic_auth and topic_status.';


CREATE OR REPLACE FUNCTION messages._topic_read_error(
    command text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_node record;
BEGIN
    PERFORM messages._log_command(command, topic);
    SELECT * INTO v_node FROM messages._acting();
    IF v_node.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    PERFORM messages._schedule_housekeeping();
    RETURN messages._topic_error(v_node.role, v_node.ident, topic, '', false);
END
$$;

COMMENT ON FUNCTION messages._topic_read_error IS
    'What topic_auth and topic_status begin with: the error that forbids to look, or null.';


CREATE OR REPLACE FUNCTION messages.topic_auth(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_answer json := messages._topic_read_error('topic_auth', topic);
BEGIN
    IF v_answer IS NULL THEN
        SELECT messages._topic_nodes_answer(
            coalesce(array_agg(DISTINCT a.ident::text) FILTER (WHERE a.mode IN ('W', 'RW')), '{}'),
            coalesce(array_agg(DISTINCT a.ident::text) FILTER (WHERE a.mode IN ('R', 'RW')), '{}')
        )
        INTO v_answer
        FROM psqlmessages_auth AS a
        WHERE a.type = 'Topic' AND a.dest = ANY (messages._patterns(topic));
    END IF;
    RETURN v_answer;
END
$$;

COMMENT ON FUNCTION messages.topic_auth IS
    'Who is authorized to send to a topic and to listen; idents as the rules hold them, patterns too. Errors: 50, 54, 1, 9, 2.';


CREATE OR REPLACE FUNCTION messages._topic_nodes(
    topic text
)
RETURNS json
LANGUAGE sql
STABLE
AS $$
    SELECT messages._topic_nodes_answer(
        coalesce(array_agg(c.ident::text ORDER BY c.ident) FILTER (WHERE m.kind = 'notify'), '{}'),
        coalesce(array_agg(c.ident::text ORDER BY c.ident) FILTER (WHERE m.kind = 'listen'), '{}')
    )
    FROM psqlmessages_topic AS t
    JOIN psqlmessages_membership AS m ON m.topic_id = t.id
    JOIN psqlmessages_client AS c ON c.id = m.client_id
    WHERE t.name = topic AND c.session_id IN (SELECT messages._live_sessions())
$$;

COMMENT ON FUNCTION messages._topic_nodes IS
    'The answer of topic_status and topic_status_as.';


CREATE OR REPLACE FUNCTION messages.topic_status(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN coalesce(messages._topic_read_error('topic_status', topic), messages._topic_nodes(topic));
END
$$;

COMMENT ON FUNCTION messages.topic_status IS
    'Who sends to a topic and who listens now. Errors: 50, 54, 1, 9, 2.';


CREATE OR REPLACE FUNCTION messages.topic_status_as(
    ident text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._log_command('topic_status_as', ident, topic);
    RETURN coalesce(
        messages._client_error(ident, topic),
        messages._topic_error(session_user, ident, topic, '', false),
        messages._topic_nodes(topic)
    );
END
$$;

COMMENT ON FUNCTION messages.topic_status_as IS
    'topic_status as a node without a session. Errors: 54, 1, 15, 16, 9, 2.';


CREATE OR REPLACE FUNCTION messages._close_to_observe()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    -- All later calls wait behind this one: better an error than a standstill.
    v_timeout text := messages._bound_waits();
BEGIN
    BEGIN
        LOCK TABLE messages._gate IN EXCLUSIVE MODE;
    EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'cannot observe now: a transaction that called init, deinit or a topic function is still open'
            USING ERRCODE = 'lock_not_available',
                HINT = 'End it, and try again: psqlmessages doctor names open transactions.';
    END;
    PERFORM set_config('lock_timeout', v_timeout, true);
    PERFORM setval('messages._observation_xact', pg_current_xact_id()::text::bigint);
END
$$;

COMMENT ON FUNCTION messages._close_to_observe IS
    'Wait for state changes under way (lock_timeout, or 10 s), and hold up new ones until the commit.';


CREATE OR REPLACE FUNCTION messages.topic_observe(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_node record;
    v_error json;
    v_patience text;
BEGIN
    -- An older snapshot would miss topics, and nothing could tell it so.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'topic_observe needs a transaction in READ COMMITTED'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    -- Alone at the gate: a topic made meanwhile would not know of this observer.
    v_error := messages._begin_topic_change('topic_observe', topic, 'O', false, 'close');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_node FROM messages._acting();
    INSERT INTO psqlmessages_observation (client_id, pattern, channel)
    VALUES (v_node.id, topic, v_node.channel)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    -- The gate is closed, and all wait.
    v_patience := messages._bound_waits();
    PERFORM messages._lock_topics(ARRAY(SELECT messages._topics_like(topic)));
    PERFORM messages._rebuild_topics(ARRAY(SELECT messages._topics_like(topic)));
    PERFORM set_config('lock_timeout', v_patience, true);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_observe IS
    'Receive the messages of a topic, or of all that a pattern means, without counting as a listener. Needs mode O. Already: 1 where it was so. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_unobserve(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_node record;
    v_error json;
    v_topics bigint[];
BEGIN
    v_error := messages._begin_topic_change('topic_unobserve', topic, 'O', false, 'share');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_node FROM messages._acting();
    v_topics := ARRAY(SELECT messages._topics_like(topic));
    PERFORM messages._lock_topics(v_topics);
    DELETE FROM psqlmessages_observation AS o WHERE o.client_id = v_node.id AND o.pattern = topic;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._rebuild_topics(v_topics);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_unobserve IS
    'Undo topic_observe, named by the same topic or pattern. Already: 1 where it was not. Errors: 50, 54, 1, 9, 2, 3.';
