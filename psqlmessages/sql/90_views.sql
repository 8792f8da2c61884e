-- Views: the public part of the tables. Each view except auth shows the rows of a function. PostgreSQL does not push
-- conditions of a query into the function, so plans and their row counts reveal no hidden rows.

CREATE OR REPLACE VIEW messages.auth AS
SELECT a.id, a.role, a.ident, a.type, a.dest, a.mode, a.timeout
FROM psqlmessages_auth AS a;

COMMENT ON VIEW messages.auth IS
    'The rules. The owner can read and change them, and grant this to others.';


CREATE OR REPLACE FUNCTION messages._listed_topics(
    names text[],
    modes text[]
)
RETURNS SETOF psqlmessages_topic
LANGUAGE plpgsql
STABLE
AS $$
DECLARE
    v_allowed text[] := messages._allowed_destinations('Topic', modes);
BEGIN
    -- A role without permissions reads nothing and locks nothing.
    IF v_allowed = '{}' THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT t.* FROM psqlmessages_topic AS t
    WHERE t.id IN (SELECT messages._topics_like(n.name) FROM unnest(names) AS n (name))
      AND ('*' = ANY (v_allowed) OR t.id IN (SELECT messages._topics_like(a.name) FROM unnest(v_allowed) AS a (name)));
END
$$;

COMMENT ON FUNCTION messages._listed_topics IS
    'The topics that match these names and patterns and that this role may use in one of these modes as any node.';


CREATE OR REPLACE FUNCTION messages.list_topics(
    names text[] DEFAULT '{*}'
)
RETURNS TABLE (topic text, notifiers text[], listeners text[])
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN QUERY
    WITH live (session_id) AS MATERIALIZED (SELECT messages._live_sessions())
    SELECT t.name::text, coalesce(n.notifiers, '{}'), coalesce(n.listeners, '{}')
    FROM messages._listed_topics(names, '{R,W,RW,O}') AS t
    CROSS JOIN LATERAL (
        SELECT array_agg(c.ident::text ORDER BY c.ident) FILTER (WHERE m.kind = 'notify') AS notifiers,
               array_agg(c.ident::text ORDER BY c.ident) FILTER (WHERE m.kind = 'listen') AS listeners
        FROM psqlmessages_membership AS m
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        WHERE m.topic_id = t.id AND c.session_id IN (SELECT live.session_id FROM live)
    ) AS n;
END
$$;

COMMENT ON FUNCTION messages.list_topics IS
    'The topics that match these names and patterns and that a rule lets this role use (all, for the owner), with their connected notifiers and listeners. Errors: none.';


CREATE OR REPLACE VIEW messages.topics AS
SELECT l.topic COLLATE "C" AS topic, l.notifiers COLLATE "C" AS notifiers, l.listeners COLLATE "C" AS listeners
FROM messages.list_topics() AS l;

COMMENT ON VIEW messages.topics IS
    'The rows of list_topics for all topics.';


CREATE OR REPLACE FUNCTION messages.list_subscriptions(
    names text[] DEFAULT '{*}'
)
RETURNS TABLE (
    client text,
    topic text,
    subscription_timestamp timestamp with time zone,
    timeout int,
    last_ping_timestamp timestamp with time zone
)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT s.ident::text, s.topic::text, s.started_at, s.timeout, s.pinged_at
    FROM psqlmessages_subscription AS s
    WHERE s.is_alive AND s.pinged_at + make_interval(secs => s.timeout) > clock_timestamp()
      AND s.topic IN (SELECT t.name FROM messages._listed_topics(names, '{R,W,RW,O}') AS t);
END
$$;

COMMENT ON FUNCTION messages.list_subscriptions IS
    'The living subscriptions to topics that match these names and patterns and that a rule lets this role use. timeout: seconds that a subscription lives after its last ping. Errors: none.';


CREATE OR REPLACE VIEW messages.stream_subscriptions AS
SELECT l.client COLLATE "C" AS client, l.topic COLLATE "C" AS topic, l.subscription_timestamp, l.timeout,
       l.last_ping_timestamp
FROM messages.list_subscriptions() AS l;

COMMENT ON VIEW messages.stream_subscriptions IS
    'The rows of list_subscriptions for all topics.';


