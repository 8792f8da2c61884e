-- Subscriptions: the durable position of a node in the stream of a topic. It moves in the transaction of the caller.

CREATE OR REPLACE FUNCTION messages._has_read_all(
    topic_id bigint,
    subscription psqlmessages_subscription
)
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce(
        greatest(
            (SELECT max(m.id) FROM psqlmessages_streammessage AS m WHERE m.topic_id = _has_read_all.topic_id),
            (SELECT l.id FROM messages._stream_last AS l WHERE l.topic_id = _has_read_all.topic_id)
        ) <= subscription.position,
        subscription.is_recovered
    )
$$;

COMMENT ON FUNCTION messages._has_read_all IS
    'Whether a dead subscription has passed the last message of its topic, stored or removed.';


CREATE OR REPLACE FUNCTION messages._topic_error_as(
    ident text,
    topic text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN coalesce(
        messages._ident_and_topic_error(ident, topic),
        messages._topic_error(session_user, ident, topic, mode, false)
    );
END
$$;

COMMENT ON FUNCTION messages._topic_error_as IS
    'Why this role may not use a topic as a node without a session (errors 54, 1, 15, 16, 9, 2, 3), or null. mode: as in _topic_error.';


CREATE OR REPLACE FUNCTION messages._lock_subscription(
    ident text,
    topic text,
    timeout int
)
RETURNS psqlmessages_subscription
LANGUAGE plpgsql
AS $$
DECLARE
    v_subscription psqlmessages_subscription;
BEGIN
    LOOP
        SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
        WHERE s.ident = _lock_subscription.ident AND s.topic = _lock_subscription.topic FOR UPDATE;
        IF FOUND THEN
            RETURN v_subscription;
        END IF;
        -- Wait for a transaction that makes or ends the subscription, then read it again.
        INSERT INTO psqlmessages_subscription (ident, topic, position, timeout, is_alive)
        VALUES (ident, topic, 0, timeout, false)
        ON CONFLICT DO NOTHING;
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._lock_subscription IS
    'Lock the row of a subscription; makes a dead one if there is none. Locks are taken in this order: subscription, gate, topic.';


CREATE OR REPLACE FUNCTION messages._start_subscription(
    ident text,
    topic text,
    timeout int
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_subscription psqlmessages_subscription;
    v_topic bigint;
    v_position bigint;
    v_error json;
    v_now timestamp with time zone;
BEGIN
    v_subscription := messages._lock_subscription(ident, topic, timeout);
    IF messages._is_alive(v_subscription) THEN
        -- Another connection of the node has just started it.
        RETURN;
    END IF;
    PERFORM messages._share_rules_lock();
    SELECT t.id INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic FOR NO KEY UPDATE;
    v_error := messages._topic_error(session_user, ident, topic, 'R', false);
    IF v_error IS NOT NULL THEN
        PERFORM messages._raise(v_error);
    END IF;
    v_position := greatest(v_subscription.position, messages._watermark(v_topic));
    v_now := clock_timestamp();
    UPDATE psqlmessages_subscription AS s
    SET position = v_position,
        timeout = _start_subscription.timeout,
        started_at = v_now,
        pinged_at = v_now,
        is_alive = true,
        is_recovered = v_subscription.position = 0 OR messages._has_read_all(v_topic, v_subscription)
    WHERE s.id = v_subscription.id;
    PERFORM messages._rebuild_topics(ARRAY[v_topic]);
END
$$;

COMMENT ON FUNCTION messages._start_subscription IS
    'Start a subscription now, or restart it after a timeout: it is recovered only if nothing was published since.';


CREATE OR REPLACE VIEW messages.stream_rows AS
SELECT m.id, ''::text AS topic, m.sender::text AS sender, m.payload, m.published_at, m.enc
FROM psqlmessages_streammessage AS m;

COMMENT ON VIEW messages.stream_rows IS
    'The row type of subscribe.';


CREATE OR REPLACE FUNCTION messages._read(
    subscription psqlmessages_subscription,
    topic_id bigint,
    timeout int,
    max_rows int
)
RETURNS SETOF messages.stream_rows
LANGUAGE plpgsql
AS $$
DECLARE
    v_watermark bigint := messages._watermark(topic_id);
BEGIN
    -- Values as subqueries: their change does not lead to a new plan.
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT m.id, subscription.topic::text, m.sender, m.payload, m.published_at, m.enc
        FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = (SELECT _read.topic_id)
          AND m.id > (SELECT subscription.position) AND m.id <= (SELECT v_watermark)
        ORDER BY m.id
        LIMIT (SELECT max_rows)
    ), moved AS (
        UPDATE psqlmessages_subscription AS s
        SET position = CASE
                WHEN (SELECT count(*) FROM found) = max_rows THEN (SELECT max(f.id) FROM found AS f)
                ELSE greatest(s.position, v_watermark)
            END,
            timeout = _read.timeout,
            -- If the clock was put back, housekeeping lowers this.
            pinged_at = greatest(s.pinged_at, clock_timestamp())
        WHERE s.id = subscription.id
    )
    SELECT * FROM found AS f ORDER BY f.id;
END
$$;

COMMENT ON FUNCTION messages._read IS
    'The messages since the last call, oldest first. The position moves past them, and past messages of other topics.';


CREATE OR REPLACE FUNCTION messages._subscribed_topics(
    nodes bigint[]
)
RETURNS bigint[]
LANGUAGE sql
STABLE
AS $$
    SELECT ARRAY(
        SELECT DISTINCT t.id
        FROM psqlmessages_client AS c
        JOIN psqlmessages_subscription AS s ON s.ident = c.ident AND s.is_alive
        JOIN psqlmessages_topic AS t ON t.name = s.topic
        WHERE c.id = ANY (nodes)
    )
$$;

COMMENT ON FUNCTION messages._subscribed_topics IS
    'The topics of the living subscriptions of these nodes.';


-- Public functions of subscriptions.

CREATE OR REPLACE FUNCTION messages._check_subscribe(
    client_id text,
    topic text,
    timeout int,
    max_rows int
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_error json;
BEGIN
    v_error := messages._topic_error_as(client_id, topic, 'R');
    IF v_error IS NULL AND coalesce(timeout, 0) <= 0 THEN
        v_error := messages._error(60, 'timeout');
    ELSIF v_error IS NULL AND coalesce(max_rows, 0) <= 0 THEN
        v_error := messages._error(60, 'max_rows');
    END IF;
    IF v_error IS NOT NULL THEN
        PERFORM messages._raise(v_error);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._check_subscribe IS
    'Raise the error if this role may not read as that node, or an argument is wrong.';


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
    v_can_read boolean;
    v_topic record;
    v_subscription psqlmessages_subscription;
BEGIN
    PERFORM messages._check_isolation('subscribe');
    PERFORM messages._log_command('subscribe', client_id, topic);
    IF length(client_id) <= 100 AND length(topic) <= 100 AND timeout > 0 AND max_rows > 0 THEN
        SELECT r.can_read INTO v_can_read FROM messages._permissions(session_user, client_id, 'Topic', topic) AS r;
    END IF;
    IF v_can_read IS NOT TRUE THEN
        PERFORM messages._check_subscribe(client_id, topic, timeout, max_rows);
    END IF;
    -- Before the snapshot that reads messages, so that it shows the rows that housekeeping moved before a TRUNCATE.
    LOCK TABLE psqlmessages_streammessage IN ACCESS SHARE MODE;
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = client_id AND s.topic = subscribe.topic FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- There is none, or another connection has locked it. A rule may be removed during the wait.
        SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
        WHERE s.ident = client_id AND s.topic = subscribe.topic FOR UPDATE;
        PERFORM messages._check_subscribe(client_id, topic, timeout, max_rows);
    END IF;
    SELECT t.id, t.wakes INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    IF FOUND AND messages._is_alive(v_subscription) THEN
        RETURN QUERY SELECT * FROM messages._read(v_subscription, v_topic.id, timeout, max_rows);
        -- If the node registered and subscribed at the same moment, neither saw the other: add its channel now.
        IF EXISTS (
            SELECT FROM psqlmessages_client AS c
            JOIN psqlmessages_session AS s ON s.id = c.session_id
            WHERE c.ident = client_id AND c.role = session_user AND s.channel <> ALL (v_topic.wakes)
        ) THEN
            PERFORM messages._share_rules_lock();
            PERFORM messages._lock_topics(ARRAY[v_topic.id]);
            PERFORM messages._rebuild_topics(ARRAY[v_topic.id]);
        END IF;
    ELSE
        PERFORM messages._check_subscribe(client_id, topic, timeout, max_rows);
        PERFORM messages._start_subscription(client_id, topic, timeout);
    END IF;
    PERFORM messages._schedule_housekeeping_if_due();
END
$$;

COMMENT ON FUNCTION messages.subscribe IS
    'The first call subscribes from now on, for timeout seconds after each call. Each further call returns the messages since the last one, oldest first, and moves the position in this transaction. Errors: 54, 1, 15, 16, 9, 2, 3, 60.';


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
    v_error json;
    v_topic bigint;
BEGIN
    PERFORM messages._log_command('unsubscribe', client_id, topic);
    v_error := messages._topic_error_as(client_id, topic, '');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    DELETE FROM psqlmessages_subscription AS s WHERE s.ident = client_id AND s.topic = unsubscribe.topic;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._share_rules_lock();
    SELECT t.id INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic FOR NO KEY UPDATE;
    PERFORM messages._rebuild_topics(ARRAY[v_topic]);
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.unsubscribe IS
    'End a subscription; no more messages are stored for it. Already: 1 if there was none. Errors: 54, 1, 15, 16, 9, 2.';


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
    v_error json;
    v_topic psqlmessages_topic;
    v_subscription psqlmessages_subscription;
    v_is_alive boolean;
    v_backlog bigint := 0;
BEGIN
    PERFORM messages._log_command('subscription', client_id, topic);
    v_error := messages._topic_error_as(client_id, topic, 'R');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    -- As in subscribe: _has_read_all reads with the snapshot of the statement that calls it.
    LOCK TABLE psqlmessages_streammessage IN ACCESS SHARE MODE;
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = client_id AND s.topic = subscription.topic;
    IF v_subscription.id IS NULL THEN
        RETURN messages._error(61, client_id, topic);
    END IF;
    v_is_alive := messages._is_alive(v_subscription);
    IF v_is_alive THEN
        SELECT count(*) INTO v_backlog FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = v_topic.id AND m.id > v_subscription.position;
    END IF;
    RETURN (
        '{"Err":"0","Recovered":' || to_json(
            CASE
                WHEN v_is_alive THEN v_subscription.is_recovered
                ELSE messages._has_read_all(v_topic.id, v_subscription)
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
    'The state of a subscription. Recovered: false if it timed out and missed messages; Since: when it started or restarted; Backlog: number of unread messages; Expires: when it times out without a call of subscribe. Errors: 54, 1, 15, 16, 9, 2, 3, 61.';


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
    -- The node is back in time, so from now on it has missed nothing. Do not wait for open transactions that read.
    UPDATE psqlmessages_subscription AS s SET is_recovered = true
    WHERE s.id IN (
        SELECT r.id FROM psqlmessages_subscription AS r
        WHERE r.ident = client_id AND NOT r.is_recovered AND messages._is_alive(r)
          AND (SELECT t.can_read FROM messages._permissions(session_user, client_id, 'Topic', r.topic) AS t)
        FOR NO KEY UPDATE SKIP LOCKED
    );
    v_topics := ARRAY(
        SELECT s.topic::text FROM psqlmessages_subscription AS s
        WHERE s.ident = client_id AND messages._is_alive(s)
          AND (SELECT t.can_read FROM messages._permissions(session_user, client_id, 'Topic', s.topic) AS t)
        ORDER BY s.topic
    );
    RETURN (
        left(v_answer::text, -1) || ',"Subscriptions":' || to_json(v_topics) || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.connect_stream IS
    'Register a node as init does, and receive wake-ups for its subscriptions. Subscriptions: the topics of the living ones that this role may read. Errors: 54, 4, 5, 7, 8; 6 as a warning.';
