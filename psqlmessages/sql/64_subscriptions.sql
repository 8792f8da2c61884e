-- Subscriptions: a node's place in a topic's stream. It moves in the caller's transaction, and needs no session.

CREATE OR REPLACE FUNCTION messages._kept_until(
    topic_id bigint
)
RETURNS bigint
LANGUAGE sql
STABLE
AS $$
    SELECT greatest(
        (SELECT max(m.id) FROM psqlmessages_streammessage AS m WHERE m.topic_id = _kept_until.topic_id),
        (SELECT l.id FROM messages._stream_last AS l WHERE l.topic_id = _kept_until.topic_id)
    )
$$;

COMMENT ON FUNCTION messages._kept_until IS
    'Id of the last message of a topic, be it kept or gone; null where there was none.';


CREATE OR REPLACE FUNCTION messages._subscription_fault(
    ident text,
    topic text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN coalesce(
        messages._client_fault(ident, topic),
        messages._topic_fault(session_user, ident, topic, mode, false)
    );
END
$$;

COMMENT ON FUNCTION messages._subscription_fault IS
    'Why this role may not read, or end, that node''s subscription, or null. mode: R, or empty for any rule.';


CREATE OR REPLACE FUNCTION messages._start_subscription(
    ident text,
    topic psqlmessages_topic,
    timeout int
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_subscription psqlmessages_subscription;
    v_position bigint;
BEGIN
    PERFORM messages._share_gate();
    PERFORM messages._lock_topics(ARRAY[topic.id]);
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = _start_subscription.ident AND s.topic = topic.name FOR UPDATE;
    IF messages._is_alive(v_subscription.pinged_at, v_subscription.timeout) THEN
        -- Another connection of the node has started it meanwhile.
        RETURN;
    END IF;
    v_position := messages._horizon(topic.id);
    INSERT INTO psqlmessages_subscription AS s (ident, topic, position, timeout, started_at, pinged_at)
    VALUES (ident, topic.name, v_position, timeout, clock_timestamp(), clock_timestamp())
    ON CONFLICT ON CONSTRAINT subscription_is_unique DO UPDATE SET
        position = excluded.position,
        timeout = excluded.timeout,
        started_at = excluded.started_at,
        pinged_at = excluded.pinged_at,
        is_alive = true,
        is_recovered = coalesce(messages._kept_until(topic.id) <= s.position, true);
    PERFORM messages._rebuild_topics(ARRAY[topic.id]);
END
$$;

COMMENT ON FUNCTION messages._start_subscription IS
    'Begin a subscription from now on, or anew where it timed out: then it is recovered only if nothing was published meanwhile.';


CREATE OR REPLACE VIEW messages.stream_rows AS
SELECT m.id, ''::text AS topic, m.sender::text AS sender, m.payload, m.published_at, m.enc
FROM psqlmessages_streammessage AS m;

COMMENT ON VIEW messages.stream_rows IS
    'The form of the rows that subscribe returns.';


CREATE OR REPLACE FUNCTION messages._read(
    subscription psqlmessages_subscription,
    topic psqlmessages_topic,
    timeout int,
    max_rows int
)
RETURNS SETOF messages.stream_rows
LANGUAGE plpgsql
AS $$
DECLARE
    v_horizon bigint := messages._horizon(topic.id);
BEGIN
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT m.id, topic.name::text, m.sender::text, m.payload, m.published_at, m.enc
        FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = topic.id AND m.id > subscription.position AND m.id <= v_horizon
        ORDER BY m.id
        LIMIT max_rows
    ), moved AS (
        UPDATE psqlmessages_subscription AS s
        SET position = CASE
                WHEN (SELECT count(*) FROM found) = max_rows THEN (SELECT max(f.id) FROM found AS f)
                ELSE greatest(s.position, v_horizon)
            END,
            timeout = _read.timeout,
            pinged_at = clock_timestamp()
        WHERE s.id = subscription.id
    )
    SELECT * FROM found AS f ORDER BY f.id;
END
$$;

COMMENT ON FUNCTION messages._read IS
    'What came since the last call, oldest first; the position moves past it, and past what is not of this topic.';


CREATE OR REPLACE FUNCTION messages.subscribe(
    client_id text,
    topic text,
    timeout int,
    max_rows int DEFAULT 1000
)
RETURNS SETOF messages.stream_rows
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_fault json;
    v_topic psqlmessages_topic;
    v_subscription psqlmessages_subscription;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'subscribe needs a transaction in READ COMMITTED'
            USING ERRCODE = 'feature_not_supported',
                HINT = 'An older snapshot would pass over messages that were committed since.';
    END IF;
    PERFORM messages._log_command('subscribe', client_id, topic);
    v_fault := messages._subscription_fault(client_id, topic, 'R');
    IF v_fault IS NULL AND coalesce(timeout, 0) <= 0 THEN
        v_fault := messages._error(60, 'timeout');
    ELSIF v_fault IS NULL AND coalesce(max_rows, 0) <= 0 THEN
        v_fault := messages._error(60, 'max_rows');
    END IF;
    IF v_fault IS NOT NULL THEN
        PERFORM messages._raise(v_fault);
    END IF;
    -- Before any snapshot that reads: what a truncation moved is then seen where it went.
    LOCK TABLE psqlmessages_streammessage IN ACCESS SHARE MODE;
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = client_id AND s.topic = subscribe.topic FOR UPDATE;
    IF messages._is_alive(v_subscription.pinged_at, v_subscription.timeout) THEN
        RETURN QUERY SELECT * FROM messages._read(v_subscription, v_topic, timeout, max_rows);
    ELSE
        PERFORM messages._start_subscription(client_id, v_topic, timeout);
    END IF;
    PERFORM messages._evaluate_if_due();
END
$$;

COMMENT ON FUNCTION messages.subscribe IS
    'The first call subscribes from now on, for timeout seconds after each call; each further call returns what came since, oldest first, and moves on in this transaction. Errors: 54, 1, 15, 16, 9, 2, 3, 60.';


CREATE OR REPLACE FUNCTION messages.unsubscribe(
    client_id text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_fault json;
    v_topic bigint;
BEGIN
    PERFORM messages._log_command('unsubscribe', client_id, topic);
    v_fault := messages._subscription_fault(client_id, topic, '');
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    PERFORM messages._share_gate();
    -- The subscription first, as subscribe does; then the topic.
    DELETE FROM psqlmessages_subscription AS s WHERE s.ident = client_id AND s.topic = unsubscribe.topic;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    SELECT t.id INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic FOR NO KEY UPDATE;
    PERFORM messages._rebuild_topics(ARRAY[v_topic]);
    PERFORM messages._evaluate_if_due();
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.unsubscribe IS
    'End a subscription; nothing is kept for it any more. Already: 1 where there was none. Errors: 54, 1, 15, 16, 9, 2.';


CREATE OR REPLACE FUNCTION messages.subscription(
    client_id text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_fault json;
    v_topic psqlmessages_topic;
    v_subscription psqlmessages_subscription;
    v_is_alive boolean;
    v_backlog bigint := 0;
BEGIN
    PERFORM messages._log_command('subscription', client_id, topic);
    v_fault := messages._subscription_fault(client_id, topic, 'R');
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = client_id AND s.topic = subscription.topic;
    IF v_subscription.id IS NULL THEN
        RETURN messages._error(61, client_id, topic);
    END IF;
    v_is_alive := messages._is_alive(v_subscription.pinged_at, v_subscription.timeout);
    IF v_is_alive THEN
        SELECT count(*) INTO v_backlog FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = v_topic.id AND m.id > v_subscription.position;
    END IF;
    RETURN (
        '{"Err":"0","Recovered":' || to_json(
            CASE
                WHEN v_is_alive THEN v_subscription.is_recovered
                ELSE coalesce(messages._kept_until(v_topic.id) <= v_subscription.position, true)
            END
        )
        || ',"Since":' || to_json(v_subscription.started_at)
        || ',"Backlog":' || v_backlog
        || ',"Expires":' || to_json(v_subscription.pinged_at + make_interval(secs => v_subscription.timeout))
        || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.subscription IS
    'The state of a subscription. Recovered: false where it timed out and messages were missed; Since: when it began, or began anew; Backlog: messages that wait; Expires: when, if nobody calls subscribe. Errors: 54, 1, 15, 16, 9, 2, 3, 61.';


CREATE OR REPLACE FUNCTION messages.connect_stream(
    client_id text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_answer json := messages.init(client_id);
    v_topics text[];
BEGIN
    IF v_answer ->> 'Err' <> '0' THEN
        RETURN v_answer;
    END IF;
    -- It is back in time, so from now on nothing has been missed.
    UPDATE psqlmessages_subscription AS s SET is_recovered = true
    WHERE s.ident = client_id AND NOT s.is_recovered AND messages._is_alive(s.pinged_at, s.timeout);
    v_topics := ARRAY(
        SELECT s.topic::text FROM psqlmessages_subscription AS s
        WHERE s.ident = client_id AND messages._is_alive(s.pinged_at, s.timeout)
        ORDER BY s.topic
    );
    RETURN (
        left(v_answer::text, -1) || ',"Subscriptions":' || to_json(v_topics) || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.connect_stream IS
    'Register a node as init does, to be woken when there is something to read. Subscriptions: the topics of those that are alive. Errors: 54, 4, 5, 7, 8; 6 as a warning.';


CREATE OR REPLACE FUNCTION messages._rebuild_subscribed(
    nodes bigint[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_topics bigint[];
BEGIN
    v_topics := ARRAY(
        SELECT DISTINCT t.id
        FROM psqlmessages_client AS c
        JOIN psqlmessages_subscription AS s ON s.ident = c.ident AND s.is_alive
        JOIN psqlmessages_topic AS t ON t.name = s.topic
        WHERE c.id = ANY (nodes)
    );
    IF v_topics <> '{}' THEN
        PERFORM messages._lock_topics(v_topics);
        PERFORM messages._rebuild_topics(v_topics);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._rebuild_subscribed IS
    'These nodes came, or their rights changed: compute anew who is woken for the topics they subscribe to.';