CREATE OR REPLACE FUNCTION messages.list_streams(
    names text[] DEFAULT '{*}'
)
RETURNS TABLE (
    topic text,
    last_msg_recv_timestamp timestamp with time zone,
    relative_timeout int,
    number_of_users_subscribed bigint
)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    -- A role without permissions locks no table of streams.
    IF messages._allowed_destinations('Topic', '{R,W,RW,O}') = '{}' THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH subscribed AS (
        -- The number exceeds an int only if the clock was set back.
        SELECT s.topic, count(*) AS subscriptions,
               least(
                   ceil(extract(epoch FROM
                       max(s.last_ping_timestamp + make_interval(secs => s.timeout)) - clock_timestamp()
                   )), 2147483647
               )::int AS relative_timeout
        FROM messages.list_subscriptions(names) AS s GROUP BY s.topic
    )
    SELECT t.name::text,
        greatest(
            (SELECT m.published_at FROM psqlmessages_streammessage AS m
             WHERE m.topic_id = t.id ORDER BY m.id DESC LIMIT 1),
            (SELECT l.published_at FROM messages._last_removed_message AS l WHERE l.topic_id = t.id)
        ),
        greatest(t.retention, n.relative_timeout),
        coalesce(n.subscriptions, 0)
    FROM messages._listed_topics(names, '{R,W,RW,O}') AS t
    LEFT JOIN subscribed AS n ON n.topic = t.name;
END
$$;

COMMENT ON FUNCTION messages.list_streams IS
    'The topics of list_topics with their streams. last_msg_recv_timestamp: when the last message was published; relative_timeout: how many seconds a message published now would be stored at most. Errors: none.';


CREATE OR REPLACE VIEW messages.stream_topics AS
SELECT l.topic COLLATE "C" AS topic, l.last_msg_recv_timestamp, l.relative_timeout, l.number_of_users_subscribed
FROM messages.list_streams() AS l;

COMMENT ON VIEW messages.stream_topics IS
    'The rows of list_streams for all topics.';


CREATE OR REPLACE FUNCTION messages.list_subscribers()
RETURNS TABLE (
    client text,
    connection_timestamp timestamp with time zone,
    number_of_subscriptions bigint
)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT s.client,
        (SELECT c.connected_at FROM psqlmessages_client AS c WHERE c.ident = s.client),
        count(*)
    FROM messages.list_subscriptions() AS s
    GROUP BY s.client;
END
$$;

COMMENT ON FUNCTION messages.list_subscribers IS
    'Nodes with living subscriptions to topics that a rule lets this role use. connection_timestamp: null if not connected. Errors: none.';


CREATE OR REPLACE VIEW messages.stream_clients AS
SELECT l.client COLLATE "C" AS client, l.connection_timestamp, l.number_of_subscriptions
FROM messages.list_subscribers() AS l;

COMMENT ON VIEW messages.stream_clients IS
    'The rows of list_subscribers.';


CREATE OR REPLACE FUNCTION messages.list_stored(
    names text[] DEFAULT '{*}'
)
RETURNS SETOF messages.stored_rows
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- As read_stream does.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET max_parallel_workers_per_gather = 0
SET jit = off
AS $$
DECLARE
    v_topic record;
BEGIN
    FOR v_topic IN
        SELECT t.id, t.name::text FROM messages._listed_topics(names, '{R,RW}') AS t ORDER BY t.name
    LOOP
        RETURN QUERY SELECT * FROM messages._stored_rows(
            v_topic.id, v_topic.name, 0, 9223372036854775807, NULL, true
        );
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages.list_stored IS
    'All stored messages of topics that match these names and patterns and that a rule lets this role read (all, for the owner), in the snapshot of the caller. read_stream reads a range, and never skips a message that is committed later. Errors: none.';


CREATE OR REPLACE VIEW messages.stored AS
SELECT l.id, l.topic COLLATE "C" AS topic, l.sender COLLATE "C" AS sender, l.body, l.enc, l.headers, l.published_at
FROM messages.list_stored() AS l;

COMMENT ON VIEW messages.stored IS
    'The rows of list_stored for all topics: each query reads all messages. read_stream reads a range.';


