-- Listeners: what a send reads of a topic, kept with it: how many listen, and each channel once.

CREATE OR REPLACE FUNCTION messages._lock_topics(
    topics bigint[]
)
RETURNS void
LANGUAGE sql
AS $$
    SELECT FROM psqlmessages_topic AS t
    WHERE t.id = ANY (topics) ORDER BY t.name FOR NO KEY UPDATE
$$;

COMMENT ON FUNCTION messages._lock_topics IS
    'Take topics in name order, in a statement before the one that rebuilds: it then sees all that was committed.';


CREATE OR REPLACE FUNCTION messages._wakes_of(
    topic text
)
RETURNS SETOF text
LANGUAGE sql
STABLE
AS $$
    SELECT DISTINCT e.channel::text
    FROM psqlmessages_subscription AS s
    JOIN psqlmessages_client AS c ON c.ident = s.ident
    JOIN psqlmessages_session AS e ON e.id = c.session_id
    CROSS JOIN LATERAL messages._rights(c.role, c.ident, 'Topic', _wakes_of.topic) AS r
    WHERE s.topic = _wakes_of.topic AND s.is_alive AND r.can_read
$$;

COMMENT ON FUNCTION messages._wakes_of IS
    'The channels of a topic''s subscribers that may read it. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._rebuild_topics(
    topics bigint[]
)
RETURNS void
LANGUAGE sql
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
    UPDATE psqlmessages_topic AS t
    SET listeners = n.listeners, channels = n.channels, subscriptions = n.subscriptions, wakes = n.wakes
    FROM (
        SELECT o.id,
               (SELECT count(*) FROM psqlmessages_membership AS m
                WHERE m.topic_id = o.id AND m.kind = 'listen') AS listeners,
               ARRAY(
                   SELECT m.channel::text FROM psqlmessages_membership AS m
                   WHERE m.topic_id = o.id AND m.kind = 'listen'
                   UNION
                   SELECT v.channel::text FROM psqlmessages_observation AS v
                   WHERE v.pattern = ANY (messages._patterns(o.name))
               ) AS channels,
               (SELECT count(*) FROM psqlmessages_subscription AS s
                WHERE s.topic = o.name AND s.is_alive) AS subscriptions,
               ARRAY(SELECT w.channel FROM messages._wakes_of(o.name) AS w (channel)) AS wakes
        FROM psqlmessages_topic AS o
        WHERE o.id = ANY (topics)
    ) AS n
    -- Named again: PostgreSQL 15 and 16 read the whole table otherwise.
    WHERE t.id = ANY (topics) AND t.id = n.id
      AND (t.listeners, t.channels, t.subscriptions, t.wakes)
          IS DISTINCT FROM (n.listeners, n.channels, n.subscriptions, n.wakes)
$$;

COMMENT ON FUNCTION messages._rebuild_topics IS
    'Compute anew what a send reads: the number of listeners and subscriptions, and each channel once. Lock the topics first.';


CREATE OR REPLACE FUNCTION messages._add_listener(
    topic bigint,
    channel text
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE psqlmessages_topic AS t
    SET listeners = t.listeners + 1,
        channels = CASE
            WHEN _add_listener.channel = ANY (t.channels) THEN t.channels
            ELSE t.channels || _add_listener.channel
        END
    WHERE t.id = topic;
END
$$;

COMMENT ON FUNCTION messages._add_listener IS
    'One more node listens: what _rebuild_topics would compute, without reading all others. Lock the topic first.';


CREATE OR REPLACE FUNCTION messages._remove_listener(
    topic bigint,
    channel text
)
RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    UPDATE psqlmessages_topic AS t
    SET listeners = t.listeners - 1,
        channels = CASE
            WHEN EXISTS (
                SELECT FROM psqlmessages_membership AS m
                WHERE m.topic_id = topic AND m.kind = 'listen' AND m.channel = _remove_listener.channel
            ) OR EXISTS (
                SELECT FROM psqlmessages_observation AS v
                WHERE v.pattern = ANY (messages._patterns(t.name)) AND v.channel = _remove_listener.channel
            )
            THEN t.channels
            ELSE array_remove(t.channels, _remove_listener.channel)
        END
    WHERE t.id = topic;
END
$$;

COMMENT ON FUNCTION messages._remove_listener IS
    'One node, already removed, listens no more: its channel stays where another node of its session needs it. Lock the topic first.';


CREATE OR REPLACE FUNCTION messages._allowed_channels(
    topic_id bigint
)
RETURNS text[]
LANGUAGE sql
STABLE
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
    SELECT ARRAY(
        SELECT m.channel::text
        FROM psqlmessages_topic AS t
        JOIN psqlmessages_membership AS m ON m.topic_id = t.id AND m.kind = 'listen'
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        CROSS JOIN LATERAL messages._rights(c.role, c.ident, 'Topic', t.name) AS r
        WHERE t.id = _allowed_channels.topic_id AND r.can_read
        UNION
        SELECT o.channel::text
        FROM psqlmessages_topic AS t
        JOIN psqlmessages_observation AS o ON o.pattern = ANY (messages._patterns(t.name))
        JOIN psqlmessages_client AS c ON c.id = o.client_id
        CROSS JOIN LATERAL messages._rights(c.role, c.ident, 'Topic', o.pattern) AS r
        WHERE t.id = _allowed_channels.topic_id AND r.can_observe
    )
$$;

COMMENT ON FUNCTION messages._allowed_channels IS
    'The channels of a topic as the rules are now: for one whose row could not be rebuilt.';


CREATE OR REPLACE FUNCTION messages._allowed_wakes(
    topic text,
    wakes text[]
)
RETURNS text[]
LANGUAGE plpgsql
AS $$
BEGIN
    IF messages._is_settled() THEN
        RETURN wakes;
    END IF;
    RETURN ARRAY(SELECT w.channel FROM messages._wakes_of(topic) AS w (channel));
END
$$;

COMMENT ON FUNCTION messages._allowed_wakes IS
    'Whom publishing wakes: as the topic''s row says, or as the rules are now where a change of rules is unfinished.';
