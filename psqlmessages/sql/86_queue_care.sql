-- Queue care: what happens to queues by itself, when rules change, and by the administrator's hand.

CREATE OR REPLACE FUNCTION messages._add_up_counts()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_last bigint := (SELECT max(c.id) FROM psqlmessages_queuecount AS c);
BEGIN
    -- Seldom enough that it costs little, often enough that a sum is quick.
    IF (SELECT v_last BETWEEN q.counted_id AND q.counted_id + 1000 FROM messages._queues AS q) IS NOT FALSE THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM psqlmessages_queuecount AS c
        WHERE c.id = ANY (ARRAY(
            SELECT l.id FROM psqlmessages_queuecount AS l ORDER BY l.id LIMIT 20000 FOR UPDATE SKIP LOCKED
        ))
        RETURNING c.*
    )
    INSERT INTO psqlmessages_queuecount (queue_id, puts, gets, reserves, commits, rollbacks, dead_letters)
    SELECT g.queue_id, sum(g.puts), sum(g.gets), sum(g.reserves), sum(g.commits), sum(g.rollbacks), sum(g.dead_letters)
    FROM gone AS g GROUP BY g.queue_id;
    UPDATE messages._queues SET counted_id = (SELECT max(c.id) FROM psqlmessages_queuecount AS c);
END
$$;

COMMENT ON FUNCTION messages._add_up_counts IS
    'Make one row of each queue''s counts of many.';


CREATE OR REPLACE FUNCTION messages._restart_waits()
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_now timestamp with time zone := clock_timestamp();
    v_queue psqlmessages_queue;
BEGIN
    FOR v_queue IN
        WITH ahead AS MATERIALIZED (
            SELECT e.id FROM psqlmessages_element AS e
            WHERE e.available_at > v_now AND coalesce(e.wait_began_at, e.pushed_at) > v_now
            LIMIT 10000 FOR UPDATE SKIP LOCKED
        ), restarted AS (
            UPDATE psqlmessages_element AS e
            SET available_at = v_now + (e.available_at - coalesce(e.wait_began_at, e.pushed_at)),
                mature_at = least(e.mature_at, v_now + (e.available_at - coalesce(e.wait_began_at, e.pushed_at))),
                wait_began_at = v_now
            WHERE e.id = ANY (ARRAY(SELECT a.id FROM ahead AS a))
            RETURNING e.queue_id
        )
        SELECT q.* FROM psqlmessages_queue AS q WHERE q.id IN (SELECT r.queue_id FROM restarted AS r)
    LOOP
        PERFORM messages._wake_readers(v_queue);
    END LOOP;
    UPDATE psqlmessages_elementkey AS k SET expires_at = v_now + make_interval(secs => q.key_timeout)
    FROM psqlmessages_queue AS q
    WHERE q.id = k.queue_id AND k.id = ANY (ARRAY(
        SELECT a.id FROM psqlmessages_elementkey AS a
        JOIN psqlmessages_queue AS u ON u.id = a.queue_id
        WHERE a.expires_at > v_now + make_interval(secs => u.key_timeout)
        LIMIT 10000 FOR UPDATE OF a SKIP LOCKED
    ));
    -- What others hold locked is looked at again.
    RETURN EXISTS (
        SELECT FROM psqlmessages_element AS e
        WHERE e.available_at > v_now AND coalesce(e.wait_began_at, e.pushed_at) > v_now
    ) OR EXISTS (
        SELECT FROM psqlmessages_elementkey AS k JOIN psqlmessages_queue AS q ON q.id = k.queue_id
        WHERE k.expires_at > v_now + make_interval(secs => q.key_timeout)
    );
END
$$;

COMMENT ON FUNCTION messages._restart_waits IS
    'The clock was put back: delays, leases and keys that began later than now begin now, and last as long as they were to. 10,000 at a time; whether any are left. Never waits.';


CREATE OR REPLACE FUNCTION messages._tend_queues()
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queue psqlmessages_queue;
    v_now timestamp with time zone := clock_timestamp();
    v_is_clock_back boolean;
    v_dead int := 0;
BEGIN
    -- A time that is still to come was written before the clock was put back.
    SELECT q.is_clock_back OR q.tended_at > v_now INTO v_is_clock_back FROM messages._queues AS q
    WHERE q.tended_at NOT BETWEEN v_now - interval '1 second' AND v_now
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF v_is_clock_back THEN
        v_is_clock_back := messages._restart_waits();
    END IF;
    -- The very time that was compared: the clock may jump meanwhile.
    UPDATE messages._queues SET tended_at = v_now, is_clock_back = v_is_clock_back;
    DELETE FROM psqlmessages_elementkey AS k
    WHERE k.id = ANY (ARRAY(
        SELECT x.id FROM psqlmessages_elementkey AS x WHERE x.expires_at <= (SELECT clock_timestamp())
        ORDER BY x.expires_at LIMIT 10000 FOR UPDATE SKIP LOCKED
    ));
    PERFORM messages._add_up_counts();
    -- Leases that ran out and were the last try; the others come back as they are.
    FOR v_queue IN
        SELECT * FROM psqlmessages_queue AS q
        WHERE q.max_tries IS NOT NULL AND EXISTS (
            SELECT FROM psqlmessages_element AS e
            WHERE e.queue_id = q.id AND e.lease IS NOT NULL AND e.available_at <= (SELECT clock_timestamp())
        )
        ORDER BY q.name
    LOOP
        v_dead := v_dead + messages._bury_overdue(v_queue);
    END LOOP;
    RETURN v_dead;
