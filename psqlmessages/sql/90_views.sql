-- Views: what is public of the tables.

CREATE OR REPLACE VIEW messages.auth AS
SELECT a.id, a.role, a.ident, a.type, a.dest, a.mode, a.timeout
FROM psqlmessages_auth AS a;

COMMENT ON VIEW messages.auth IS
    'The rules, to be read and changed by the owner and by those the owner grants it to.';


CREATE OR REPLACE VIEW messages.topics
WITH (security_barrier) AS
WITH live (session_id) AS MATERIALIZED (
    SELECT s.id
    FROM psqlmessages_session AS s
    JOIN pg_catalog.pg_locks AS l
        ON l.locktype = 'advisory' AND l.classid = 1886612839 AND l.objsubid = 2
        AND l.objid = s.id::oid AND l.pid = s.pid AND l.mode = 'ExclusiveLock' AND l.granted
    WHERE l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
)
SELECT t.name::text AS topic,
    ARRAY(
        SELECT c.ident::text
        FROM psqlmessages_membership AS m
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        WHERE m.topic_id = t.id AND m.kind = 'notify'
          AND c.session_id IN (SELECT live.session_id FROM live)
        ORDER BY c.ident
    ) AS notifiers,
    ARRAY(
        SELECT c.ident::text
        FROM psqlmessages_membership AS m
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        WHERE m.topic_id = t.id AND m.kind = 'listen'
          AND c.session_id IN (SELECT live.session_id FROM live)
        ORDER BY c.ident
    ) AS listeners
FROM psqlmessages_topic AS t
WHERE pg_has_role(
        session_user,
        (SELECT k.relowner FROM pg_catalog.pg_class AS k WHERE k.oid = 'psqlmessages_topic'::regclass),
        'MEMBER'
    )
    OR EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE a.type = 'Topic'
          AND (a.dest = t.name OR right(a.dest, 1) = '*' AND starts_with(t.name, left(a.dest, -1)))
          AND (a.role = session_user OR EXISTS (
              SELECT FROM pg_catalog.pg_roles AS r
              WHERE r.rolname = a.role AND pg_has_role(session_user, r.oid, 'MEMBER')
          ))
    );

COMMENT ON VIEW messages.topics IS
    'The topics that a rule lets this role use (all, for the owner): who sends and who listens now.';


CREATE OR REPLACE VIEW messages.stream_subscriptions
WITH (security_barrier) AS
SELECT s.ident::text AS client,
    s.topic::text AS topic,
    s.started_at AS subscription_timestamp,
    s.timeout,
    s.pinged_at AS last_ping_timestamp
FROM psqlmessages_subscription AS s
WHERE s.is_alive AND s.pinged_at + make_interval(secs => s.timeout) > clock_timestamp()
  AND s.topic IN (SELECT t.topic FROM messages.topics AS t);

COMMENT ON VIEW messages.stream_subscriptions IS
    'The subscriptions that are alive, to topics that a rule lets this role use. timeout: seconds that one outlives its last ping.';


CREATE OR REPLACE VIEW messages.stream_topics
WITH (security_barrier) AS
WITH subscribed AS (
    -- More than an int holds only where the clock was put back.
    SELECT s.topic, count(*) AS subscriptions,
           least(
               ceil(extract(epoch FROM
                   max(s.last_ping_timestamp + make_interval(secs => s.timeout)) - clock_timestamp()
               )), 2147483647
           )::int AS relative_timeout
    FROM messages.stream_subscriptions AS s GROUP BY s.topic
)
SELECT t.name::text AS topic,
    greatest(
        (SELECT m.published_at FROM psqlmessages_streammessage AS m
         WHERE m.topic_id = t.id ORDER BY m.id DESC LIMIT 1),
        (SELECT l.published_at FROM messages._stream_last AS l WHERE l.topic_id = t.id)
    ) AS last_msg_recv_timestamp,
    greatest(t.retention, n.relative_timeout) AS relative_timeout,
    coalesce(n.subscriptions, 0) AS number_of_users_subscribed
