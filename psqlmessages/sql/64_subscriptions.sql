-- Subscriptions: a node's place in a topic's stream. It moves in the caller's transaction, and needs no session.

CREATE OR REPLACE FUNCTION messages._has_all(
    topic_id bigint,
    subscription psqlmessages_subscription
)
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce(
        greatest(
            (SELECT max(m.id) FROM psqlmessages_streammessage AS m WHERE m.topic_id = _has_all.topic_id),
            (SELECT l.id FROM messages._stream_last AS l WHERE l.topic_id = _has_all.topic_id)
        ) <= subscription.position,
        subscription.is_recovered
    )
$$;

COMMENT ON FUNCTION messages._has_all IS
    'Whether a subscription that is dead has passed the last message of its topic, be that kept or gone.';


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
        -- Waits for who makes or ends it at this moment, and then looks again.
        INSERT INTO psqlmessages_subscription (ident, topic, position, timeout, is_alive)
        VALUES (ident, topic, 0, timeout, false)
        ON CONFLICT DO NOTHING;
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._lock_subscription IS
    'A subscription''s row, locked; made dead where there is none. Locks are taken in this order: subscription, gate, topic.';


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
    v_fault json;
    v_now timestamp with time zone;
BEGIN
    v_subscription := messages._lock_subscription(ident, topic, timeout);
    IF messages._is_alive(v_subscription) THEN
        -- Another connection of the node has started it meanwhile.
        RETURN;
    END IF;
    PERFORM messages._share_gate();
    SELECT t.id INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic FOR NO KEY UPDATE;
    v_fault := messages._topic_fault(session_user, ident, topic, 'R', false);
    IF v_fault IS NOT NULL THEN
        PERFORM messages._raise(v_fault);
    END IF;
    v_position := greatest(v_subscription.position, messages._horizon(v_topic));
    v_now := clock_timestamp();
    UPDATE psqlmessages_subscription AS s
    SET position = v_position,
        timeout = _start_subscription.timeout,
        started_at = v_now,
        pinged_at = v_now,
        is_alive = true,
        is_recovered = v_subscription.position = 0 OR messages._has_all(v_topic, v_subscription)
    WHERE s.id = v_subscription.id;
    PERFORM messages._rebuild_topics(ARRAY[v_topic]);
END
$$;

COMMENT ON FUNCTION messages._start_subscription IS
    'Begin a subscription from now on, or anew where it timed out: then it is recovered only if nothing was published meanwhile.';


CREATE OR REPLACE FUNCTION messages._see_to_wakes(
    ident text,
    topic_id bigint,
    wakes text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM FROM psqlmessages_client AS c
    JOIN psqlmessages_session AS s ON s.id = c.session_id
    WHERE c.ident = _see_to_wakes.ident AND c.role = session_user AND s.channel <> ALL (wakes);
    IF FOUND THEN
        PERFORM messages._share_gate();
        PERFORM messages._lock_topics(ARRAY[topic_id]);
        PERFORM messages._rebuild_topics(ARRAY[topic_id]);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._see_to_wakes IS
    'Let a connected subscriber be woken: where it registered and subscribed at the same moment, neither knew of the other.';


CREATE OR REPLACE VIEW messages.stream_rows AS
SELECT m.id, ''::text AS topic, m.sender::text AS sender, m.payload, m.published_at, m.enc
FROM psqlmessages_streammessage AS m;

COMMENT ON VIEW messages.stream_rows IS
    'The form of the rows that subscribe returns.';


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
    v_horizon bigint := messages._horizon(topic_id);
BEGIN
    -- Values as subqueries: what they are is no reason to plan anew each time.
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT m.id, subscription.topic::text, m.sender, m.payload, m.published_at, m.enc
        FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = (SELECT _read.topic_id)
          AND m.id > (SELECT subscription.position) AND m.id <= (SELECT v_horizon)
        ORDER BY m.id
        LIMIT (SELECT max_rows)
    ), moved AS (
        UPDATE psqlmessages_subscription AS s
        SET position = CASE
                WHEN (SELECT count(*) FROM found) = max_rows THEN (SELECT max(f.id) FROM found AS f)
                ELSE greatest(s.position, v_horizon)
            END,
            timeout = _read.timeout,
            -- If the clock was put back, housekeeping lowers this: the clock may return before that.
            pinged_at = greatest(s.pinged_at, clock_timestamp())
        WHERE s.id = subscription.id
    )
    SELECT * FROM found AS f ORDER BY f.id;
END
$$;

COMMENT ON FUNCTION messages._read IS
    'What came since the last call, oldest first; the position moves past it, and past what is not of this topic.';


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
    'The topics that these nodes have subscribed to.';


CREATE OR REPLACE FUNCTION messages._rebuild_subscribed(
    nodes bigint[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_topics bigint[] := messages._subscribed_topics(nodes);
BEGIN
    IF v_topics <> '{}' THEN
        PERFORM messages._lock_topics(v_topics);
        PERFORM messages._rebuild_topics(v_topics);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._rebuild_subscribed IS
    'These nodes came, or their rights changed: compute anew who is woken for the topics they subscribe to.';
