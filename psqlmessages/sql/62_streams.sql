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


CREATE OR REPLACE FUNCTION messages._horizon(
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

COMMENT ON FUNCTION messages._horizon IS
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
