-- Streams: messages kept until their subscribers have them. Stored by id, in tables filled and emptied in turn.

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
        -- A vacuum would find nothing here. An analyze might see a small table, and who publishes or
        -- reads would go on with a plan for that: of what was never analyzed, no table counts as small.
        EXECUTE format(
            'CREATE TABLE IF NOT EXISTS psqlmessages_streammessage_%s PARTITION OF psqlmessages_streammessage'
            ' FOR VALUES IN (%s) WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', v_slot, v_slot
        );
    END LOOP;
END
$$;

-- CACHE 1: a message with a lower id is older. Read the last id with pg_sequence_last_value. A plain SELECT may
-- answer up to 32 too many while nextval writes its log record.
CREATE SEQUENCE IF NOT EXISTS messages._stream_id CACHE 1;
DO $$
BEGIN
    -- A sequence that was never used reports as last what it will give first. Where the functions were
    -- removed and come back, subscriptions stand at ids that the former sequence gave.
    IF NOT (SELECT s.is_called FROM messages._stream_id AS s) THEN
        PERFORM setval('messages._stream_id', greatest(1, (SELECT max(s.position) FROM psqlmessages_subscription AS s)));
    END IF;
END
$$;

-- Where messages go now.
CREATE TABLE IF NOT EXISTS messages._stream (
    id boolean PRIMARY KEY DEFAULT true,
    slot smallint NOT NULL DEFAULT 0,
    switched_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    tended_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    cleared_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT stream_has_one_row CHECK (id)
);
DO $$
BEGIN
    -- The key of the proofs that publishers hold. Here, because each publish reads this row anyway.
    IF NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = 'messages._stream'::regclass AND a.attname = 'secret'
    ) THEN
        ALTER TABLE messages._stream ADD COLUMN secret bytea NOT NULL
            DEFAULT sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));
    END IF;
END
$$;
INSERT INTO messages._stream DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Periods in which housekeeping did not run: the clock was put forward, or nobody called. The last ten.
CREATE TABLE IF NOT EXISTS messages._clock_gap (
    began_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone PRIMARY KEY
);

-- The last message of a topic that is no longer kept.
CREATE TABLE IF NOT EXISTS messages._stream_last (
    topic_id bigint PRIMARY KEY,
    id bigint NOT NULL,
    published_at timestamp with time zone NOT NULL
);

-- The same of topics that went, by name: one of this name may come back, and whoever stood before it has missed it.
CREATE TABLE IF NOT EXISTS messages._stream_gone (
    topic text COLLATE "C" PRIMARY KEY,
    id bigint NOT NULL
);


CREATE OR REPLACE FUNCTION messages._topics_truncated()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    DELETE FROM messages._stream_last;
    DELETE FROM messages._stream_gone;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._topics_truncated IS
    'After TRUNCATE, as a flush does: the ids of topics may begin anew, and mean others.';

CREATE OR REPLACE TRIGGER topics_truncated
AFTER TRUNCATE ON psqlmessages_topic
FOR EACH STATEMENT EXECUTE FUNCTION messages._topics_truncated();


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
    'The class of the advisory locks that publishers to a topic hold. Two topics may share one: readers tell them apart by the proof.';


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
    'The key of the second advisory lock of a publisher. Only our functions can compute it, and it fits one transaction, topic and number. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._begin_publishing(
    topic_id bigint,
    last_id bigint,
    secret bytea
)
RETURNS boolean
LANGUAGE plpgsql STRICT
AS $$
DECLARE
    -- The number of the first publish of this transaction: to lock it again takes no room.
    v_first text := split_part(split_part(current_setting('messages.publishing', true), ',' || topic_id || '=', 2), ',', 1);