CREATE OR REPLACE FUNCTION messages._listed_queues(
    names text[],
    modes text[]
)
RETURNS SETOF psqlmessages_queue
LANGUAGE plpgsql
STABLE
AS $$
DECLARE
    v_allowed text[] := messages._allowed_destinations('Queue', modes);
BEGIN
    IF v_allowed = '{}' THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT q.* FROM psqlmessages_queue AS q
    WHERE (NOT q.is_removed OR EXISTS (SELECT FROM psqlmessages_element AS e WHERE e.queue_id = q.id))
      AND q.id IN (SELECT messages._queues_like(n.name) FROM unnest(names) AS n (name))
      AND ('*' = ANY (v_allowed) OR q.id IN (SELECT messages._queues_like(a.name) FROM unnest(v_allowed) AS a (name)));
END
$$;

COMMENT ON FUNCTION messages._listed_queues IS
    'The queues that match these names and patterns and that this role may use in one of these modes as any node.';


CREATE OR REPLACE FUNCTION messages.list_queues(
    names text[] DEFAULT '{*}'
)
RETURNS TABLE (
    queue text,
    paused boolean,
    max_tries int,
    dead_letter_queue text,
    key_timeout int,
    puts bigint,
    gets bigint,
    reserves bigint,
    commits bigint,
    rollbacks bigint,
    dead_letters bigint,
    removes bigint
)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT q.name::text, q.is_paused, q.max_tries, q.dead_letter_queue::text, q.key_timeout,
           coalesce(c.puts, 0), coalesce(c.gets, 0), coalesce(c.reserves, 0), coalesce(c.commits, 0),
           coalesce(c.rollbacks, 0), coalesce(c.dead_letters, 0), coalesce(c.removes, 0)
    FROM messages._listed_queues(names, '{R,W,RW,A}') AS q
    LEFT JOIN LATERAL (
        SELECT sum(n.puts)::bigint AS puts, sum(n.gets)::bigint AS gets, sum(n.reserves)::bigint AS reserves,
               sum(n.commits)::bigint AS commits, sum(n.rollbacks)::bigint AS rollbacks,
               sum(n.dead_letters)::bigint AS dead_letters, sum(n.removes)::bigint AS removes
        FROM psqlmessages_queuecount AS n WHERE n.queue_id = q.id
    ) AS c ON true;
END
$$;

COMMENT ON FUNCTION messages.list_queues IS
    'The queues that match these names and patterns and that a rule lets this role use (all, for the owner): settings and counts. Errors: none.';


CREATE OR REPLACE VIEW messages.queues AS
SELECT l.queue COLLATE "C" AS queue, l.paused, l.max_tries, l.dead_letter_queue COLLATE "C" AS dead_letter_queue,
       l.key_timeout, l.puts, l.gets, l.reserves, l.commits, l.rollbacks, l.dead_letters, l.removes
FROM messages.list_queues() AS l;

COMMENT ON VIEW messages.queues IS
    'The rows of list_queues for all queues.';


CREATE OR REPLACE FUNCTION messages.list_queued(
    names text[] DEFAULT '{*}'
)
RETURNS SETOF messages.queued_rows
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- As peek does.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET max_parallel_workers_per_gather = 0
SET jit = off
AS $$
DECLARE
    v_queue record;
BEGIN
    FOR v_queue IN
        SELECT q.id, q.name::text FROM messages._listed_queues(names, '{R,RW,A}') AS q ORDER BY q.name
    LOOP
        RETURN QUERY SELECT * FROM messages._queued_rows(v_queue.id, v_queue.name, NULL, true);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages.list_queued IS
    'All elements of queues that match these names and patterns and that a rule lets this role read (all, for the owner); none is taken. state: available, scheduled or reserved. Errors: none.';


CREATE OR REPLACE VIEW messages.queued AS
SELECT l.id, l.queue COLLATE "C" AS queue, l.body, l.enc, l.headers, l.mature, l.tries, l.hops, l.pushed_at, l.state
FROM messages.list_queued() AS l;

COMMENT ON VIEW messages.queued IS
    'The rows of list_queued for all queues: each query reads all elements. peek reads one queue.';
