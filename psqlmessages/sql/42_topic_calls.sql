-- Public functions to join, leave, observe and inspect topics.

CREATE OR REPLACE FUNCTION messages.topic_listen(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._join_topic('listen', 'R', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_listen IS
    'Receive the messages of a topic from now on. Already: 1 if the node already listened. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_unlisten(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._leave_topic('listen', 'R', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_unlisten IS
    'Stop receiving the messages of a topic. Already: 1 if the node did not listen. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_notify(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._join_topic('notify', 'W', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_notify IS
    'Register as a sender of a topic, which topic_send requires. Already: 1 if the node already was a sender. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_unnotify(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._leave_topic('notify', 'W', topic);
END
$$;

COMMENT ON FUNCTION messages.topic_unnotify IS
    'Deregister as a sender of a topic. Already: 1 if the node was not a sender. Errors: 50, 54, 1, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages.topic_auth(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_answer json;
BEGIN
    PERFORM messages._log_command('topic_auth', topic);
    PERFORM messages._schedule_housekeeping();
    v_answer := messages._acting_node_topic_error(topic, '', false);
    IF v_answer IS NULL THEN
        SELECT row_to_json(n) INTO v_answer
        FROM (
            SELECT '0' AS "Err",
                   coalesce(array_agg(DISTINCT a.ident) FILTER (WHERE a.mode IN ('W', 'RW')), '{}') AS "Notifiers",
                   coalesce(array_agg(DISTINCT a.ident) FILTER (WHERE a.mode IN ('R', 'RW')), '{}') AS "Listeners"
            FROM psqlmessages_auth AS a
            WHERE a.type = 'Topic' AND a.dest = ANY (messages._patterns(topic))
        ) AS n;
    END IF;
    RETURN v_answer;
END
$$;

COMMENT ON FUNCTION messages.topic_auth IS
    'List the nodes that rules allow to send to a topic (Notifiers) and to listen (Listeners): names and patterns as in the rules. Errors: 50, 54, 1, 9, 2.';


CREATE OR REPLACE FUNCTION messages._topic_status(
    topic text
)
RETURNS json
LANGUAGE sql
STABLE
AS $$
    SELECT row_to_json(n)
    FROM (
        SELECT '0' AS "Err",
               coalesce(array_agg(c.ident ORDER BY c.ident) FILTER (WHERE m.kind = 'notify'), '{}') AS "Notifiers",
               coalesce(array_agg(c.ident ORDER BY c.ident) FILTER (WHERE m.kind = 'listen'), '{}') AS "Listeners"
        FROM psqlmessages_topic AS t
        JOIN psqlmessages_membership AS m ON m.topic_id = t.id
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        WHERE t.name = topic AND c.session_id IN (SELECT messages._live_sessions())
    ) AS n
$$;

COMMENT ON FUNCTION messages._topic_status IS
    'The nodes that send and listen to a topic, as topic_status and topic_status_as answer them.';


CREATE OR REPLACE FUNCTION messages.topic_status(
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._log_command('topic_status', topic);
    PERFORM messages._schedule_housekeeping();
    RETURN coalesce(messages._acting_node_topic_error(topic, '', false), messages._topic_status(topic));
END
$$;

COMMENT ON FUNCTION messages.topic_status IS
    'List the connected nodes that are senders (Notifiers) and listeners (Listeners) of a topic. Errors: 50, 54, 1, 9, 2.';


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
    RETURN coalesce(messages._topic_error_as(ident, topic, ''), messages._topic_status(topic));
END
$$;

COMMENT ON FUNCTION messages.topic_status_as IS
    'Call topic_status as a node without a session. Errors: 54, 1, 15, 16, 9, 2.';


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
    v_timeout text;
    v_topics bigint[];
BEGIN
    -- With an older snapshot, the node would not observe topics created since.
    PERFORM messages._require_read_committed('topic_observe');
    -- Take the rules lock exclusively: a topic that is created at the same time would not get this observer.
    v_error := messages._begin_topic_change('topic_observe', topic, 'O', false, true);
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_node FROM messages._acting_node();
    INSERT INTO psqlmessages_observation (client_id, pattern, channel)
    VALUES (v_node.id, topic, v_node.channel)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    -- All state changes wait for the rules lock meanwhile, so limit the wait for topics.
    v_timeout := messages._limit_lock_wait();
    v_topics := ARRAY(SELECT messages._topics_like(topic));
    PERFORM messages._lock_topics(v_topics);
    -- The same result as by _rebuild_topics. At 100,000 topics it takes a third of the time.
    UPDATE psqlmessages_topic AS t
    SET channels = t.channels || v_node.channel
    WHERE t.id = ANY (v_topics) AND v_node.channel <> ALL (t.channels);
    PERFORM set_config('lock_timeout', v_timeout, true);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_observe IS
    'Receive the messages of a topic, or of all topics that match a pattern, without being counted as a listener. Needs mode O. Already: 1 if the node observed it. Errors: 50, 54, 1, 9, 2, 3.';


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
    v_error := messages._begin_topic_change('topic_unobserve', topic, 'O', false);
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_node FROM messages._acting_node();
    v_topics := ARRAY(SELECT messages._topics_like(topic));
    PERFORM messages._lock_topics(v_topics);
    DELETE FROM psqlmessages_observation AS o WHERE o.client_id = v_node.id AND o.pattern = topic;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._remove_channel(v_topics, v_node.channel);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.topic_unobserve IS
    'End topic_observe of the same topic or pattern. Already: 1 if the node did not observe it. Errors: 50, 54, 1, 9, 2, 3.';
