-- Streams and publishing: messages are stored until every subscription has read them and the retention of their topic
-- has passed, in four partitions that are filled in turn. slot: the number of the partition.

CREATE TABLE IF NOT EXISTS psqlmessages_streammessage (
    topic_id bigint NOT NULL,
    id bigint NOT NULL,
    slot smallint NOT NULL,
    sender text COLLATE "C" NOT NULL,
    published_at timestamp with time zone NOT NULL,
    enc text,
    payload text NOT NULL,
    PRIMARY KEY (topic_id, id, slot)
) PARTITION BY LIST (slot);

DO $$
BEGIN
    FOR v_slot IN 0 .. 3 LOOP
        -- No VACUUM, which would find nothing to remove. No ANALYZE: if it saw a small table, cached plans would be
        -- slow for a large one. The planner does not assume that a table without statistics is small.
        EXECUTE format(
            'CREATE TABLE IF NOT EXISTS psqlmessages_streammessage_%s PARTITION OF psqlmessages_streammessage'
            ' FOR VALUES IN (%s) WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', v_slot, v_slot
        );
    END LOOP;
END
$$;

-- CACHE 1, so that a message with a lower id is older. Read the last id with pg_sequence_last_value: while nextval
-- writes a WAL record, a plain SELECT may return an id that is up to 32 too high.
CREATE SEQUENCE IF NOT EXISTS messages._stream_id CACHE 1;
DO $$
BEGIN
    -- Use the sequence, because an unused one reports its first value as its last. After a new installation, begin
    -- above the positions that subscriptions have from the former sequence.
    IF NOT (SELECT s.is_called FROM messages._stream_id AS s) THEN
        PERFORM setval('messages._stream_id', greatest(1, (SELECT max(s.position) FROM psqlmessages_subscription AS s)));
    END IF;
END
$$;

-- slot: the partition that is being filled. switched_at: when that began. maintained_at: the last housekeeping that wrote.
-- garbage_removed_at: the last removal of ended subscriptions and unused topics. secret: the key for _publishing_proof;
-- it is in this row because each publish reads the row anyway.
CREATE TABLE IF NOT EXISTS messages._stream (
    id boolean PRIMARY KEY DEFAULT true,
    slot smallint NOT NULL DEFAULT 0,
    switched_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    maintained_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    garbage_removed_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    secret bytea NOT NULL
        DEFAULT sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
    CONSTRAINT stream_has_one_row CHECK (id)
);
INSERT INTO messages._stream DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Clock gaps, the last ten: periods without housekeeping, because the clock was set forward or nothing was called.
CREATE TABLE IF NOT EXISTS messages._clock_gap (
    began_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone PRIMARY KEY
);

-- The last removed message of each topic.
CREATE TABLE IF NOT EXISTS messages._last_removed_message (
    topic_id bigint PRIMARY KEY,
    id bigint NOT NULL,
    published_at timestamp with time zone NOT NULL
);

-- The last message of each removed topic. If a topic of this name is created again, subscriptions with a lower position
-- have missed the message.
CREATE TABLE IF NOT EXISTS messages._removed_topic (
    topic text COLLATE "C" PRIMARY KEY,
    id bigint NOT NULL
);


CREATE OR REPLACE FUNCTION messages._on_topics_truncated()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    DELETE FROM messages._last_removed_message;
    DELETE FROM messages._removed_topic;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._on_topics_truncated IS
    'After TRUNCATE of topics, for instance by flush: forget the last removed messages, because new topics may get the same ids.';

CREATE OR REPLACE TRIGGER topics_truncated
AFTER TRUNCATE ON psqlmessages_topic
FOR EACH STATEMENT EXECUTE FUNCTION messages._on_topics_truncated();


CREATE OR REPLACE FUNCTION messages._publish_lock_class(
    topic_id bigint
)
RETURNS int
LANGUAGE sql
IMMUTABLE
AS $$
    -- The upper half is 0x504D, "PM", and the lower half the end of the topic's id.
    SELECT 1347223552 + (topic_id % 65536)::int
