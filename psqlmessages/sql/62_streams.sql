-- Streams: messages kept until their subscribers have them. Stored by id, in tables filled and emptied in turn.

CREATE TABLE IF NOT EXISTS psqlmessages_streammessage (
    slot smallint NOT NULL,
    topic_id bigint NOT NULL,
    id bigint NOT NULL,
    sender text COLLATE "C" NOT NULL,
    published_at timestamp with time zone NOT NULL,
    enc text,
    payload text NOT NULL,
    PRIMARY KEY (slot, topic_id, id)
) PARTITION BY LIST (slot);

DO $$
BEGIN
    FOR v_slot IN 0 .. 3 LOOP
        -- Rows are inserted and truncated, never changed: there is nothing for a vacuum to find.
        EXECUTE format(
            'CREATE TABLE IF NOT EXISTS psqlmessages_streammessage_%s PARTITION OF psqlmessages_streammessage'
            ' FOR VALUES IN (%s) WITH (autovacuum_vacuum_insert_threshold = -1)', v_slot, v_slot
        );
    END LOOP;
END
$$;

-- Ids draw one by one (CACHE 1): a position is an id, and what has a lower one is older.
CREATE SEQUENCE IF NOT EXISTS messages._stream_id CACHE 1;
DO $$
BEGIN
    -- A sequence that was never used reports as last what it will give first.
    IF NOT (SELECT s.is_called FROM messages._stream_id AS s) THEN
        PERFORM nextval('messages._stream_id');
    END IF;
END
$$;

-- Where messages go now. Every publisher holds ROW EXCLUSIVE on this table until its commit.
CREATE TABLE IF NOT EXISTS messages._stream (
    id boolean PRIMARY KEY DEFAULT true,
    slot smallint NOT NULL DEFAULT 0,
    switched_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    tended_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT stream_has_one_row CHECK (id)
);
INSERT INTO messages._stream DEFAULT VALUES ON CONFLICT DO NOTHING;

-- The last message of a topic that is no longer kept.
CREATE TABLE IF NOT EXISTS messages._stream_last (
    topic_id bigint PRIMARY KEY,
    id bigint NOT NULL,
    published_at timestamp with time zone NOT NULL
);


CREATE OR REPLACE FUNCTION messages._stream_lock(
    topic_id bigint
)
RETURNS int
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT 1347223552 + (topic_id % 65536)::int
$$;

COMMENT ON FUNCTION messages._stream_lock IS
    'The class of the advisory locks that publishers to a topic hold. Two topics may share one: readers then wait for both.';