BEGIN
    -- The caller may have forged it. A lower number only delays readers; a number ahead, or too far behind, is
    -- not used. A single condition, as each costs time; CASE keeps the order of its parts.
    IF (CASE WHEN length(v_first) BETWEEN 1 AND 18 AND translate(v_first, '0123456789', '') = '' THEN
        CASE WHEN v_first::bigint BETWEEN last_id - 1073741824 AND last_id THEN
            pg_try_advisory_xact_lock_shared(messages._stream_lock(topic_id), v_first::bigint::bit(32)::int)
            AND pg_try_advisory_xact_lock_shared(messages._publishing_proof(
                topic_id, v_first::bigint, xid(pg_current_xact_id()), secret
            ))
            AND current_setting('synchronous_commit') <> 'off'
        END
    END) THEN
        RETURN true;
    END IF;
    PERFORM messages._mark_publishing(topic_id, last_id, secret);
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._begin_publishing IS
    'Before ids for a topic are drawn: show readers from where on ids may still come, until the commit; null for null. last_id: the last one drawn, read before.';


CREATE OR REPLACE FUNCTION messages._mark_publishing(
    topic_id bigint,
    last_id bigint,
    secret bytea
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_last bigint := last_id;
    v_back float8 := 2;
BEGIN
    -- Another role may hold one of these locks: a lower number is safe as well.
    WHILE NOT (
        pg_try_advisory_xact_lock_shared(messages._stream_lock(topic_id), v_last::bit(32)::int)
        AND pg_try_advisory_xact_lock_shared(messages._publishing_proof(
            topic_id, v_last, xid(pg_current_xact_id()), secret
        ))
    ) LOOP
        v_last := last_id - floor(random() * v_back)::bigint;
        v_back := least(2 * v_back, 1000000000);
    END LOOP;
    -- Local, so that a rollback to a savepoint takes the mark together with the locks.
    PERFORM set_config(
        'messages.publishing',
        concat(',', topic_id, '=', v_last, ',', current_setting('messages.publishing', true)), true
    );
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._mark_publishing IS
    'Take new locks for _begin_publishing, and note their number for the next publish of this transaction.';


CREATE OR REPLACE FUNCTION messages._begin_first(
    topic_id bigint,
    last_id bigint,
    secret bytea
)
RETURNS boolean
LANGUAGE sql
AS $$
    SELECT CASE
        WHEN pg_current_xact_id_if_assigned() IS NULL AND current_setting('synchronous_commit') <> 'off'
        THEN pg_try_advisory_xact_lock_shared(messages._stream_lock(topic_id), last_id::bit(32)::int)
            AND pg_try_advisory_xact_lock_shared(
                messages._publishing_proof(topic_id, last_id, xid(pg_current_xact_id()), secret)
            )
    END
$$;

COMMENT ON FUNCTION messages._begin_first IS
    'The same for a transaction that has written nothing yet, which is most of them. No mark: the second message takes locks of its own, and makes it. Not true: _begin_publishing must do it. Inlined where it is called.';


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
    -- Virtual transactions, not pids: those of a prepared transaction have none.
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
    JOIN locks AS a ON a.classid = messages._stream_lock(t.id) AND a.locktype = 'advisory' AND a.objsubid = 2
    -- Of a transaction and its subtransactions the oldest: it has the proofs.
    CROSS JOIN LATERAL (
        SELECT x.transactionid FROM locks AS x
        WHERE x.virtualtransaction = a.virtualtransaction AND x.locktype = 'transactionid'
        ORDER BY age(x.transactionid) DESC LIMIT 1
    ) AS x
    CROSS JOIN messages._stream AS m
    -- Any role can take an advisory lock, but no role can compute this one.
    WHERE messages._publishing_proof(t.id, a.objid, x.transactionid, m.secret) IN (
        SELECT (p.classid << 32) | p.objid FROM locks AS p WHERE p.locktype = 'advisory' AND p.objsubid = 1
    )
$$;

COMMENT ON FUNCTION messages._publishers IS
    'The open transactions that publish to topics, and after which id (its lower 32 bits) theirs come.';


CREATE OR REPLACE FUNCTION messages._watermark(
    topic_id bigint
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_last bigint := pg_sequence_last_value('messages._stream_id');
    v_behind bigint;
BEGIN
    SELECT max((v_last - p.last_id) & 4294967295) INTO v_behind
    FROM messages._publishers(ARRAY[topic_id]) AS p
    -- Numbers a little ahead belong to publishers that came after v_last was read.
    WHERE (v_last - p.last_id) & 4294967295 < 2147483648;
    RETURN v_last - coalesce(v_behind, 0);
END
$$;

COMMENT ON FUNCTION messages._watermark IS
    'Up to which id every message of a topic is committed or gone. Read rows in a statement after this one, and never with an older snapshot.';


CREATE OR REPLACE FUNCTION messages._note_clock()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_last timestamp with time zone := (SELECT s.tended_at FROM messages._stream AS s);
    v_now timestamp with time zone := clock_timestamp();
BEGIN
    IF v_last > v_now THEN
        -- The clock was put back.
        DELETE FROM messages._clock_gap AS g WHERE g.began_at >= v_now;
        UPDATE messages._clock_gap AS g SET ended_at = v_now WHERE g.ended_at > v_now;
    ELSIF v_last BETWEEN v_now - interval '1 year' AND v_now - interval '10 seconds' THEN
        -- More than a year is no jump of a clock: nothing was noted before.
        INSERT INTO messages._clock_gap (began_at, ended_at) VALUES (v_last, v_now);
        DELETE FROM messages._clock_gap AS g
        WHERE g.ended_at < (SELECT min(l.ended_at) FROM (
            SELECT n.ended_at FROM messages._clock_gap AS n ORDER BY n.ended_at DESC LIMIT 10
        ) AS l);
    END IF;
    -- A ping by a clock that was put back since would keep the subscription for longer by as much.
    UPDATE psqlmessages_subscription AS s SET pinged_at = v_now
    WHERE s.id = ANY (ARRAY(
        SELECT a.id FROM psqlmessages_subscription AS a
        WHERE a.pinged_at > v_now + interval '10 seconds' FOR NO KEY UPDATE SKIP LOCKED
    ));
    -- The same time that was compared: the clock may jump meanwhile. Infinity stops housekeeping.
    UPDATE messages._stream SET tended_at = v_now WHERE tended_at < 'infinity';
END
$$;

COMMENT ON FUNCTION messages._note_clock IS
    'Compare the clock with the last time noted, behind the lock of _stream, and note it: store a gap, or pull back what is ahead. Never waits.';


CREATE OR REPLACE FUNCTION messages._gaps_since(
    since timestamp with time zone
)
RETURNS interval
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce(
        (SELECT sum(g.ended_at - g.began_at) FROM messages._clock_gap AS g WHERE g.ended_at > since), '0'
    ) + coalesce(
        -- The gap that housekeeping has not noted yet.
        (
            SELECT clock_timestamp() - s.tended_at FROM messages._stream AS s
            WHERE s.tended_at BETWEEN clock_timestamp() - interval '1 year' AND clock_timestamp() - interval '10 seconds'
        ), '0'
    )
$$;

COMMENT ON FUNCTION messages._gaps_since IS
    'How much of the time since then may be no time that passed, but a clock that was put forward.';


CREATE OR REPLACE FUNCTION messages._is_alive(
    subscription psqlmessages_subscription
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    -- Both: what was found dead stays so, even if the clock is put back.
    RETURN subscription.is_alive AND (
        subscription.pinged_at + make_interval(secs => subscription.timeout) > clock_timestamp()
        OR subscription.pinged_at + make_interval(secs => subscription.timeout)
            + messages._gaps_since(subscription.pinged_at) > clock_timestamp()
    );
END
$$;

COMMENT ON FUNCTION messages._is_alive IS
    'Whether a subscription has been pinged in time, not counting gaps of the clock; null where there is none.';


CREATE OR REPLACE FUNCTION messages._stream_of(
    topic text
)
RETURNS TABLE (
    id bigint,
    retention int,
    is_made_by_publish boolean,
    listeners int,
    channels text[],
    wakes text[],
    subscriptions int,
    slot smallint,
    last_id bigint,
    secret bytea
)
LANGUAGE sql
STABLE
AS $$
    SELECT t.id, t.retention, t.is_made_by_publish, t.listeners, t.channels, t.wakes, t.subscriptions,
           m.slot, pg_sequence_last_value('messages._stream_id'), m.secret
    FROM psqlmessages_topic AS t, messages._stream AS m
    WHERE t.name = _stream_of.topic
$$;

COMMENT ON FUNCTION messages._stream_of IS
    'What publishing to a topic needs to know. subscriptions: those that died this very second may be among them; slot: where messages go; last_id: the last one drawn; secret: for _begin_publishing. No row where there is no such topic.';


CREATE OR REPLACE FUNCTION messages._store(
    topic_id bigint,
    slot smallint,
    last_id bigint,
    secret bytea,
    sender text,
    payloads text[],
    enc text
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    -- Ids are drawn with these locks held.
    v_is_begun boolean := messages._begin_publishing(topic_id, last_id, secret);
BEGIN
    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)
    SELECT topic_id, nextval('messages._stream_id'), slot, sender, clock_timestamp(), enc, coalesce(p.payload, '')
    FROM unnest(payloads) AS p (payload);
    IF FOUND THEN
        RETURN currval('messages._stream_id');
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._store IS
    'Keep messages for a topic''s subscriptions, in order; answers the last id.';

-- Publishing: messages are stored first, then told to listeners and subscribers. It needs no session.

CREATE OR REPLACE FUNCTION messages._wake(
    topic text,
    wakes text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_event text := '{"Type":"Sys","Evt":"published","Topic":' || to_json(topic) || '}';
    v_channel text;
BEGIN
    -- Without an Id: of many in one transaction one arrives, which is all that is needed.
    FOREACH v_channel IN ARRAY wakes LOOP
        PERFORM pg_notify(v_channel, v_event);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._wake IS
    'Tell connected subscribers that there is something to read.';


CREATE OR REPLACE FUNCTION messages._store_sent(
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
    SELECT * INTO v_topic FROM messages._stream_of(topic);
    IF v_topic.retention > 0 OR EXISTS (
        SELECT FROM psqlmessages_subscription AS s
        WHERE s.topic = _store_sent.topic AND s.is_alive
          AND (s.pinged_at + make_interval(secs => s.timeout) > clock_timestamp() OR messages._is_alive(s))
    ) THEN
        PERFORM messages._store(v_topic.id, v_topic.slot, v_topic.last_id, v_topic.secret, sender, payloads, enc);
        PERFORM messages._wake(topic, messages._allowed_wakeups(topic, v_topic.wakes));
        RETURN true;
    END IF;
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._store_sent IS
    'Keep what topic_send sends, where a subscription or a retention wants it; false where none does any more.';


CREATE OR REPLACE FUNCTION messages._client_error(
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

COMMENT ON FUNCTION messages._client_error IS
    'What is wrong with the names of a call that needs no session (errors 54, 1, 15, 16), or null.';


CREATE OR REPLACE FUNCTION messages._publishing_error(
    ident text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_error json;
BEGIN
    IF length(ident) <= 100 AND length(topic) <= 100 AND ident <> '' AND topic <> ''
        AND right(ident, 1) <> '*' AND right(topic, 1) <> '*'
    THEN
        IF (SELECT r.can_write FROM messages._rights(session_user, ident, 'Topic', topic) AS r) THEN
            RETURN NULL;
        END IF;
    END IF;
    v_error := coalesce(
        messages._client_error(ident, topic),
        messages._topic_error(session_user, ident, topic, 'W', true)
    );
    -- Null only where the rule came this moment, after the first look.
    RETURN coalesce(v_error, messages._error(2, 'Topic', topic));
END
$$;

COMMENT ON FUNCTION messages._publishing_error IS
    'Why this role may not publish as that node to that topic, be it there or not; or null.';


CREATE OR REPLACE FUNCTION messages._lock_topic(
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

COMMENT ON FUNCTION messages._lock_topic IS
    'Keep a topic that comes and goes with its messages from going until the commit, and make it where it is not there; false where the rule for that went away this moment.';


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
    v_error json := messages._publishing_error(client_id, topic);
    v_topic record;
    v_timeout int;
    v_id bigint;
BEGIN
    PERFORM messages._log_command(command, client_id, topic);
    v_error := coalesce(v_error, messages._content_error(NULL, enc, v_largest));
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_topic FROM messages._stream_of(topic);
    IF v_topic.is_made_by_publish IS NOT FALSE THEN
        IF NOT messages._lock_topic(client_id, topic) THEN
            RETURN messages._error(2, 'Topic', topic);
        END IF;
        SELECT * INTO v_topic FROM messages._stream_of(topic);
    END IF;
    SELECT r.timeout INTO v_timeout FROM messages._rights(session_user, client_id, 'Topic', topic) AS r;
    IF v_timeout IS NULL THEN
        -- The last rule for it went away this moment.
        RETURN messages._error(2, 'Topic', topic);
    END IF;
    v_id := messages._store(v_topic.id, v_topic.slot, v_topic.last_id, v_topic.secret, client_id, payloads, enc);
    IF v_topic.channels <> '{}' THEN
        PERFORM messages._notify_all(
            v_topic.id, v_timeout,
            messages._topic_header(
                ',"To":' || to_json(topic) || ',"From":' || to_json(client_id), v_topic.id, NULL, v_timeout, NULL, enc
            ),
            v_topic.channels, payloads, v_largest
        );
    END IF;
    PERFORM messages._wake(topic, messages._allowed_wakeups(topic, v_topic.wakes));
    PERFORM messages._run_housekeeping_if_due();
    RETURN (
        '{"Err":"0","Id":' || coalesce(v_id::text, 'null') || ',"Listeners":' || v_topic.listeners
        || ',"Subscribers":' || v_topic.subscriptions || '}'
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
DECLARE
    v_topic bigint;
    v_slot smallint;
    v_last bigint;
    v_secret bytea;
    v_wakes text[];
    v_subscriptions int;
    v_is_first boolean;
    v_is_due boolean;
BEGIN
    -- The common case is decided by one statement and done without further functions: a rule names
    -- node and topic as they are, nobody listens, and the topic stays. Much is asked at once: what
    -- a function's expressions cost here is their preparation, anew in each transaction.
    SELECT t.id, m.slot, pg_sequence_last_value('messages._stream_id'), m.secret, nullif(t.wakes, '{}'),
           t.subscriptions, pg_current_xact_id_if_assigned() IS NULL, messages._is_evaluated() IS NOT TRUE
    INTO v_topic, v_slot, v_last, v_secret, v_wakes, v_subscriptions, v_is_first, v_is_due
    FROM psqlmessages_topic AS t, psqlmessages_auth AS a, messages._stream AS m
    WHERE t.name = topic AND NOT t.is_made_by_publish AND t.channels = '{}'
      AND messages._is_settled()
      AND octet_length(payload) <= 8192 AND (enc IS NULL OR enc IN ('b64', 'json'))
      AND a.ident = client_id AND a.type = 'Topic' AND a.dest = topic AND a.role = session_user
      AND a.mode IN ('W', 'RW') AND a.ident NOT LIKE '%*' AND a.dest NOT LIKE '%*';
    -- Not in the statement: in a transaction that goes on publishing, these would be prepared for nothing.
    IF (CASE WHEN v_is_first THEN messages._begin_first(v_topic, v_last, v_secret) END) IS NOT TRUE THEN
        IF messages._begin_publishing(v_topic, v_last, v_secret) IS NULL THEN
            RETURN messages._publish('publish', client_id, topic, ARRAY[payload], enc);
        END IF;
    END IF;
    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)
    VALUES (v_topic, nextval('messages._stream_id'), v_slot, client_id, clock_timestamp(), enc, payload);
    IF v_wakes IS NOT NULL THEN
        PERFORM messages._wake(topic, v_wakes);
    END IF;
    IF v_is_due THEN
        PERFORM messages._log_command('publish', client_id, topic);
        PERFORM messages._run_housekeeping_if_due();
    END IF;
    -- Nobody listens where there are no channels.
    RETURN concat(
        '{"Err":"0","Id":', currval('messages._stream_id'), ',"Listeners":0,"Subscribers":', v_subscriptions, '}'
    )::json;
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