$$;

COMMENT ON FUNCTION messages._publish_lock_class IS
    'The class of the first advisory lock of each publisher to a topic. Two topics may share a class; _publishing_proof distinguishes them.';


CREATE OR REPLACE FUNCTION messages._publishing_proof(
    topic_id bigint,
    last_id bigint,
    xact xid,
    secret bytea
)
RETURNS bigint
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT hashtextextended(
        encode(
            sha256(secret || int8send(topic_id) || int8send(last_id & 4294967295) || xidsend(xact)), 'hex'
        ) COLLATE "C", 0
    )
$$;

COMMENT ON FUNCTION messages._publishing_proof IS
    'The key of the second advisory lock of a publisher. It proves that the first one was taken by these functions, because no caller knows the secret; it is valid for one transaction, topic and id. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._begin_publishing(
    topic_id bigint,
    last_id bigint,
    secret bytea
)
RETURNS boolean
LANGUAGE plpgsql STRICT
AS $$
DECLARE
    -- The id that this transaction has locked before, from a list of ,<topic>=<id>, in a setting. Locking the same id
    -- again needs no entry in the lock table.
    v_first text := split_part(split_part(current_setting('messages.publishing', true), ',' || topic_id || '=', 2), ',', 1);
    v_last bigint := last_id;
    v_step float8 := 2;
BEGIN
    -- The caller may have forged it: a lower id only delays readers, and an id that is higher or far lower is ignored.
    -- One condition, because each takes time; CASE guarantees the order of its parts.
    IF (CASE WHEN length(v_first) BETWEEN 1 AND 18 AND translate(v_first, '0123456789', '') = '' THEN
        CASE WHEN v_first::bigint BETWEEN last_id - 1073741824 AND last_id THEN
            pg_try_advisory_xact_lock_shared(messages._publish_lock_class(topic_id), v_first::bigint::bit(32)::int)
            AND pg_try_advisory_xact_lock_shared(messages._publishing_proof(
                topic_id, v_first::bigint, xid(pg_current_xact_id()), secret
            ))
            AND current_setting('synchronous_commit') <> 'off'
        END
    END) THEN
        RETURN true;
    END IF;
    -- Another role may hold one of these locks. A lower id is also safe.
    WHILE NOT (
        pg_try_advisory_xact_lock_shared(messages._publish_lock_class(topic_id), v_last::bit(32)::int)
        AND pg_try_advisory_xact_lock_shared(messages._publishing_proof(
            topic_id, v_last, xid(pg_current_xact_id()), secret
        ))
    ) LOOP
        v_last := last_id - floor(random() * v_step)::bigint;
        v_step := least(2 * v_step, 1000000000);
    END LOOP;
    -- A local setting, so that a rollback to a savepoint undoes it together with the locks.
    PERFORM set_config(
        'messages.publishing',
        concat(',', topic_id, '=', v_last, ',', current_setting('messages.publishing', true)), true
    );
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._begin_publishing IS
    'Call it before ids for a topic are drawn: until the commit, two advisory locks show readers the id after which messages of this transaction may appear. last_id: the last id drawn, read before. Returns null for null arguments, else true.';


