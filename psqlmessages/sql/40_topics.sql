-- Topics: their senders, listeners and observers.

-- For sends, which compare client_id with the setting messages.node as text: casting the setting safely takes three
-- microseconds.
CREATE INDEX IF NOT EXISTS membership_by_node
ON psqlmessages_membership ((client_id::text), topic_id, kind);

CREATE OR REPLACE FUNCTION messages._topics_like(
    pattern text
)
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $$
    SELECT t.id
    FROM messages._name_range(pattern) AS n
    CROSS JOIN LATERAL (
        SELECT p.id FROM psqlmessages_topic AS p
        WHERE p.name BETWEEN n.low AND n.high AND starts_with(p.name, n.low) OFFSET 0
    ) AS t
$$;

COMMENT ON FUNCTION messages._topics_like IS
    'The topics that match a name or pattern.';


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
    'The topics to which these nodes have living subscriptions.';


CREATE OR REPLACE FUNCTION messages._topics_of_nodes(
    nodes bigint[]
)
RETURNS bigint[]
LANGUAGE sql
STABLE
AS $$
    SELECT ARRAY(
        SELECT m.topic_id FROM psqlmessages_membership AS m WHERE m.client_id = ANY (nodes)
        UNION
        SELECT t.id
        FROM psqlmessages_observation AS o
        CROSS JOIN LATERAL messages._topics_like(o.pattern) AS t (id)
        WHERE o.client_id = ANY (nodes)
        UNION
        SELECT unnest(messages._subscribed_topics(nodes))
    )
$$;

COMMENT ON FUNCTION messages._topics_of_nodes IS
    'The topics whose listeners, senders, observers or connected subscribers change when these nodes end.';


CREATE OR REPLACE FUNCTION messages._make_topics(
    names text[],
    by_publish boolean DEFAULT false
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_made bigint[];
BEGIN
    WITH made AS (
        INSERT INTO psqlmessages_topic (name, is_made_by_publish)
        SELECT DISTINCT n.name, by_publish FROM unnest(names) AS n (name)
        WHERE n.name NOT IN (SELECT t.name FROM psqlmessages_topic AS t WHERE t.name = ANY (names))
        ORDER BY n.name
        ON CONFLICT DO NOTHING
        RETURNING id
    )
    SELECT array_agg(made.id) INTO v_made FROM made;
    IF v_made IS NOT NULL AND (
        (SELECT min(o.id) FROM psqlmessages_observation AS o) IS NOT NULL
        OR EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.topic = ANY (names))
    ) THEN
        PERFORM messages._rebuild_topics(v_made);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._make_topics IS
    'Create those of the topics that do not exist, with their observers and subscribers. by_publish: whether _delete_unused_topics may delete them later.';