FROM psqlmessages_topic AS t
LEFT JOIN subscribed AS n ON n.topic = t.name
WHERE t.name IN (SELECT v.topic FROM messages.topics AS v);

COMMENT ON VIEW messages.stream_topics IS
    'Topics as their streams see them. relative_timeout: seconds that a message must be kept if it comes now.';


CREATE OR REPLACE VIEW messages.stream_clients
WITH (security_barrier) AS
SELECT s.client,
    (SELECT c.connected_at FROM psqlmessages_client AS c WHERE c.ident = s.client) AS connection_timestamp,
    count(*) AS number_of_subscriptions
FROM messages.stream_subscriptions AS s
GROUP BY s.client;

COMMENT ON VIEW messages.stream_clients IS
    'Nodes with subscriptions, and since when they are connected (null where they are not).';


CREATE OR REPLACE VIEW messages.stored
WITH (security_barrier) AS
SELECT m.id, t.name::text AS topic, m.sender::text AS sender, m.payload AS body, m.enc, NULL::text AS headers,
       m.published_at
FROM psqlmessages_topic AS t
JOIN psqlmessages_streammessage AS m ON m.topic_id = t.id
WHERE pg_has_role(
        session_user,
        (SELECT k.relowner FROM pg_catalog.pg_class AS k WHERE k.oid = 'psqlmessages_topic'::regclass),
        'MEMBER'
    )
    OR EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE a.type = 'Topic' AND a.mode IN ('R', 'RW')
          AND (a.dest = t.name OR right(a.dest, 1) = '*' AND starts_with(t.name, left(a.dest, -1)))
          AND (a.role = session_user OR EXISTS (
              SELECT FROM pg_catalog.pg_roles AS r
              WHERE r.rolname = a.role AND pg_has_role(session_user, r.oid, 'MEMBER')
          ))
    );

COMMENT ON VIEW messages.stored IS
    'The messages kept of topics that a rule lets this role read (all, for the owner). Read up to a horizon, after LOCK TABLE messages.stored IN ACCESS SHARE MODE: a snapshot older than that may miss what a removal has moved.';


CREATE OR REPLACE VIEW messages.queued
WITH (security_barrier) AS
SELECT e.id, q.name::text AS queue, e.body, e.enc, e.headers::text AS headers, e.mature_at AS mature, e.tries,
       CASE
           WHEN e.headers ->> 'x-hop-count' ~ '^[0-9]{1,9}$' THEN (e.headers ->> 'x-hop-count')::int
           WHEN e.headers ->> 'x-hop-count' ~ '^[0-9]+$' THEN 999999999
           ELSE 0
       END AS hops,
       e.pushed_at,
       CASE
           WHEN e.available_at <= statement_timestamp() THEN 'available'
           WHEN e.lease IS NULL THEN 'scheduled'
           ELSE 'reserved'
       END AS state
FROM psqlmessages_queue AS q
JOIN psqlmessages_element AS e ON e.queue_id = q.id
WHERE pg_has_role(
        session_user,
        (SELECT k.relowner FROM pg_catalog.pg_class AS k WHERE k.oid = 'psqlmessages_queue'::regclass),
        'MEMBER'
    )
    OR EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE a.type = 'Queue' AND a.mode IN ('R', 'RW')
          AND (a.dest = q.name OR right(a.dest, 1) = '*' AND starts_with(q.name, left(a.dest, -1)))
          AND (a.role = session_user OR EXISTS (
              SELECT FROM pg_catalog.pg_roles AS r
              WHERE r.rolname = a.role AND pg_has_role(session_user, r.oid, 'MEMBER')
          ))
    );

COMMENT ON VIEW messages.queued IS
    'A look at the elements of queues that a rule lets this role read (all, for the owner); nothing is taken. state: available, scheduled or reserved.';