CREATE OR REPLACE FUNCTION messages._publishers(
    topics bigint[]
)
RETURNS TABLE (
    topic_id bigint,
    last_id bigint
)
LANGUAGE sql
STABLE
AS $$
    -- Virtual transactions and not pids, because a prepared transaction has no pid.
    WITH locks AS MATERIALIZED (
        SELECT l.locktype, l.classid::bigint, l.objid::bigint, l.objsubid, l.transactionid, l.virtualtransaction
        FROM pg_catalog.pg_locks AS l
        WHERE l.granted
          AND (l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock'
              OR l.locktype = 'advisory' AND l.mode = 'ShareLock' AND l.database = (
                  SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database()
              ))
    )
    SELECT t.id, a.objid
    FROM unnest(topics) AS t (id)
    JOIN locks AS a ON a.classid = messages._publish_lock_class(t.id) AND a.locktype = 'advisory' AND a.objsubid = 2
    -- The oldest id is the top transaction's and not of a subtransaction: the proof contains it.
    CROSS JOIN LATERAL (
        SELECT x.transactionid FROM locks AS x
        WHERE x.virtualtransaction = a.virtualtransaction AND x.locktype = 'transactionid'
        ORDER BY age(x.transactionid) DESC LIMIT 1
    ) AS x
    CROSS JOIN messages._stream AS m
    -- Any role can take an advisory lock, but no role can compute the key of the second one.
    WHERE messages._publishing_proof(t.id, a.objid, x.transactionid, m.secret) IN (
        SELECT (p.classid << 32) | p.objid FROM locks AS p WHERE p.locktype = 'advisory' AND p.objsubid = 1
    )
$$;

COMMENT ON FUNCTION messages._publishers IS
    'The open transactions that publish to these topics. last_id: the lower 32 bits of the id after which their messages start.';


CREATE OR REPLACE FUNCTION messages._watermark(
    topic_id bigint
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_last bigint := pg_sequence_last_value('messages._stream_id');
BEGIN
    RETURN v_last - coalesce((
        SELECT max((v_last - p.last_id) & 4294967295)
        FROM messages._publishers(ARRAY[topic_id]) AS p
        -- Ids a little higher than v_last belong to publishers that began after it was read.
        WHERE (v_last - p.last_id) & 4294967295 < 2147483648
    ), 0);
END
$$;

COMMENT ON FUNCTION messages._watermark IS
    'The id up to which every message of a topic is committed or rolled back. Read messages in a later statement, whose snapshot is newer.';


CREATE OR REPLACE FUNCTION messages._check_clock()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_last timestamp with time zone := (
        SELECT messages._last_checked_at('messages._streams_checked', s.maintained_at) FROM messages._stream AS s
    );
    v_now timestamp with time zone := clock_timestamp();
BEGIN
    IF v_last > v_now THEN
        -- The clock was set back.
        DELETE FROM messages._clock_gap AS g WHERE g.began_at >= v_now;
        UPDATE messages._clock_gap AS g SET ended_at = v_now WHERE g.ended_at > v_now;
    ELSIF v_last BETWEEN v_now - interval '1 year' AND v_now - interval '10 seconds' THEN
        -- Not after more than a year: then no earlier time was stored.
        INSERT INTO messages._clock_gap (began_at, ended_at) VALUES (v_last, v_now);
        DELETE FROM messages._clock_gap AS g
        WHERE g.ended_at < (SELECT min(l.ended_at) FROM (
            SELECT n.ended_at FROM messages._clock_gap AS n ORDER BY n.ended_at DESC LIMIT 10
        ) AS l);
    END IF;
    -- Correct pings in the future: if the clock was set back, these subscriptions would live longer.
    UPDATE psqlmessages_subscription AS s SET pinged_at = v_now
    WHERE s.id = ANY (ARRAY(
        SELECT a.id FROM psqlmessages_subscription AS a
        WHERE a.pinged_at > v_now + interval '10 seconds' FOR NO KEY UPDATE SKIP LOCKED
    ));
    -- Store the time compared above, because the clock may have changed since. Infinity stops housekeeping, for tests.
    UPDATE messages._stream SET maintained_at = v_now WHERE maintained_at < 'infinity';
END
$$;

COMMENT ON FUNCTION messages._check_clock IS
    'Compare the clock with the time of the last housekeeping, and store the time: record a clock gap, or correct times in the future. Lock the row of _stream first. Never waits.';


CREATE OR REPLACE FUNCTION messages._publish_target(
    topic text
)
RETURNS TABLE (
    id bigint,
    retention int,
    is_made_by_publish boolean,
    listeners int,
    channels text[],
    subscriber_channels text[],
    subscriptions int,
    slot smallint,
    last_id bigint,
    secret bytea
)
LANGUAGE sql
STABLE
AS $$
    SELECT t.id, t.retention, t.is_made_by_publish, t.listeners, t.channels, t.subscriber_channels, t.subscriptions,
           m.slot, pg_sequence_last_value('messages._stream_id'), m.secret
    FROM psqlmessages_topic AS t, messages._stream AS m
    WHERE t.name = _publish_target.topic
$$;

COMMENT ON FUNCTION messages._publish_target IS
    'What a publish to a topic needs; no row if the topic does not exist. subscriptions: may include some that have just expired. slot: the partition to fill. last_id: the last id drawn. secret: for _begin_publishing.';


CREATE OR REPLACE FUNCTION messages._store_messages(
    topic_id bigint,
    slot smallint,
    last_id bigint,
    secret bytea,
    sender text,
    payloads text[],
    enc text
)
RETURNS bigint[]
LANGUAGE plpgsql
AS $$
DECLARE
    -- Take the locks before ids are drawn.
    v_is_begun boolean := messages._begin_publishing(topic_id, last_id, secret);
    v_ids bigint[];
BEGIN
    WITH stored AS (
        INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)
        SELECT topic_id, nextval('messages._stream_id'), slot, sender, clock_timestamp(), enc, coalesce(p.payload, '')
        FROM unnest(payloads) AS p (payload)
        RETURNING id
    )
    SELECT coalesce(array_agg(s.id), '{}') INTO v_ids FROM stored AS s;
    RETURN v_ids;
