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

-- Ids draw one by one (CACHE 1): a position is an id, and what has a lower one is older.
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
    'The class of the advisory locks that publishers to a topic hold. Two topics may share one: readers then wait for both.';


CREATE OR REPLACE FUNCTION messages._begin_publishing(
    topic_id bigint,
    last_id bigint
)
RETURNS boolean
LANGUAGE plpgsql STRICT
AS $$
DECLARE
    v_before text := current_setting('messages.publishing', true);
    v_mark text := ',' || topic_id || ',';
BEGIN
    IF strpos(v_before, v_mark) > 0 THEN
        RETURN false;
    ELSIF NOT pg_try_advisory_xact_lock_shared(messages._stream_lock(topic_id), last_id::bit(32)::int) THEN
        PERFORM messages._take_lower_lock(topic_id, last_id);
    END IF;
    -- Local, so that a rollback to a savepoint takes the mark together with the lock.
    IF set_config('messages.publishing', concat(v_before, v_mark), true) <> ''
        AND current_setting('synchronous_commit') = 'off'
    THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._begin_publishing IS
    'Before the first id for a topic is drawn in a transaction: show readers from where on ids may still come, until the commit; false where that was done, null for null. last_id: the last one drawn, read before.';


CREATE OR REPLACE FUNCTION messages._begin_first(
    topic_id bigint,
    last_id bigint
)
RETURNS boolean
LANGUAGE sql
AS $$
    SELECT CASE
        WHEN pg_current_xact_id_if_assigned() IS NULL AND current_setting('synchronous_commit') <> 'off'
        THEN pg_try_advisory_xact_lock_shared(messages._stream_lock(topic_id), last_id::bit(32)::int)
    END
$$;

COMMENT ON FUNCTION messages._begin_first IS
    'The same for a transaction that has written nothing yet, which is most of them. No mark: the second message takes a second lock, and makes it. Not true: _begin_publishing must do it. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._take_lower_lock(
    topic_id bigint,
    last_id bigint
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_back float8 := 2;
BEGIN
    WHILE NOT pg_try_advisory_xact_lock_shared(
        messages._stream_lock(topic_id), (last_id - floor(random() * v_back)::bigint)::bit(32)::int
    ) LOOP
        v_back := least(2 * v_back, 1000000000);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._take_lower_lock IS
    'Where another role sits on the number that a publisher would take: a lower one says less, and nothing wrong.';


CREATE OR REPLACE VIEW messages._publishing AS
-- Virtual transactions, not pids: those of a prepared transaction have none.
WITH locks AS MATERIALIZED (
    SELECT l.locktype, l.classid, l.objid, l.objsubid, l.relation, l.virtualtransaction
    FROM pg_catalog.pg_locks AS l
    WHERE l.granted
      AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
      AND (l.locktype = 'advisory' AND l.mode = 'ShareLock'
          OR l.locktype = 'relation' AND l.mode = 'RowExclusiveLock')
)
SELECT a.classid::bigint AS stream_lock, a.objid::bigint AS last_id
FROM locks AS a
WHERE a.locktype = 'advisory' AND a.objsubid = 2
  -- Any role can take an advisory lock, and none can write to this table but by publishing.
  AND EXISTS (
      SELECT FROM locks AS r
      WHERE r.relation = 'psqlmessages_streammessage'::regclass AND r.virtualtransaction = a.virtualtransaction
  );

COMMENT ON VIEW messages._publishing IS
    'The open transactions that publish: to topics of which lock, and after which id (its lower 32 bits) theirs come.';


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
    SELECT max((v_last - p.last_id) & 4294967295) INTO v_behind
    FROM messages._publishing AS p
    WHERE p.stream_lock = messages._stream_lock(topic_id)
      -- Numbers a little ahead belong to publishers that came after v_last was read.
      AND (v_last - p.last_id) & 4294967295 < 2147483648;
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
    -- The very time that was compared: the clock may jump meanwhile. Infinity holds housekeeping.
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
    last_id bigint
)
LANGUAGE sql
STABLE
AS $$
    SELECT t.id, t.retention, t.is_made_by_publish, t.listeners, t.channels, t.wakes, t.subscriptions,
           m.slot, i.last_value
    FROM psqlmessages_topic AS t, messages._stream AS m, messages._stream_id AS i
    WHERE t.name = _stream_of.topic
$$;

COMMENT ON FUNCTION messages._stream_of IS
    'What publishing to a topic needs to know. subscriptions: those that died this very second may be among them; slot: where messages go; last_id: the last one drawn. No row where there is no such topic.';


CREATE OR REPLACE FUNCTION messages._store(
    topic_id bigint,
    slot smallint,
    last_id bigint,
    sender text,
    payloads text[],
    enc text
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    -- Readers count this lock only together with the one that INSERT takes. Ids are drawn with both held.
    v_is_begun boolean := messages._begin_publishing(topic_id, last_id);
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
