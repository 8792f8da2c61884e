-- Subscriptions: the durable position of a node in the stream of a topic, which moves in the transaction of the caller.

CREATE OR REPLACE FUNCTION messages._is_alive(
    subscription psqlmessages_subscription
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
DECLARE
    v_expires_at timestamp with time zone := subscription.pinged_at + make_interval(secs => subscription.timeout);
BEGIN
    -- is_alive is false after housekeeping has found the subscription expired, even if the clock is set back later.
    IF subscription.is_alive IS NOT TRUE OR v_expires_at > clock_timestamp() THEN
        RETURN subscription.is_alive;
    END IF;
    RETURN v_expires_at + coalesce(
        (SELECT sum(g.ended_at - g.began_at) FROM messages._clock_gap AS g WHERE g.ended_at > subscription.pinged_at),
        '0'
    ) + coalesce(
        -- The gap that housekeeping has not recorded yet.
        (
            SELECT clock_timestamp() - c.last
            FROM messages._stream AS s
            CROSS JOIN LATERAL messages._last_checked_at('messages._streams_checked', s.maintained_at) AS c (last)
            WHERE c.last BETWEEN clock_timestamp() - interval '1 year' AND clock_timestamp() - interval '10 seconds'
        ), '0'
    ) > clock_timestamp();
END
$$;

COMMENT ON FUNCTION messages._is_alive IS
    'Whether a subscription is alive: its timeout since pinged_at has not passed, not counting clock gaps, and housekeeping has not found it expired. Null if the subscription is null.';


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
            (SELECT l.id FROM messages._last_removed_message AS l WHERE l.topic_id = _has_read_all.topic_id)
        ) <= subscription.position,
        subscription.is_recovered
    )
$$;

COMMENT ON FUNCTION messages._has_read_all IS
    'Whether the position of an expired subscription is past the last message of its topic, stored or removed. If the topic has had none: is_recovered.';


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
        -- INSERT waits for a transaction that creates or ends the subscription; then read it again.
        INSERT INTO psqlmessages_subscription (ident, topic, position, timeout, is_alive)
        VALUES (ident, topic, 0, timeout, false)
        ON CONFLICT DO NOTHING;
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._lock_subscription IS
    'Lock the row of a subscription, and return it; create an expired one if there is none. Locks are taken in this order: subscription, rules lock, topic.';


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
    v_now timestamp with time zone;
BEGIN
    v_subscription := messages._lock_subscription(ident, topic, timeout);
    IF messages._is_alive(v_subscription) THEN
        -- Another connection has just started it.
        RETURN;
    END IF;
    PERFORM messages._share_rules_lock();
    SELECT t.id INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic FOR NO KEY UPDATE;
    PERFORM messages._raise(messages._topic_error(session_user, ident, topic, 'R', false));
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
    'Start a subscription at the end of the stream, or restart an expired one: is_recovered is true only if it has missed no message.';


CREATE OR REPLACE VIEW messages.stream_rows AS
SELECT m.id, ''::text AS topic, m.sender::text AS sender, m.payload, m.published_at, m.enc
FROM psqlmessages_streammessage AS m;

COMMENT ON VIEW messages.stream_rows IS
    'The type of the rows that subscribe returns.';