END
$$;

COMMENT ON FUNCTION messages._store_messages IS
    'Store messages for the subscriptions of a topic, in order, and return their ids. topic_id, slot, last_id, secret: from _publish_target.';

-- Publishing: store messages, then notify listeners and subscribers. Publishers need no session.

CREATE OR REPLACE FUNCTION messages._notify_subscribers(
    topic text,
    channels text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_event text := '{"Type":"Sys","Evt":"published","Topic":' || to_json(topic) || '}';
    v_channel text;
BEGIN
    IF NOT messages._rules_are_applied() THEN
        channels := ARRAY(SELECT w.channel FROM messages._subscriber_channels(topic) AS w (channel));
    END IF;
    -- Without an Id the events are equal, so PostgreSQL delivers only one in a transaction.
    FOREACH v_channel IN ARRAY channels LOOP
        PERFORM pg_notify(v_channel, v_event);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._notify_subscribers IS
    'Notify the connected subscribers of a topic that there is a message to read. channels: those of the topic row; while a change of rules is unfinished, the current rules decide instead.';


CREATE OR REPLACE FUNCTION messages._store_if_needed(
    topic text,
    sender text,
    payloads text[],
    enc text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_topic record;
BEGIN
    SELECT * INTO v_topic FROM messages._publish_target(topic);
    IF v_topic.retention > 0 OR EXISTS (
        SELECT FROM psqlmessages_subscription AS s
        WHERE s.topic = _store_if_needed.topic AND s.is_alive
          AND (s.pinged_at + make_interval(secs => s.timeout) > clock_timestamp() OR messages._is_alive(s))
    ) THEN
        PERFORM messages._store_messages(
            v_topic.id, v_topic.slot, v_topic.last_id, v_topic.secret, sender, payloads, enc
        );
        PERFORM messages._notify_subscribers(topic, v_topic.subscriber_channels);
        RETURN true;
    END IF;
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._store_if_needed IS
    'Store messages of topic_send, and wake the subscribers, if a living subscription or a retention time needs the messages. Returns whether it did.';


CREATE OR REPLACE FUNCTION messages._publish_error(
    ident text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF length(ident) <= 100 AND length(topic) <= 100 AND ident <> '' AND topic <> ''
        AND right(ident, 1) <> '*' AND right(topic, 1) <> '*'
    THEN
        IF (SELECT r.can_write FROM messages._permissions(session_user, ident, 'Topic', topic) AS r) THEN
            RETURN NULL;
        END IF;
    END IF;
    -- The second check finds no error if a rule was added after the first one.
    RETURN coalesce(messages._topic_error_as(ident, topic, 'W', true), messages._error(2, 'Topic', topic));
END
$$;

COMMENT ON FUNCTION messages._publish_error IS
    'The error that forbids this role to publish as a node to a topic, which need not exist; or null.';


CREATE OR REPLACE FUNCTION messages._ensure_topic(
    ident text,
    topic text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    LOOP
        PERFORM FROM psqlmessages_topic AS t WHERE t.name = topic FOR KEY SHARE;
        IF FOUND THEN
            RETURN true;
        END IF;
        PERFORM messages._share_rules_lock();
        IF messages._topic_error(session_user, ident, topic, 'W', true) IS NOT NULL THEN
            RETURN false;
        END IF;
        PERFORM messages._make_topics(ARRAY[topic], true);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._ensure_topic IS
    'Make sure that a topic exists until the commit: lock it, or create it if no topic has this name. False if the rule that allows it has just been removed.';


CREATE OR REPLACE FUNCTION messages._publish(
    command text,
    client_id text,
    topic text,
    payloads text[],
    enc text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_largest int := (SELECT max(octet_length(p.payload)) FROM unnest(payloads) AS p (payload));
    v_error json := messages._publish_error(client_id, topic);
    v_topic record;
    v_timeout int;
    v_ids bigint[];
BEGIN
    PERFORM messages._log_command(command, client_id, topic);
    v_error := coalesce(v_error, messages._content_error(NULL, enc, v_largest));
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_topic FROM messages._publish_target(topic);
    IF v_topic.is_made_by_publish IS NOT FALSE THEN
        IF NOT messages._ensure_topic(client_id, topic) THEN
            RETURN messages._error(2, 'Topic', topic);
        END IF;
        SELECT * INTO v_topic FROM messages._publish_target(topic);
    END IF;
    SELECT r.timeout INTO v_timeout FROM messages._permissions(session_user, client_id, 'Topic', topic) AS r;
    IF v_timeout IS NULL THEN
        -- The last rule has just been removed.
        RETURN messages._error(2, 'Topic', topic);
    END IF;
    v_ids := messages._store_messages(
        v_topic.id, v_topic.slot, v_topic.last_id, v_topic.secret, client_id, payloads, enc
    );
    IF v_topic.channels <> '{}' THEN
        PERFORM messages._notify_all(
            v_topic.id, v_timeout,
            messages._topic_header(
                ',"To":' || to_json(topic) || ',"From":' || to_json(client_id), v_topic.id, NULL, v_timeout, NULL, enc
            ),
            v_topic.channels, payloads, v_largest
        );
    END IF;
    PERFORM messages._notify_subscribers(topic, v_topic.subscriber_channels);
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN (
        '{"Err":"0","Id":' || coalesce(v_ids[cardinality(v_ids)]::text, 'null') || ',"Listeners":' || v_topic.listeners
        || ',"Subscribers":' || v_topic.subscriptions
        || CASE WHEN command = 'publish_many' THEN ',"Ids":[' || array_to_string(v_ids, ',') || ']}' ELSE '}' END
    )::json;
END
$$;

COMMENT ON FUNCTION messages._publish IS
    'The implementation of publish and publish_many: store and send any number of payloads, or return the error. Id: of the last payload; Ids, only for publish_many: of all.';


CREATE OR REPLACE FUNCTION messages.publish(
    client_id text,
    topic text,
    payload text,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_topic bigint;
    v_slot smallint;
    v_last bigint;
    v_secret bytea;
    v_subscriber_channels text[];
    v_subscriptions int;
    v_is_first boolean;
    v_is_due boolean;
BEGIN
    -- The common case: a rule names the node and the topic without patterns, and the topic is permanent and has no
    -- listeners. One statement reads everything, because each expression is prepared again in every transaction.
    -- v_is_first: this transaction has not written anything yet. v_is_due: a log line or housekeeping may be due.
    SELECT t.id, m.slot, pg_sequence_last_value('messages._stream_id'), m.secret, nullif(t.subscriber_channels, '{}'),
           t.subscriptions,
           pg_current_xact_id_if_assigned() IS NULL AND current_setting('synchronous_commit') <> 'off',
           messages._nothing_is_due() IS NOT TRUE
    INTO v_topic, v_slot, v_last, v_secret, v_subscriber_channels, v_subscriptions, v_is_first, v_is_due
    FROM psqlmessages_topic AS t, psqlmessages_auth AS a, messages._stream AS m
    WHERE t.name = topic AND NOT t.is_made_by_publish AND t.channels = '{}'
      AND messages._rules_are_applied()
      AND octet_length(payload) <= 8192 AND (enc IS NULL OR enc IN ('b64', 'json'))
      AND a.ident = client_id AND a.type = 'Topic' AND a.dest = topic AND a.role = session_user
      AND a.mode IN ('W', 'RW') AND a.ident NOT LIKE '%*' AND a.dest NOT LIKE '%*';
    -- Take the locks of _begin_publishing without storing them: a second publish of this transaction takes its own.
    -- This is not part of the statement above, because the later publishes of a transaction need not prepare it.
    IF (CASE WHEN v_is_first THEN
        pg_try_advisory_xact_lock_shared(messages._publish_lock_class(v_topic), v_last::bit(32)::int)
        AND pg_try_advisory_xact_lock_shared(
            messages._publishing_proof(v_topic, v_last, xid(pg_current_xact_id()), v_secret)
        )
    END) IS NOT TRUE THEN
        -- Null: this is not the common case, or there is an error.
        IF messages._begin_publishing(v_topic, v_last, v_secret) IS NULL THEN
            RETURN messages._publish('publish', client_id, topic, ARRAY[payload], enc);
        END IF;
    END IF;
    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)
    VALUES (v_topic, nextval('messages._stream_id'), v_slot, client_id, clock_timestamp(), enc, payload);
    IF v_subscriber_channels IS NOT NULL THEN
        PERFORM messages._notify_subscribers(topic, v_subscriber_channels);
    END IF;
    IF v_is_due THEN
        PERFORM messages._log_command('publish', client_id, topic);
        PERFORM messages._schedule_housekeeping_if_due();
    END IF;
    -- The topic has no channels, so it has no listeners.
    RETURN concat(
        '{"Err":"0","Id":', currval('messages._stream_id'), ',"Listeners":0,"Subscribers":', v_subscriptions, '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.publish(text, text, text, text) IS
    'Store a message for the subscriptions of a topic and send it to the listeners, at commit. Needs no session; creates a missing topic if a rule allows it. Id: of the message; Listeners, Subscribers: their numbers. Errors: 54, 1, 15, 16, 9, 2, 3, 55, 51.';


CREATE OR REPLACE FUNCTION messages.publish_many(
    client_id text,
    topic text,
    payloads text[],
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._publish('publish_many', client_id, topic, coalesce(payloads, '{}'), enc);
END
$$;

COMMENT ON FUNCTION messages.publish_many IS
    'Publish many messages in one call, with one permission check. Id: of the last message; Ids: of all, in the order of the payloads. On an error nothing is stored. Errors: 54, 1, 15, 16, 9, 2, 3, 55, 51.';


CREATE OR REPLACE FUNCTION messages._has_json_field(
    payload text,
    path jsonpath,
    variables text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    -- Only objects and arrays have fields. The block below needs a subtransaction.
    IF payload !~ '^\s*[{[]' THEN
        RETURN false;
    END IF;
    BEGIN
        RETURN jsonb_path_exists(payload::jsonb, path, variables::jsonb, true);
    EXCEPTION WHEN data_exception OR program_limit_exceeded OR statement_too_complex THEN
        RETURN false;
    END;
END
$$;

COMMENT ON FUNCTION messages._has_json_field IS
    'For the monitor: whether this path finds a value in a JSON body. variables: a JSON object. False if the body or the variables are not valid jsonb, as with \u0000.';
