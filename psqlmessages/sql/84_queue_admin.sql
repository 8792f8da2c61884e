-- Queue administration: pause, settings, removal, drain, sizes, waiting for elements, housekeeping.

CREATE OR REPLACE FUNCTION messages.remove(
    client_id text,
    queue text,
    id bigint
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queue_id bigint;
BEGIN
    PERFORM messages._log_command('remove', client_id, queue);
    IF messages._may_use(client_id, queue, 'RW') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'RW');
    END IF;
    DELETE FROM psqlmessages_element AS e
    WHERE e.id = ANY (ARRAY(
        SELECT l.id FROM psqlmessages_element AS l
        WHERE l.id = remove.id
          AND l.queue_id = (SELECT q.id FROM psqlmessages_queue AS q WHERE q.name = queue)
          AND (l.lease IS NULL OR l.available_at <= clock_timestamp())
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING e.queue_id INTO v_queue_id;
    IF v_queue_id IS NULL THEN
        RETURN '{"Err":"0","Done":false}';
    END IF;
    PERFORM messages._count(v_queue_id, removes => 1);
    RETURN '{"Err":"0","Done":true}';
END
$$;

COMMENT ON FUNCTION messages.remove IS
    'Remove one element that is not reserved. Done: false if there is no such element, or it is reserved, or a transaction has locked it. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE FUNCTION messages._begin_queue_change(
    client_id text,
    queue text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    -- Check before the gate, so that a role without permission cannot delay changes of rules, and again after it.
    IF messages._may_use(client_id, queue, mode) THEN
        PERFORM messages._share_rules_lock();
        IF messages._may_use(client_id, queue, mode) THEN
            RETURN NULL;
        END IF;
    END IF;
    RETURN messages._queue_error(client_id, queue, mode);
END
$$;

COMMENT ON FUNCTION messages._begin_queue_change IS
    'Before the row of a queue changes: share the gate and return null, or return the error if this role may not.';


CREATE OR REPLACE FUNCTION messages._set_paused(
    command text,
    client_id text,
    queue text,
    is_paused boolean
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_error json;
    v_queue psqlmessages_queue;
BEGIN
    PERFORM messages._log_command(command, client_id, queue);
    v_error := messages._begin_queue_change(client_id, queue, 'RW');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_queue FROM messages._existing_queue(queue);
    IF NOT FOUND THEN
        RETURN messages._error(62, queue);
    END IF;
    UPDATE psqlmessages_queue AS q SET is_paused = _set_paused.is_paused
    WHERE q.id = v_queue.id AND q.is_paused <> _set_paused.is_paused;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._wake_readers(v_queue);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._set_paused IS
    'Body of pause and resume.';


CREATE OR REPLACE FUNCTION messages.pause(
    client_id text,
    queue text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._set_paused('pause', client_id, queue, true);
END
$$;

COMMENT ON FUNCTION messages.pause IS
    'From now on pop and reserve return no elements of this queue; pushes continue. Already: 1 if it was paused. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE FUNCTION messages.resume(
    client_id text,
    queue text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._set_paused('resume', client_id, queue, false);
END
$$;

COMMENT ON FUNCTION messages.resume IS
    'End a pause. Already: 1 if the queue was not paused. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE FUNCTION messages.configure_queue(
    client_id text,
    queue text,
    max_tries int DEFAULT NULL,
    dead_letter_queue text DEFAULT NULL,
    key_timeout int DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_error json;
    v_queue psqlmessages_queue;
BEGIN
    PERFORM messages._log_command('configure_queue', client_id, queue);
    v_error := messages._begin_queue_change(client_id, queue, 'A');
    -- Dead letters are a push to that queue.
    IF v_error IS NULL AND dead_letter_queue <> '__deadletter__' THEN
        v_error := messages._queue_argument_error(client_id, dead_letter_queue, 'W');
    END IF;
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    ELSIF max_tries < 0 THEN
        RETURN messages._error(63, 'max_tries', max_tries || ': 1 or more are needed, or 0 for no maximum');
    ELSIF key_timeout <= 0 THEN
        RETURN messages._error(60, 'key_timeout');
    END IF;
    v_queue := messages._queue(queue);
    UPDATE psqlmessages_queue AS q
    SET max_tries = CASE configure_queue.max_tries WHEN 0 THEN NULL ELSE coalesce(configure_queue.max_tries, q.max_tries) END,
        dead_letter_queue = coalesce(configure_queue.dead_letter_queue, q.dead_letter_queue),
        key_timeout = coalesce(configure_queue.key_timeout, q.key_timeout)
    WHERE q.id = v_queue.id
    RETURNING * INTO v_queue;
    RETURN (
        '{"Err":"0","MaxTries":' || coalesce(v_queue.max_tries, 0) || ',"DeadLetterQueue":' || to_json(v_queue.dead_letter_queue)
        || ',"KeyTimeout":' || v_queue.key_timeout || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.configure_queue IS
    'Change settings of a queue, which is made if it does not exist: null leaves a setting unchanged, max_tries => 0 means no maximum. Needs mode A, and W for another dead_letter_queue than __deadletter__. Returns MaxTries, DeadLetterQueue and KeyTimeout (seconds). Errors: 54, 1, 15, 16, 62, 2, 3, 63, 60.';


CREATE OR REPLACE FUNCTION messages._remove_queue(
    queue psqlmessages_queue
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    -- The row stays, without a lock on other calls: a push at the same moment stores its element under the same id, and an
    -- element makes the queue exist again.
    UPDATE psqlmessages_queue AS q
    SET is_removed = true, is_paused = DEFAULT, max_tries = DEFAULT, dead_letter_queue = DEFAULT, key_timeout = DEFAULT
    WHERE q.id = queue.id AND NOT EXISTS (SELECT FROM psqlmessages_element AS e WHERE e.queue_id = q.id);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM psqlmessages_elementkey AS k WHERE k.queue_id = queue.id;
    DELETE FROM psqlmessages_queuecount AS c WHERE c.queue_id = queue.id;
    DELETE FROM messages._scan_start AS s WHERE s.queue_id = queue.id;
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._remove_queue IS
    'Remove an empty queue with its settings, keys and counts; false if it has elements.';


CREATE OR REPLACE FUNCTION messages.remove_queue(
    client_id text,
    queue text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_error json;
    v_queue psqlmessages_queue;
BEGIN
    PERFORM messages._log_command('remove_queue', client_id, queue);
    v_error := messages._begin_queue_change(client_id, queue, 'A');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_queue FROM messages._existing_queue(queue);
    IF NOT FOUND THEN
        RETURN messages._error(62, queue);
    ELSIF NOT messages._remove_queue(v_queue) THEN
        RETURN messages._error(66, queue);
    END IF;
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.remove_queue IS
    'Remove an empty queue with its settings, keys and counts. A later push, or a push at the same moment, makes it again. Needs mode A. Errors: 54, 1, 15, 16, 62, 2, 3, 66.';


CREATE OR REPLACE FUNCTION messages.drain(
    client_id text,
    queue text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queue psqlmessages_queue;
    v_removed bigint;
BEGIN
    PERFORM messages._log_command('drain', client_id, queue);
    IF messages._may_use(client_id, queue, 'RW') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'RW');
    END IF;
    SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.name = queue;
    WITH locked AS MATERIALIZED (
        SELECT e.id FROM psqlmessages_element AS e
        WHERE e.queue_id = v_queue.id AND e.available_at <= (SELECT clock_timestamp())
          AND e.available_at >= (SELECT messages._scan_start(v_queue.id))
        FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM psqlmessages_element AS e USING locked AS l WHERE e.id = l.id RETURNING 1
    )
    SELECT count(*) INTO v_removed FROM gone;
    IF v_removed > 0 THEN
        PERFORM messages._count(v_queue.id, removes => v_removed);
    END IF;
    RETURN ('{"Err":"0","Removed":' || v_removed || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.drain IS
    'Remove all available elements, also while the queue is paused. Removed: how many, 0 if the queue does not exist. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE FUNCTION messages.sizes(
    client_id text,
    queue text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_error json;
    v_queue psqlmessages_queue;
    v_now timestamp with time zone := clock_timestamp();
    v_sizes record;
BEGIN
    PERFORM messages._log_command('sizes', client_id, queue);
    v_error := messages._queue_argument_error(client_id, queue, '');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_queue FROM messages._existing_queue(queue);
    IF NOT FOUND THEN
        RETURN messages._error(62, queue);
    END IF;
    SELECT count(*) AS total,
           count(*) FILTER (WHERE e.available_at <= v_now) AS available,
           count(*) FILTER (WHERE e.available_at > v_now AND e.lease IS NULL) AS scheduled,
           count(*) FILTER (WHERE e.available_at > v_now AND e.lease IS NOT NULL) AS reserved,
           min(e.available_at) FILTER (WHERE e.available_at > v_now) AS next
    INTO v_sizes
    FROM psqlmessages_element AS e
    WHERE e.queue_id = v_queue.id AND e.available_at >= (SELECT messages._scan_start(v_queue.id));
    RETURN (
        '{"Err":"0","Total":' || v_sizes.total || ',"Available":' || v_sizes.available
        || ',"Scheduled":' || v_sizes.scheduled || ',"Reserved":' || v_sizes.reserved
        || ',"Next":' || coalesce(to_json(v_sizes.next)::text, 'null')
        || ',"Paused":' || v_queue.is_paused || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.sizes IS
    'Number of elements of a queue: Total, Available, Scheduled (not mature), Reserved. Next: when the next of the others becomes available, by its mature time or the end of its lease; Paused. It makes no queue. Errors: 54, 1, 15, 16, 62, 2.';


CREATE OR REPLACE FUNCTION messages.queue_listen(
    client_id text,
    queue text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $$
DECLARE
    v_error json;
    v_queue psqlmessages_queue;
    v_next timestamp with time zone;
BEGIN
    PERFORM messages._log_command('queue_listen', client_id, queue);
    v_error := messages._begin_queue_change(client_id, queue, 'R');
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    v_queue := messages._queue(queue);
    -- A time further ahead was stored before the clock was put back.
    IF v_queue.awaited_until NOT BETWEEN clock_timestamp() + interval '40 seconds' AND clock_timestamp() + interval '60 seconds' THEN
        -- A transaction that has locked the row does the same.
        UPDATE psqlmessages_queue AS q SET awaited_until = clock_timestamp() + interval '60 seconds'
        WHERE q.id = (SELECT l.id FROM psqlmessages_queue AS l WHERE l.id = v_queue.id FOR NO KEY UPDATE SKIP LOCKED);
        SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.id = v_queue.id;
    END IF;
    -- A change of rules may have replaced the channel.
    IF NOT messages._may_use(client_id, queue, 'R') THEN
        RETURN messages._queue_error(client_id, queue, 'R');
    END IF;
    EXECUTE format('LISTEN %I', v_queue.channel);
    SELECT e.available_at INTO v_next FROM psqlmessages_element AS e
    WHERE e.queue_id = v_queue.id AND e.available_at >= (SELECT messages._scan_start(v_queue.id))
    ORDER BY e.available_at LIMIT 1;
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN (
        '{"Err":"0","Channel":' || to_json(v_queue.channel)
        || ',"Seconds":' || greatest(floor(extract(epoch FROM v_queue.awaited_until - clock_timestamp())), 1)
        || ',"Next":' || CASE
            WHEN v_next IS NULL THEN 'null' ELSE greatest(extract(epoch FROM v_next - clock_timestamp()), 0)::text
        END
        || ',"Paused":' || v_queue.is_paused || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.queue_listen IS
    'Be notified, on Channel of the queue, which is made if it does not exist, and for Seconds from now, when elements may be available. Next: seconds until the next element becomes available, null if there is none; Paused: the queue returns no elements. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE VIEW messages.queued_rows AS
SELECT e.id, ''::text COLLATE "C" AS queue, e.body, e.enc, e.headers::text AS headers, e.mature_at AS mature, e.tries, 0 AS hops,
       e.pushed_at, ''::text AS state
FROM psqlmessages_element AS e;

COMMENT ON VIEW messages.queued_rows IS
    'The row type of peek.';


CREATE OR REPLACE FUNCTION messages._queued_rows(
    queue_id bigint,
    queue text,
    max_rows int,
    with_bodies boolean
)
RETURNS SETOF messages.queued_rows
LANGUAGE sql
STABLE
AS $$
    SELECT e.id, _queued_rows.queue, CASE WHEN with_bodies THEN e.body END, e.enc, e.headers::text, e.mature_at, e.tries,
           messages._hops(e.headers), e.pushed_at,
           CASE
               WHEN e.available_at <= statement_timestamp() THEN 'available'
               WHEN e.lease IS NULL THEN 'scheduled'
               ELSE 'reserved'
           END
    FROM psqlmessages_element AS e
    WHERE e.queue_id = (SELECT _queued_rows.queue_id)
    ORDER BY e.available_at, e.id
    LIMIT (SELECT max_rows)
$$;

COMMENT ON FUNCTION messages._queued_rows IS
    'The elements of a queue in the order of pop. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages.peek(
    client_id text,
    queue text,
    max_rows int DEFAULT NULL,
    with_bodies boolean DEFAULT true
)
RETURNS SETOF messages.queued_rows
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- Read in index order, as pop does.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET max_parallel_workers_per_gather = 0
SET jit = off
AS $$
BEGIN
    PERFORM messages._log_command('peek', client_id, queue);
    IF messages._may_use(client_id, queue, 'R') IS NOT TRUE THEN
        PERFORM messages._raise(messages._queue_error(client_id, queue, 'R'));
    ELSIF max_rows <= 0 THEN
        PERFORM messages._raise(messages._error(60, 'max_rows'));
    END IF;
    RETURN QUERY SELECT * FROM messages._queued_rows(
        (SELECT q.id FROM psqlmessages_queue AS q WHERE q.name = queue), queue, max_rows, with_bodies
    );
END
$$;

COMMENT ON FUNCTION messages.peek IS
    'The present elements of a queue, at most max_rows (null: all), in the order of pop; none is taken. state: available, scheduled or reserved. If with_bodies is false, body is null and not read. No rows if there is no such queue. Errors: 54, 1, 15, 16, 62, 2, 3, 60.';

-- Housekeeping of queues, changes of their channels, and functions for the administrator.

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
        PERFORM messages._reset_scan_start(v_queue.id);
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
    -- Rows that other transactions have locked need another run.
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
    'After the clock was put back: delays, leases and keys with a start in the future start now, with the same length. At most 10,000 at a time; returns whether any are left. Never waits.';


CREATE OR REPLACE FUNCTION messages._maintain_queues()
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queue psqlmessages_queue;
    v_now timestamp with time zone := clock_timestamp();
    v_is_clock_back boolean;
    v_last bigint;
    v_dead int := 0;
BEGIN
    -- A time in the future was stored before the clock was put back.
    SELECT q.is_clock_back OR messages._last_check('messages._queues_checked', q.tended_at) > clock_timestamp()
    INTO v_is_clock_back FROM messages._queues AS q
    WHERE q.tended_at NOT BETWEEN v_now - interval '1 second' AND v_now
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF v_is_clock_back THEN
        v_is_clock_back := messages._restart_waits();
    END IF;
    -- The time that was compared, because the clock may change at any moment.
    UPDATE messages._queues SET tended_at = v_now, is_clock_back = v_is_clock_back;
    DELETE FROM psqlmessages_elementkey AS k
    WHERE k.id = ANY (ARRAY(
        SELECT x.id FROM psqlmessages_elementkey AS x WHERE x.expires_at <= (SELECT clock_timestamp())
        ORDER BY x.expires_at LIMIT 10000 FOR UPDATE SKIP LOCKED
    ));
    -- Sum up the counts after every 1,000 new rows: this costs little, and a sum stays fast.
    v_last := (SELECT max(c.id) FROM psqlmessages_queuecount AS c);
    IF (SELECT v_last NOT BETWEEN q.counted_id AND q.counted_id + 1000 FROM messages._queues AS q) THEN
        WITH gone AS (
            DELETE FROM psqlmessages_queuecount AS c
            WHERE c.id = ANY (ARRAY(
                SELECT l.id FROM psqlmessages_queuecount AS l
                WHERE l.id > (SELECT CASE WHEN q.counted_id <= v_last THEN q.counted_id - 20000 ELSE 0 END FROM messages._queues AS q)
                ORDER BY l.id LIMIT 20000 FOR UPDATE SKIP LOCKED
            ))
            RETURNING c.*
        )
        INSERT INTO psqlmessages_queuecount (queue_id, puts, gets, reserves, commits, rollbacks, dead_letters, removes)
        SELECT g.queue_id, sum(g.puts), sum(g.gets), sum(g.reserves), sum(g.commits), sum(g.rollbacks),
               sum(g.dead_letters), sum(g.removes)
        FROM gone AS g GROUP BY g.queue_id;
        UPDATE messages._queues SET counted_id = (SELECT max(c.id) FROM psqlmessages_queuecount AS c);
    END IF;
    -- Elements whose lease ran out in their last try; all others are available again.
    FOR v_queue IN
        SELECT * FROM psqlmessages_queue AS q
        WHERE q.max_tries IS NOT NULL AND EXISTS (
            SELECT FROM psqlmessages_element AS e
            WHERE e.queue_id = q.id AND e.lease IS NOT NULL AND e.available_at <= (SELECT clock_timestamp())
              AND e.available_at >= messages._scan_start(q.id)
        )
        ORDER BY q.name
    LOOP
        v_dead := v_dead + messages._dead_letter_overdue(v_queue);
    END LOOP;
    RETURN v_dead;
END
$$;

COMMENT ON FUNCTION messages._maintain_queues IS
    'Once a second, by the first session that gets the row lock: delete expired keys, move dead letters. Returns the number of dead letters. Never waits.';


CREATE OR REPLACE FUNCTION messages._queues_have_work()
RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queues messages._queues;
    v_last timestamp with time zone;
    v_now timestamp with time zone;
BEGIN
    SELECT * INTO v_queues FROM messages._queues;
    v_last := messages._last_check('messages._queues_checked', v_queues.tended_at);
    -- After that, or a check that another session stores meanwhile would look like a clock that was put back.
    v_now := clock_timestamp();
    IF v_last BETWEEN v_now - interval '1 second' AND v_now THEN
        RETURN false;
    END IF;
    IF v_last NOT BETWEEN v_now - interval '10 seconds' AND v_now
        OR v_queues.is_clock_back
        OR EXISTS (SELECT FROM psqlmessages_elementkey AS k WHERE k.expires_at <= v_now)
        OR (
            SELECT max(c.id) NOT BETWEEN v_queues.counted_id AND v_queues.counted_id + 1000
            FROM psqlmessages_queuecount AS c
        )
        OR EXISTS (
            SELECT FROM psqlmessages_queue AS q
            WHERE q.max_tries IS NOT NULL AND EXISTS (
                SELECT FROM psqlmessages_element AS e
                WHERE e.queue_id = q.id AND e.lease IS NOT NULL AND e.available_at <= v_now
                  AND e.available_at >= messages._scan_start(q.id)
            )
        )
    THEN
        RETURN true;
    END IF;
    PERFORM messages._record_check('messages._queues_checked', v_queues.tended_at, v_now);
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._queues_have_work IS
    'Whether _maintain_queues has anything to write. False within a second after a check that found nothing.';


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
    -- Also queues without a recent queue_listen, because earlier callers may still LISTEN. A channel that was not awaited
    -- since the epoch is unknown to all, unless a transaction is reading it at this moment.
    v_all := ARRAY(
        SELECT q.id FROM psqlmessages_queue AS q
        WHERE (queues IS NULL OR q.id = ANY (queues)) AND (q.awaited_until > 'epoch' OR NOT (SELECT messages._holds_rules_lock()))
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
    'Give queues new channels after permissions may have been removed: waiting readers must ask again and get the new channel only if a rule allows it. queues: these, or all. Returns those with locked rows, which keep their channel. Never waits.';


CREATE OR REPLACE FUNCTION messages._requeue_dead_letters(
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
        -- Any sender can write the header: trust it only if the dead letters of that queue come here.
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
            PERFORM messages._reset_scan_start(v_queue.id);
            PERFORM messages._count(v_queue.id, puts => v_moved);
            PERFORM messages._wake_readers(v_queue);
            v_all := v_all + v_moved;
        END IF;
    END LOOP;
    RETURN v_all;
END
$$;

COMMENT ON FUNCTION messages._requeue_dead_letters IS
    'For the administrator: put dead letters back into the queues they came from, as if pushed now. Returns how many. Reserved ones stay.';