END
$$;

COMMENT ON FUNCTION messages._tend_queues IS
    'Once a second, by whichever session comes first: forget expired keys, move dead letters; answers how many of these. Never waits.';


CREATE OR REPLACE FUNCTION messages._queue_channels()
RETURNS jsonb
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce(jsonb_object_agg(q.name, q.channel), '{}') FROM psqlmessages_queue AS q
$$;

COMMENT ON FUNCTION messages._queue_channels IS
    'The channels of all queues by name.';


CREATE OR REPLACE FUNCTION messages._move_channels(
    queues bigint[] DEFAULT NULL
)
RETURNS bigint[]
LANGUAGE plpgsql
AS $$
DECLARE
    v_all bigint[];
    v_moved bigint[];
BEGIN
    -- Also where nobody has called queue_listen for a while: who did so before may still listen. Nobody knows the
    -- channel of a queue that was not awaited since the epoch, unless somebody is learning it at this moment.
    v_all := ARRAY(
        SELECT q.id FROM psqlmessages_queue AS q
        WHERE (queues IS NULL OR q.id = ANY (queues)) AND (q.awaited_until > 'epoch' OR NOT (SELECT messages._has_gate()))
    );
    v_moved := ARRAY(
        SELECT l.id FROM psqlmessages_queue AS l WHERE l.id = ANY (v_all) ORDER BY l.id FOR NO KEY UPDATE SKIP LOCKED
    );
    PERFORM messages._wake_readers(q, 'moved') FROM psqlmessages_queue AS q WHERE q.id = ANY (v_moved);
    UPDATE psqlmessages_queue AS q SET channel = messages._new_queue_channel(), awaited_until = 'epoch'
    WHERE q.id = ANY (v_moved) AND q.awaited_until > 'epoch';
    RETURN ARRAY(SELECT u.id FROM unnest(v_all) AS u (id) WHERE u.id <> ALL (v_moved));
END
$$;

COMMENT ON FUNCTION messages._move_channels IS
    'Rights to queues may have gone: whoever waits asks again, and learns the new channel only by right. queues: these, or all. Answers those whose rows are locked, which keep their channel. Never waits.';


CREATE OR REPLACE FUNCTION messages._put_back(
    ids bigint[]
)
RETURNS int
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_name text;
    v_queue psqlmessages_queue;
    v_moved int;
    v_all int := 0;
BEGIN
    FOR v_name IN
        SELECT DISTINCT e.headers ->> 'x-dl-from-queue' FROM psqlmessages_element AS e
        JOIN psqlmessages_queue AS d ON d.id = e.queue_id
        JOIN psqlmessages_queue AS f ON f.name = e.headers ->> 'x-dl-from-queue'
        -- The header is what whoever pushed wrote, unless the queue's dead letters do come here.
        WHERE e.id = ANY (ids) AND f.dead_letter_queue = d.name ORDER BY 1
    LOOP
        v_queue := messages._queue(v_name);
        UPDATE psqlmessages_element AS e
        SET queue_id = v_queue.id, lease = NULL, tries = 0,
            mature_at = clock_timestamp(), available_at = clock_timestamp(), wait_began_at = clock_timestamp(),
            headers = e.headers - '{x-dl-from-queue,x-dl-t,x-dl-tries}'::text[]
        WHERE e.id = ANY (ARRAY(
            SELECT l.id FROM psqlmessages_element AS l
            WHERE l.id = ANY (ids) AND l.headers ->> 'x-dl-from-queue' = v_name
              AND l.queue_id = (SELECT d.id FROM psqlmessages_queue AS d WHERE d.name = v_queue.dead_letter_queue)
              AND (l.lease IS NULL OR l.available_at <= clock_timestamp())
            ORDER BY l.id FOR UPDATE SKIP LOCKED
        ));
        GET DIAGNOSTICS v_moved = ROW_COUNT;
        IF v_moved > 0 THEN
            PERFORM messages._count(v_queue.id, puts => v_moved);
            PERFORM messages._wake_readers(v_queue);
            v_all := v_all + v_moved;
        END IF;
    END LOOP;
    RETURN v_all;
END
$$;

COMMENT ON FUNCTION messages._put_back IS
    'For the administrator: dead letters go back to the queues they came from, as if pushed now; answers how many. Those that are reserved stay.';


CREATE OR REPLACE FUNCTION messages._remove_queue(
    name text
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_id bigint;
BEGIN
    -- Whoever has read a queue's row keeps this table until the end of the transaction: wait for those,
    -- and hold up who comes; they read it when we are through.
    LOCK TABLE psqlmessages_queue IN ACCESS EXCLUSIVE MODE;
    DELETE FROM psqlmessages_queue AS q WHERE q.name = _remove_queue.name RETURNING q.id INTO v_id;
    DELETE FROM psqlmessages_element AS e WHERE e.queue_id = v_id;
    DELETE FROM psqlmessages_elementkey AS k WHERE k.queue_id = v_id;
    DELETE FROM psqlmessages_queuecount AS c WHERE c.queue_id = v_id;
    RETURN v_id IS NOT NULL;
END
$$;

COMMENT ON FUNCTION messages._remove_queue IS
    'For the administrator: a queue goes with all its elements; false where there is none. Waits for all transactions that use any queue: set lock_timeout.';