CREATE OR REPLACE FUNCTION messages._acting_node_topic_error(
    topic text,
    mode text,
    makes_topic boolean
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_node record;
BEGIN
    SELECT * INTO v_node FROM messages._acting_node();
    IF v_node.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    RETURN messages._topic_error(v_node.role, v_node.ident, topic, mode, makes_topic);
END
$$;

COMMENT ON FUNCTION messages._acting_node_topic_error IS
    'The error that forbids the acting node to use a topic (50, or as _topic_error), or null.';


CREATE OR REPLACE FUNCTION messages._begin_topic_change(
    command text,
    topic text,
    mode text,
    makes_topic boolean,
    is_exclusive boolean DEFAULT false
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_error json;
    v_timeout text;
BEGIN
    PERFORM messages._log_command(command, topic);
    PERFORM messages._schedule_housekeeping();
    -- Check before the rules lock is taken, so that a node without permission cannot delay changes of rules, and again
    -- afterwards.
    v_error := messages._acting_node_topic_error(topic, mode, makes_topic);
    IF v_error IS NULL THEN
        IF is_exclusive THEN
            -- While this waits, all other state changes queue behind it, so limit the wait.
            v_timeout := messages._limit_lock_wait();
            BEGIN
                LOCK TABLE messages._rules_lock IN EXCLUSIVE MODE;
            EXCEPTION WHEN lock_not_available THEN
                RAISE EXCEPTION 'cannot observe now: a transaction that called init, deinit or a topic function is still open'
                    USING ERRCODE = 'lock_not_available',
                        HINT = 'Commit it or roll it back, and try again: psqlmessages doctor lists open transactions.';
            END;
            PERFORM set_config('lock_timeout', v_timeout, true);
            PERFORM setval('messages._observation_xact', pg_current_xact_id()::text::bigint);
        END IF;
        PERFORM messages._begin_state_change();
        v_error := messages._acting_node_topic_error(topic, mode, makes_topic);
    END IF;
    RETURN v_error;
END
$$;

COMMENT ON FUNCTION messages._begin_topic_change IS
    'First step of joining and leaving a topic: take the locks and return null, or return the error that forbids it. is_exclusive: take the rules lock exclusively (wait for lock_timeout, or 10 s).';


CREATE OR REPLACE FUNCTION messages._join_topic(
    kind text,
    mode text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_node record;
    v_error json;
    v_topic bigint;
BEGIN
    v_error := messages._begin_topic_change('topic_' || kind, topic, mode, true);
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_node FROM messages._acting_node();
    WHILE v_topic IS NULL LOOP
        -- Repeat if the topic was made by publish and has just been removed.
        PERFORM messages._make_topics(ARRAY[topic]);
        SELECT t.id INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic FOR NO KEY UPDATE;
    END LOOP;
    INSERT INTO psqlmessages_membership (client_id, topic_id, kind, channel, pid, role, header, timeout)
    SELECT v_node.id, v_topic, kind, v_node.channel, pg_backend_pid(), v_node.role,
           ',"To":' || to_json(topic) || ',"From":' || to_json(v_node.ident), r.timeout
    FROM messages._permissions(v_node.role, v_node.ident, 'Topic', topic) AS r
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    ELSIF kind = 'listen' THEN
        -- The same result as by _rebuild_topics, without reading all other listeners.
        UPDATE psqlmessages_topic AS t
        SET listeners = t.listeners + 1,
            channels = CASE
                WHEN v_node.channel = ANY (t.channels) THEN t.channels
                ELSE t.channels || v_node.channel
            END
        WHERE t.id = v_topic;
    END IF;
    PERFORM messages._send_topic_event('topic_' || kind, v_node.ident, topic, v_node.ident);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._join_topic IS
    'The implementation of topic_listen and topic_notify: check, create a missing topic if a rule allows it, add the membership, send the event.';


CREATE OR REPLACE FUNCTION messages._leave_topic(
    kind text,
    mode text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_node record;
    v_error json;
    v_membership bigint;
BEGIN
    v_error := messages._begin_topic_change('topic_un' || kind, topic, mode, false);
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_node FROM messages._acting_node();
    SELECT m.id INTO v_membership
    FROM psqlmessages_membership AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id
    WHERE m.client_id = v_node.id AND m.kind = _leave_topic.kind AND t.name = topic;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._end_membership(v_membership, 'call');
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._leave_topic IS
    'The implementation of topic_unlisten and topic_unnotify: the reverse of _join_topic.';


CREATE OR REPLACE FUNCTION messages._end_membership(
    membership bigint,
    reason text,
    caller_rebuilds boolean DEFAULT false
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_ended record;
    v_events int;
BEGIN
    IF NOT caller_rebuilds THEN
        PERFORM messages._lock_topics(ARRAY(
            SELECT m.topic_id FROM psqlmessages_membership AS m WHERE m.id = membership
        ));
    END IF;
    DELETE FROM psqlmessages_membership AS m
    USING psqlmessages_client AS c, psqlmessages_topic AS t
    WHERE m.id = membership AND c.id = m.client_id AND t.id = m.topic_id
    RETURNING m.kind, m.topic_id, m.channel::text, t.name AS topic, c.ident INTO v_ended;
    IF NOT FOUND THEN
        RETURN 0;
    ELSIF v_ended.kind = 'listen' AND NOT caller_rebuilds THEN
        -- The same result as by _rebuild_topics.
        UPDATE psqlmessages_topic AS t SET listeners = t.listeners - 1 WHERE t.id = v_ended.topic_id;
        PERFORM messages._remove_channel(ARRAY[v_ended.topic_id], v_ended.channel);
    END IF;
    v_events := messages._send_topic_event(
        'topic_un' || v_ended.kind, v_ended.ident, v_ended.topic,
        CASE WHEN reason <> 'revoke' THEN v_ended.ident END,
        CASE WHEN reason = 'revoke' THEN v_ended.ident END
    );
    IF NOT EXISTS (
        SELECT FROM psqlmessages_membership AS m
        WHERE m.topic_id = v_ended.topic_id AND m.kind = v_ended.kind
    ) THEN
        v_events := v_events + messages._send_topic_event(
            'topic_none_' || v_ended.kind, NULL, v_ended.topic,
            CASE WHEN reason = 'leave' THEN v_ended.ident END
        );
    END IF;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._end_membership IS
    'End one listening or sending, send the events, and return their number. reason: call (the node called), leave (the node ends) or revoke (by rules; the node receives the event). caller_rebuilds: the caller locks the topic before and rebuilds it afterwards.';


CREATE OR REPLACE FUNCTION messages._end_node(
    node bigint,
    evt text,
    includes_node boolean
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_node psqlmessages_client;
    v_membership bigint;
    v_topics bigint[];
    v_events int := 0;
BEGIN
    SELECT * INTO v_node FROM psqlmessages_client AS c WHERE c.id = node FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    v_topics := messages._topics_of_nodes(ARRAY[node]);
    PERFORM messages._lock_topics(v_topics);
    FOR v_membership IN
        SELECT m.id FROM psqlmessages_membership AS m
        JOIN psqlmessages_topic AS t ON t.id = m.topic_id
        WHERE m.client_id = node ORDER BY t.name, m.kind
    LOOP
        v_events := v_events + messages._end_membership(
            v_membership, CASE WHEN includes_node THEN 'revoke' ELSE 'leave' END
        );
    END LOOP;
    DELETE FROM psqlmessages_observation AS o WHERE o.client_id = node;
    IF FOUND THEN
        PERFORM messages._remove_channel(v_topics, (
            SELECT s.channel FROM psqlmessages_session AS s WHERE s.id = v_node.session_id
        ));
    END IF;
    v_events := v_events + messages._send_node_event(evt, v_node.ident, includes_node);
    DELETE FROM psqlmessages_client AS c WHERE c.id = node;
    PERFORM messages._rebuild_topics(ARRAY(
        SELECT t.id FROM psqlmessages_subscription AS s JOIN psqlmessages_topic AS t ON t.name = s.topic
        WHERE s.ident = v_node.ident AND s.is_alive
    ));
    PERFORM messages._end_empty_sessions(ARRAY[v_node.session_id]);
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._end_node IS
    'End a node: first its listening and sending, each with its events, then its registration. Returns the number of events. evt: the last event. includes_node: whether the node receives the events.';


CREATE OR REPLACE FUNCTION messages._end_empty_sessions(
    sessions int[]
)
RETURNS void
LANGUAGE sql
SET enable_seqscan = off
SET jit = off
AS $$
    DELETE FROM psqlmessages_session AS s
    WHERE s.id = ANY (ARRAY(
        -- Skip locked sessions: another transaction is about to register a node there. They end with their connection.
        SELECT e.id FROM psqlmessages_session AS e WHERE e.id = ANY (sessions) FOR UPDATE SKIP LOCKED
    )) AND NOT EXISTS (SELECT FROM psqlmessages_client AS c WHERE c.session_id = s.id)
$$;

COMMENT ON FUNCTION messages._end_empty_sessions IS
    'Delete those of the sessions that have no node. Never waits.';

-- Channels: each topic row stores the number of listeners and the distinct channels to notify, for sends.

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
    'Lock topics in name order. Rebuild them in a later statement, so that it sees everything committed before the lock.';


CREATE OR REPLACE FUNCTION messages._subscriber_channels(
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
    CROSS JOIN LATERAL messages._permissions(c.role, c.ident, 'Topic', _subscriber_channels.topic) AS r
    WHERE s.topic = _subscriber_channels.topic AND s.is_alive AND r.can_read
$$;

COMMENT ON FUNCTION messages._subscriber_channels IS
    'The channels of the connected subscribers of a topic that may read it. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._rebuild_topics(
    topics bigint[]
)
RETURNS void
LANGUAGE sql
SET enable_seqscan = off
SET jit = off
AS $$
    UPDATE psqlmessages_topic AS t
    SET (listeners, channels, subscriptions, subscriber_channels)
        = (n.listeners, n.channels, n.subscriptions, n.subscriber_channels)
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
               ARRAY(SELECT w.channel FROM messages._subscriber_channels(o.name) AS w (channel)) AS subscriber_channels
        FROM psqlmessages_topic AS o
        WHERE o.id = ANY (topics)
    ) AS n
    -- The first condition repeats the inner one: PostgreSQL 15 and 16 read the whole table otherwise.
    WHERE t.id = ANY (topics) AND t.id = n.id
      AND (t.listeners, t.channels, t.subscriptions, t.subscriber_channels)
          IS DISTINCT FROM (n.listeners, n.channels, n.subscriptions, n.subscriber_channels)
$$;

COMMENT ON FUNCTION messages._rebuild_topics IS
    'Compute the stored values that sends read: the numbers of listeners and subscriptions, and the distinct channels. Lock the topics first.';


CREATE OR REPLACE FUNCTION messages._remove_channel(
    topics bigint[],
    channel text
)
RETURNS void
LANGUAGE sql
SET enable_seqscan = off
SET jit = off
AS $$
    UPDATE psqlmessages_topic AS t
    SET channels = array_remove(t.channels, _remove_channel.channel)
    WHERE t.id = ANY (topics)
      AND _remove_channel.channel = ANY (t.channels)
      AND NOT EXISTS (
          SELECT FROM psqlmessages_membership AS m
          WHERE m.topic_id = t.id AND m.kind = 'listen' AND m.channel = _remove_channel.channel
      )
      AND NOT EXISTS (
          SELECT FROM psqlmessages_observation AS v
          WHERE v.pattern = ANY (messages._patterns(t.name)) AND v.channel = _remove_channel.channel
      )
$$;

COMMENT ON FUNCTION messages._remove_channel IS
    'Remove a channel from these topics, unless another node of its session listens to the topic or observes it. The same result as by _rebuild_topics. Lock the topics first.';


CREATE OR REPLACE FUNCTION messages._allowed_channels(
    topic_id bigint
)
RETURNS text[]
LANGUAGE sql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
    SELECT ARRAY(
        SELECT m.channel::text
        FROM psqlmessages_topic AS t
        JOIN psqlmessages_membership AS m ON m.topic_id = t.id AND m.kind = 'listen'
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        CROSS JOIN LATERAL messages._permissions(c.role, c.ident, 'Topic', t.name) AS r
        WHERE t.id = _allowed_channels.topic_id AND r.can_read
        UNION
        SELECT o.channel::text
        FROM psqlmessages_topic AS t
        JOIN psqlmessages_observation AS o ON o.pattern = ANY (messages._patterns(t.name))
        JOIN psqlmessages_client AS c ON c.id = o.client_id
        CROSS JOIN LATERAL messages._permissions(c.role, c.ident, 'Topic', o.pattern) AS r
        WHERE t.id = _allowed_channels.topic_id AND r.can_observe
    )
$$;

COMMENT ON FUNCTION messages._allowed_channels IS
    'The channels of the listeners and observers of a topic that the current rules allow. Sends use them while the row of the topic could not be rebuilt.';