CREATE OR REPLACE FUNCTION messages._begin_publishing(
    topic_id bigint
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_mark text := ',' || topic_id || ',';
    v_before text := current_setting('messages.publishing', true);
    v_class int := messages._stream_lock(topic_id);
    v_last bigint;
BEGIN
    IF strpos(v_before, v_mark) > 0 THEN
        RETURN;
    END IF;
    -- Before the advisory lock, which counts only together with this one.
    LOCK TABLE messages._stream IN ROW EXCLUSIVE MODE;
    SELECT s.last_value INTO v_last FROM messages._stream_id AS s;
    FOR v_try IN 0 .. 1000 LOOP
        -- Where another role sits on this number, a lower one says less, and nothing wrong.
        IF pg_try_advisory_xact_lock_shared(v_class, (v_last - v_try)::bit(32)::int) THEN
            -- Local, so that a rollback to a savepoint takes the mark together with the lock.
            PERFORM set_config('messages.publishing', coalesce(v_before, '') || v_mark, true);
            IF current_setting('synchronous_commit') = 'off' THEN
                PERFORM set_config('synchronous_commit', 'on', true);
            END IF;
            RETURN;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'cannot publish: other sessions hold advisory locks of class %', v_class
        USING ERRCODE = 'lock_not_available',
            HINT = 'Locks of this class belong to psqlmessages: see pg_locks for who took them.';
END
$$;

COMMENT ON FUNCTION messages._begin_publishing IS
    'Before the first id for a topic is drawn in a transaction: show readers from where on ids may still come, until the commit.';


CREATE OR REPLACE FUNCTION messages._horizon(
    topic_id bigint
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_last bigint := (SELECT s.last_value FROM messages._stream_id AS s);
    v_behind bigint;
BEGIN
    -- Virtual transactions, not pids: those of a prepared transaction have none.
    WITH locks AS MATERIALIZED (
        SELECT l.locktype, l.classid, l.objid, l.objsubid, l.relation, l.mode, l.virtualtransaction
        FROM pg_catalog.pg_locks AS l
        WHERE l.granted
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
          AND (l.locktype = 'advisory' AND l.mode = 'ShareLock'
              OR l.locktype = 'relation' AND l.mode = 'RowExclusiveLock')
    )
    SELECT max((v_last - a.objid::bigint) & 4294967295) INTO v_behind
    FROM locks AS a
    WHERE a.locktype = 'advisory' AND a.objsubid = 2
      AND a.classid = messages._stream_lock(topic_id)::oid
      -- Numbers a little ahead belong to publishers that came after v_last was read.
      AND (v_last - a.objid::bigint) & 4294967295 < 2147483648
      -- Any role can take an advisory lock, and none can take this one but by publishing.
      AND EXISTS (
          SELECT FROM locks AS r
          WHERE r.relation = 'messages._stream'::regclass AND r.virtualtransaction = a.virtualtransaction
      );
    RETURN v_last - coalesce(v_behind, 0);
END
$$;

COMMENT ON FUNCTION messages._horizon IS
    'Up to which id every message of a topic is committed or gone. Read rows in a statement after this one, and never with an older snapshot.';


CREATE OR REPLACE FUNCTION messages._store(
    topic_id bigint,
    sender text,
    payloads text[],
    enc text
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_slot smallint;
    v_id bigint;
BEGIN
    PERFORM messages._begin_publishing(topic_id);
    SELECT s.slot INTO v_slot FROM messages._stream AS s;
    IF cardinality(payloads) = 1 THEN
        INSERT INTO psqlmessages_streammessage AS m (slot, topic_id, id, sender, published_at, enc, payload)
        VALUES (v_slot, topic_id, nextval('messages._stream_id'), sender, clock_timestamp(), enc, coalesce(payloads[1], ''))
        RETURNING m.id INTO v_id;
        RETURN v_id;
    END IF;
    INSERT INTO psqlmessages_streammessage (slot, topic_id, id, sender, published_at, enc, payload)
    SELECT v_slot, topic_id, nextval('messages._stream_id'), sender, clock_timestamp(), enc, coalesce(p.payload, '')
    FROM unnest(payloads) AS p (payload);
    RETURN CASE WHEN payloads <> '{}' THEN currval('messages._stream_id') END;
END
$$;

COMMENT ON FUNCTION messages._store IS
    'Keep messages for a topic''s subscriptions, in order; answers the last id.';


CREATE OR REPLACE FUNCTION messages._is_alive(
    pinged_at timestamp with time zone,
    timeout int
)
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT pinged_at + make_interval(secs => timeout) > clock_timestamp()
$$;

COMMENT ON FUNCTION messages._is_alive IS
    'Whether a subscription has been pinged in time.';


CREATE OR REPLACE FUNCTION messages._subscribers(
    topic text
)
RETURNS int
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN (
        SELECT count(*) FROM psqlmessages_subscription AS s
        WHERE s.topic = _subscribers.topic AND messages._is_alive(s.pinged_at, s.timeout)
    );
END
$$;

COMMENT ON FUNCTION messages._subscribers IS
    'How many subscriptions of a topic are alive now.';


CREATE OR REPLACE FUNCTION messages._wake(
    topic text,
    wakes text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_channel text;
BEGIN
    -- Without an Id: of many in one transaction one arrives, which is all that is needed.
    FOREACH v_channel IN ARRAY wakes LOOP
        PERFORM pg_notify(v_channel, '{"Type":"Sys","Evt":"published","Topic":' || to_json(topic) || '}');
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._wake IS
    'Tell connected subscribers that there is something to read.';


CREATE OR REPLACE FUNCTION messages._store_sent(
    topic_id bigint,
    sender text,
    payloads text[],
    enc text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_topic psqlmessages_topic;
BEGIN
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.id = topic_id;
    IF v_topic.retention = 0 AND messages._subscribers(v_topic.name) = 0 THEN
        RETURN false;
    END IF;
    PERFORM messages._store(topic_id, sender, payloads, enc);
    PERFORM messages._wake(v_topic.name, v_topic.wakes);
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._store_sent IS
    'Keep what topic_send sends, where a subscription or a retention wants it; false where none does any more.';


CREATE OR REPLACE FUNCTION messages._publishing_fault(
    ident text,
    topic text,
    enc text,
    size bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_fault json;
BEGIN
    v_fault := messages._client_fault(ident, topic);
    IF v_fault IS NULL THEN
        v_fault := messages._topic_fault(session_user, ident, topic, 'W', true);
    END IF;
    RETURN coalesce(v_fault, messages._content_fault(NULL, enc, size));
END
$$;

COMMENT ON FUNCTION messages._publishing_fault IS
    'Why this role may not publish this as that node, or null.';


CREATE OR REPLACE FUNCTION messages._client_fault(
    ident text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF length(ident) > 100 OR length(topic) > 100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(topic, '') = '' THEN
        RETURN messages._error(1);
    ELSIF coalesce(ident, '') = '' THEN
        RETURN messages._error(15);
    ELSIF right(ident, 1) = '*' OR NOT messages._is_known(ident) THEN
        RETURN messages._error(16, ident);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._client_fault IS
    'What is wrong with the names of a call that needs no session (errors 54, 1, 15, 16), or null.';


CREATE OR REPLACE FUNCTION messages._topic_to_publish(
    ident text,
    topic text
)
RETURNS psqlmessages_topic
LANGUAGE plpgsql
AS $$
DECLARE
    v_topic psqlmessages_topic;
BEGIN
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    IF FOUND THEN
        RETURN v_topic;
    END IF;
    PERFORM messages._share_gate();
    IF messages._topic_fault(session_user, ident, topic, 'W', true) IS NOT NULL THEN
        RETURN NULL;
    END IF;
    PERFORM messages._make_topics(ARRAY[topic], true);
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    RETURN v_topic;
END
$$;

COMMENT ON FUNCTION messages._topic_to_publish IS
    'The topic''s row, made where a pattern allows it; null where the rule for that went away this moment.';


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
    v_fault json;
    v_topic psqlmessages_topic;
    v_id bigint;
    v_timeout int;
BEGIN
    PERFORM messages._log_command(command, client_id, topic);
    v_fault := messages._publishing_fault(client_id, topic, enc, v_largest);
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    v_topic := messages._topic_to_publish(client_id, topic);
    IF v_topic.id IS NULL THEN
        RETURN messages._error(2, 'Topic', topic);
    END IF;
    v_id := messages._store(v_topic.id, client_id, payloads, enc);
    IF v_topic.channels <> '{}' THEN
        SELECT r.timeout INTO v_timeout FROM messages._rights(session_user, client_id, 'Topic', topic) AS r;
        PERFORM messages._notify_all(
            v_topic.id, v_timeout,
            messages._topic_header(
                ',"To":' || to_json(topic) || ',"From":' || to_json(client_id),
                v_topic.id, NULL, v_timeout, NULL, enc
            ),
            v_topic.channels, payloads, v_largest
        );
    END IF;
    PERFORM messages._wake(topic, v_topic.wakes);
    PERFORM messages._evaluate_if_due();
    RETURN (
        '{"Err":"0","Id":' || coalesce(v_id::text, 'null') || ',"Listeners":' || v_topic.listeners
        || ',"Subscribers":' || messages._subscribers(topic) || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages._publish IS
    'Store and send any number of payloads, or say why not. Id: of the last.';


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
BEGIN
    RETURN messages._publish('publish', client_id, topic, ARRAY[payload], enc);
END
$$;

COMMENT ON FUNCTION messages.publish IS
    'Store a message for a topic''s subscriptions, and send it to its listeners, at commit. Needs no session; makes the topic where a pattern allows it. Errors: 54, 1, 15, 16, 9, 2, 3, 55, 51.';


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
    'Publish many messages in one call, checked once. Id: of the last. On an error nothing is stored. Errors: 54, 1, 15, 16, 9, 2, 3, 55, 51.';