CREATE OR REPLACE FUNCTION messages._check_subscribe(
    client_id text,
    topic text,
    timeout int,
    max_rows int
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM messages._raise(messages._topic_error_as(client_id, topic, 'R'));
    IF coalesce(timeout, 0) <= 0 THEN
        PERFORM messages._raise(messages._error(60, 'timeout'));
    ELSIF coalesce(max_rows, 0) <= 0 THEN
        PERFORM messages._raise(messages._error(60, 'max_rows'));
    END IF;
END
$$;

COMMENT ON FUNCTION messages._check_subscribe IS
    'Raise an error if this role may not read the topic as this node, or if an argument is not positive.';


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
    v_watermark bigint;
BEGIN
    PERFORM messages._require_read_committed('subscribe');
    PERFORM messages._log_command('subscribe', client_id, topic);
    IF length(client_id) <= 100 AND length(topic) <= 100 AND timeout > 0 AND max_rows > 0 THEN
        SELECT r.can_read INTO v_can_read FROM messages._permissions(session_user, client_id, 'Topic', topic) AS r;
    END IF;
    IF v_can_read IS NOT TRUE THEN
        PERFORM messages._check_subscribe(client_id, topic, timeout, max_rows);
    END IF;
    -- Before the snapshot that reads messages, so that the snapshot shows the rows that housekeeping moved before a
    -- TRUNCATE.
    LOCK TABLE psqlmessages_streammessage IN ACCESS SHARE MODE;
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = client_id AND s.topic = subscribe.topic FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- There is no subscription, or another connection has locked it. Check again, because rules may be removed
        -- during the wait.
        SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
        WHERE s.ident = client_id AND s.topic = subscribe.topic FOR UPDATE;
        PERFORM messages._check_subscribe(client_id, topic, timeout, max_rows);
    END IF;
    SELECT t.id, t.subscriber_channels INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    IF FOUND AND messages._is_alive(v_subscription) THEN
        v_watermark := messages._watermark(v_topic.id);
        -- The position moves to the last message returned, or to the watermark if no further messages are there.
        -- Values are in subqueries, so that PostgreSQL does not plan again when they change.
        RETURN QUERY
        WITH found AS MATERIALIZED (
            SELECT m.id, v_subscription.topic::text, m.sender, m.payload, m.published_at, m.enc
            FROM psqlmessages_streammessage AS m
            WHERE m.topic_id = (SELECT v_topic.id)
              AND m.id > (SELECT v_subscription.position) AND m.id <= (SELECT v_watermark)
            ORDER BY m.id
            LIMIT (SELECT max_rows)
        ), moved AS (
            UPDATE psqlmessages_subscription AS s
            SET position = CASE
                    WHEN (SELECT count(*) FROM found) = max_rows THEN (SELECT max(f.id) FROM found AS f)
                    ELSE greatest(s.position, v_watermark)
                END,
                timeout = subscribe.timeout,
                -- If the clock was set back, housekeeping lowers this.
                pinged_at = greatest(s.pinged_at, clock_timestamp())
            WHERE s.id = v_subscription.id
        )
        SELECT * FROM found AS f ORDER BY f.id;
        -- If the node registered and subscribed at the same time, neither transaction saw the other: add its channel.
        IF EXISTS (
            SELECT FROM psqlmessages_client AS c
            JOIN psqlmessages_session AS s ON s.id = c.session_id
            WHERE c.ident = client_id AND c.role = session_user AND s.channel <> ALL (v_topic.subscriber_channels)
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
    'Subscribe to a topic, and read its messages. The first call starts the subscription, which expires timeout seconds after the last call. Each further call returns the messages since the previous one, oldest first, and moves the position in this transaction. Errors: 54, 1, 15, 16, 9, 2, 3, 60.';


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
    'End a subscription, so that no more messages are stored for it. Already: 1 if there was none. Errors: 54, 1, 15, 16, 9, 2.';


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
    RETURN (
        SELECT row_to_json(s)
        FROM (
            SELECT '0' AS "Err",
                   CASE
                       WHEN v_is_alive THEN v_subscription.is_recovered
                       ELSE messages._has_read_all(v_topic.id, v_subscription)
                   END AS "Recovered",
                   v_subscription.started_at AS "Since",
                   (SELECT count(*) FROM psqlmessages_streammessage AS m
                    WHERE v_is_alive AND m.topic_id = v_topic.id AND m.id > v_subscription.position) AS "Backlog",
                   v_subscription.pinged_at + make_interval(secs => v_subscription.timeout) AS "Expires"
        ) AS s
    );
END
$$;

COMMENT ON FUNCTION messages.subscription IS
    'Return the status of a subscription. Recovered: false if it expired and missed messages; Since: when it started or restarted; Backlog: the number of unread messages; Expires: when it expires without a further call of subscribe. Errors: 54, 1, 15, 16, 9, 2, 3, 61.';


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
BEGIN
    IF v_answer ->> 'Err' <> '0' THEN
        RETURN v_answer;
    END IF;
    -- The node returned before these subscriptions expired. Skip rows locked by open transactions that read, do not
    -- wait.
    UPDATE psqlmessages_subscription AS s SET is_recovered = true
    WHERE s.id IN (
        SELECT r.id FROM psqlmessages_subscription AS r
        WHERE r.ident = client_id AND NOT r.is_recovered AND messages._is_alive(r)
          AND (SELECT t.can_read FROM messages._permissions(session_user, client_id, 'Topic', r.topic) AS t)
        FOR NO KEY UPDATE SKIP LOCKED
    );
    RETURN (left(v_answer::text, -1) || ',"Subscriptions":' || to_json(ARRAY(
        SELECT s.topic FROM psqlmessages_subscription AS s
        WHERE s.ident = client_id AND messages._is_alive(s)
          AND (SELECT t.can_read FROM messages._permissions(session_user, client_id, 'Topic', s.topic) AS t)
        ORDER BY s.topic
    )) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.connect_stream IS
    'Register a node as init does, and receive an event when a subscription has a message to read. Subscriptions: the topics of its living subscriptions that this role may read. Errors: 54, 4, 5, 7, 8; 6 as a warning.';
