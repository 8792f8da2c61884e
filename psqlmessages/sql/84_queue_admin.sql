-- Queue administration: pause, settings, removal, sizes, waiting for elements, housekeeping, redrive of dead letters.

CREATE OR REPLACE FUNCTION messages._lock_unreserved_elements(
    queue_id bigint,
    ids bigint[]
)
RETURNS bigint[]
LANGUAGE sql
AS $$
    SELECT ARRAY(
        SELECT e.id FROM psqlmessages_element AS e
        -- A subquery, because with an empty constant array PostgreSQL may read the whole index element_reserved.
        -- + 0: see commit.
        WHERE e.id = ANY (ARRAY(SELECT unnest(ids))) AND e.queue_id + 0 = _lock_unreserved_elements.queue_id
          AND (e.lease IS NULL OR e.available_at <= clock_timestamp())
        ORDER BY e.id FOR UPDATE SKIP LOCKED
    )
$$;

COMMENT ON FUNCTION messages._lock_unreserved_elements IS
    'Lock these elements of a queue, except reserved and locked ones; return their ids.';


CREATE OR REPLACE FUNCTION messages._remove_elements(
    queue text,
    ids bigint[]
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queue_id bigint := (SELECT q.id FROM psqlmessages_queue AS q WHERE q.name = queue);
    v_ids bigint[] := messages._lock_unreserved_elements(v_queue_id, ids);
BEGIN
    IF v_ids <> '{}' THEN
        DELETE FROM psqlmessages_element AS e WHERE e.id = ANY (v_ids);
        PERFORM messages._add_queue_counts(v_queue_id, removes => cardinality(v_ids));
    END IF;
    RETURN cardinality(v_ids);
END
$$;

COMMENT ON FUNCTION messages._remove_elements IS
    'Remove these elements of a queue, except reserved and locked ones, and return their number.';


CREATE OR REPLACE FUNCTION messages.remove(
    client_id text,
    queue text,
    id bigint
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._log_command('remove', client_id, queue);
    IF messages._may_use_queue(client_id, queue, 'RW') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'RW');
    END IF;
    RETURN ('{"Err":"0","Done":' || (messages._remove_elements(queue, ARRAY[id]) > 0) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.remove IS
    'Remove one element. Done: false if there is no such element, or it is reserved, or a transaction has locked it. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE FUNCTION messages.remove_elements(
    client_id text,
    queue text,
    ids bigint[]
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._log_command('remove_elements', client_id, queue);
    IF messages._may_use_queue(client_id, queue, 'A') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'A');
    END IF;
    RETURN ('{"Err":"0","Removed":' || messages._remove_elements(queue, ids) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.remove_elements IS
    'Remove elements by their ids. Removed: their number; reserved elements, those that a transaction has locked, and those of other queues stay. Needs mode A. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE FUNCTION messages._move_elements(
    source psqlmessages_queue,
    destination psqlmessages_queue,
    ids bigint[],
    keeps_delays boolean
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_ids bigint[] := messages._lock_unreserved_elements(source.id, ids);
    v_now timestamp with time zone;
BEGIN
    IF v_ids <> '{}' THEN
        -- Lock before reading the time: see _element_writers.
        LOCK TABLE psqlmessages_element IN ROW EXCLUSIVE MODE;
        v_now := clock_timestamp();
        UPDATE psqlmessages_element AS e
        SET queue_id = destination.id, lease = NULL, tries = 0, wait_began_at = v_now,
            mature_at = CASE WHEN keeps_delays THEN greatest(e.mature_at, v_now) ELSE v_now END,
            available_at = CASE WHEN keeps_delays THEN greatest(e.available_at, v_now) ELSE v_now END,
            headers = e.headers - '{x-dl-from-queue,x-dl-t,x-dl-tries}'::text[],
            -- An exchange reads its source only, so a dead letter keeps its marks only on its way back.
            delivered = CASE
                WHEN destination.dead_letter_queue = source.name AND e.headers ->> 'x-dl-from-queue' = destination.name
                THEN e.delivered
            END
        WHERE e.id = ANY (v_ids);
        PERFORM messages._reset_scan_start(destination.id);
        PERFORM messages._add_queue_counts(source.id, removes => cardinality(v_ids));
        PERFORM messages._add_queue_counts(destination.id, puts => cardinality(v_ids));
        PERFORM messages._notify_waiting_readers(destination);
    END IF;
    RETURN cardinality(v_ids);
END
$$;

COMMENT ON FUNCTION messages._move_elements IS
    'Move these elements of a queue, except reserved and locked ones, to another queue, and return their number. keeps_delays: whether delays continue; otherwise the elements are available now.';


CREATE OR REPLACE FUNCTION messages.move_elements(
    client_id text,
    queue text,
    to_queue text,
    ids bigint[]
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_source psqlmessages_queue;
    v_destination psqlmessages_queue;
BEGIN
    PERFORM messages._log_command('move_elements', client_id, queue);
    IF messages._may_use_queue(client_id, queue, 'A') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'A');
    ELSIF messages._may_use_queue(client_id, to_queue, 'W') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, to_queue, 'W');
    ELSIF to_queue = queue THEN
        RETURN messages._error(63, 'to_queue', 'another queue than ' || queue || ' is needed');
    END IF;
    SELECT * INTO v_source FROM psqlmessages_queue AS q WHERE q.name = queue;
    -- Before elements are locked, because this may wait.
    v_destination := messages._get_or_create_queue(to_queue);
    RETURN ('{"Err":"0","Moved":' || messages._move_elements(v_source, v_destination, ids, true) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.move_elements IS
    'Move elements by their ids to another queue, as if they were pushed now, with no tries and without the headers of dead letters; delays continue. Moved: their number; reserved elements, those that a transaction has locked, and those of other queues stay. Needs mode A, and mode W for to_queue, which is created if it does not exist. Errors: 54, 1, 15, 16, 62, 2, 3, 63.';


CREATE OR REPLACE FUNCTION messages._begin_queue_change(
    client_id text,
    queue text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    -- Check before taking the rules lock, so that a role without permission cannot delay changes of rules, and again
    -- after it.
    IF messages._may_use_queue(client_id, queue, mode) THEN
        PERFORM messages._share_rules_lock();
        IF messages._may_use_queue(client_id, queue, mode) THEN
            RETURN NULL;
        END IF;
    END IF;
    RETURN messages._queue_error(client_id, queue, mode);
END
$$;

COMMENT ON FUNCTION messages._begin_queue_change IS
    'Check the permission before the row of a queue changes, and share the rules lock. Returns the error if this role may not change the queue, or null. mode: as in _may_use_queue.';


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
    PERFORM messages._notify_waiting_readers(v_queue);
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages._set_paused IS
    'The implementation of pause and resume.';


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
    'Pause a queue: pop, reserve and take return no elements; pushes continue. Already: 1 if it was paused. Errors: 54, 1, 15, 16, 62, 2, 3.';


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
    -- Moving dead letters is a push to that queue.
    IF v_error IS NULL AND dead_letter_queue <> '__deadletter__'
        AND messages._may_use_queue(client_id, dead_letter_queue, 'W') IS NOT TRUE
    THEN
        v_error := messages._queue_error(client_id, dead_letter_queue, 'W');
    END IF;
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    ELSIF max_tries < 0 THEN
        RETURN messages._error(63, 'max_tries', max_tries || ': 1 or more are needed, or 0 for no maximum');
    ELSIF key_timeout <= 0 THEN
        RETURN messages._error(60, 'key_timeout');
    END IF;
    v_queue := messages._get_or_create_queue(queue);
    UPDATE psqlmessages_queue AS q
    SET max_tries = nullif(coalesce(configure_queue.max_tries, q.max_tries), 0),
        dead_letter_queue = coalesce(configure_queue.dead_letter_queue, q.dead_letter_queue),
        key_timeout = coalesce(configure_queue.key_timeout, q.key_timeout)
    WHERE q.id = v_queue.id
    RETURNING * INTO v_queue;
    RETURN (
        '{"Err":"0","MaxTries":' || coalesce(v_queue.max_tries, 0)
        || ',"DeadLetterQueue":' || to_json(v_queue.dead_letter_queue) || ',"KeyTimeout":' || v_queue.key_timeout || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.configure_queue IS
    'Change settings of a queue, which is created if it does not exist. Null leaves a setting unchanged; max_tries => 0 removes the maximum. Needs mode A, and mode W for a dead_letter_queue other than __deadletter__. Returns MaxTries, DeadLetterQueue and KeyTimeout (seconds). Errors: 54, 1, 15, 16, 62, 2, 3, 63, 60.';


CREATE OR REPLACE FUNCTION messages._remove_queue(
    queue psqlmessages_queue
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    -- Keep the row, so that other calls need no lock: a push at the same moment stores its element under the same id,
    -- and the element makes the queue exist again.
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
    'Remove an empty queue with its settings, keys and counts. A push at the same moment or later creates it again. Needs mode A. Errors: 54, 1, 15, 16, 62, 2, 3, 66.';


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
    IF messages._may_use_queue(client_id, queue, 'RW') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'RW');
    END IF;
    SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.name = queue;
    WITH locked AS MATERIALIZED (
        SELECT e.id FROM psqlmessages_element AS e
        WHERE e.queue_id = v_queue.id AND e.available_at <= (SELECT clock_timestamp())
          AND e.available_at >= (SELECT messages._get_scan_start(v_queue.id))
        FOR UPDATE SKIP LOCKED
    ), deleted AS (
        DELETE FROM psqlmessages_element AS e USING locked AS l WHERE e.id = l.id RETURNING 1
    )
    SELECT count(*) INTO v_removed FROM deleted;
    IF v_removed > 0 THEN
        PERFORM messages._add_queue_counts(v_queue.id, removes => v_removed);
    END IF;
    RETURN ('{"Err":"0","Removed":' || v_removed || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.drain IS
    'Remove all available elements, except those that a transaction has locked, even while the queue is paused. Removed: their number, 0 if the queue does not exist. Errors: 54, 1, 15, 16, 62, 2, 3.';


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
    v_queue psqlmessages_queue;
    v_now timestamp with time zone := clock_timestamp();
BEGIN
    PERFORM messages._log_command('sizes', client_id, queue);
    IF messages._may_use_queue(client_id, queue, '') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, '');
    END IF;
    SELECT * INTO v_queue FROM messages._existing_queue(queue);
    IF NOT FOUND THEN
        RETURN messages._error(62, queue);
    END IF;
    RETURN (
        SELECT row_to_json(s)
        FROM (
            SELECT '0' AS "Err", count(*) AS "Total",
                   count(*) FILTER (WHERE e.available_at <= v_now) AS "Available",
                   count(*) FILTER (WHERE e.available_at > v_now AND e.lease IS NULL) AS "Scheduled",
                   count(*) FILTER (WHERE e.available_at > v_now AND e.lease IS NOT NULL) AS "Reserved",
                   min(e.available_at) FILTER (WHERE e.available_at > v_now) AS "Next",
                   v_queue.is_paused AS "Paused"
            FROM psqlmessages_element AS e
            WHERE e.queue_id = v_queue.id AND e.available_at >= (SELECT messages._get_scan_start(v_queue.id))
        ) AS s
    );
END
$$;

COMMENT ON FUNCTION messages.sizes IS
    'Number of elements of a queue: Total, Available, Scheduled (for later), Reserved. Next: when the next scheduled or reserved element becomes available; Paused: whether the queue is paused. Errors: 54, 1, 15, 16, 62, 2.';


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
    v_queue := messages._get_or_create_queue(queue);
    -- A time more than 60 seconds ahead was stored before the clock was set back.
    IF v_queue.awaited_until
        NOT BETWEEN clock_timestamp() + interval '40 seconds' AND clock_timestamp() + interval '60 seconds'
    THEN
        -- Skip the row if it is locked: another reader is setting the time.
        UPDATE psqlmessages_queue AS q SET awaited_until = clock_timestamp() + interval '60 seconds'
        WHERE q.id = (SELECT l.id FROM psqlmessages_queue AS l WHERE l.id = v_queue.id FOR NO KEY UPDATE SKIP LOCKED);
        SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.id = v_queue.id;
    END IF;
    -- A change of rules may have replaced the channel.
    IF messages._may_use_queue(client_id, queue, 'R') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'R');
    END IF;
    EXECUTE format('LISTEN %I', v_queue.channel);
    SELECT e.available_at INTO v_next FROM psqlmessages_element AS e
    WHERE e.queue_id = v_queue.id AND e.available_at >= (SELECT messages._get_scan_start(v_queue.id))
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
    'Listen for elements of a queue, which is created if it does not exist: when elements may be available, PostgreSQL sends a notification on Channel, for Seconds from now. Next: seconds until the next element becomes available, null if there is none; Paused: whether the queue is paused. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE VIEW messages.queued_rows AS
SELECT e.id, ''::text COLLATE "C" AS queue, e.body, e.enc, e.headers::text AS headers, e.mature_at AS mature,
       e.tries, 0 AS hops, e.pushed_at, ''::text AS state
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
           messages._hop_count(e.headers), e.pushed_at,
           CASE
               WHEN e.available_at <= statement_timestamp() THEN 'available'
               WHEN e.lease IS NULL THEN 'scheduled'
               ELSE 'reserved'
           END
    FROM psqlmessages_element AS e
    WHERE e.queue_id = (SELECT _queued_rows.queue_id)
    ORDER BY e.available_at, e.id + 0
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
    IF messages._may_use_queue(client_id, queue, 'R') IS NOT TRUE THEN
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
    'The elements of a queue, at most max_rows (null: all), in the order of pop. Takes none. state: available, scheduled or reserved. If with_bodies is false, body is null and not read. No rows if the queue does not exist. Errors: 54, 1, 15, 16, 62, 2, 3, 60.';


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
        PERFORM messages._notify_waiting_readers(v_queue);
    END LOOP;
    UPDATE psqlmessages_elementkey AS k SET expires_at = v_now + make_interval(secs => q.key_timeout)
    FROM psqlmessages_queue AS q
    WHERE q.id = k.queue_id AND k.id = ANY (ARRAY(
        SELECT a.id FROM psqlmessages_elementkey AS a
        JOIN psqlmessages_queue AS u ON u.id = a.queue_id
        WHERE a.expires_at > v_now + make_interval(secs => u.key_timeout)
        LIMIT 10000 FOR UPDATE OF a SKIP LOCKED
    ));
    -- Rows that were locked, or exceed the limit, need another call; rows that others have stored meanwhile do not.
    v_now := clock_timestamp();
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
    'After the clock was set back: let delays, leases and keys that begin in the future begin now, with the same duration. Updates at most 10,000 rows of each table, and skips locked ones. Returns whether rows are left.';


CREATE OR REPLACE FUNCTION messages._remove_unused_queues(
    since timestamp with time zone
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_removed int;
BEGIN
    -- Keep the row, as _remove_queue does, so that no push at the same moment is lost. A queue that has held an element
    -- has counts. The margin is for readers that are about to call queue_listen again.
    UPDATE psqlmessages_queue AS q SET is_removed = true
    WHERE q.id = ANY (ARRAY(
        SELECT u.id FROM psqlmessages_queue AS u
        WHERE u.awaited_until > greatest(since, 'epoch') AND u.awaited_until < clock_timestamp() - interval '10 seconds'
          AND NOT u.is_removed AND NOT u.is_paused
          -- The default settings.
          AND u.max_tries IS NULL AND u.dead_letter_queue = '__deadletter__' AND u.key_timeout = 86400
          AND NOT EXISTS (SELECT FROM psqlmessages_queuecount AS c WHERE c.queue_id = u.id)
          AND NOT EXISTS (SELECT FROM psqlmessages_element AS e WHERE e.queue_id = u.id)
        LIMIT 10000 FOR NO KEY UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS v_removed = ROW_COUNT;
    RETURN v_removed;
END
$$;

COMMENT ON FUNCTION messages._remove_unused_queues IS
    'Remove queues that queue_listen has created, perhaps for a mistyped name: they have never held an element and have default settings, and the time of their last queue_listen ended after since. Returns their number. Never waits for locks.';


CREATE OR REPLACE FUNCTION messages._maintain_queues()
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queue psqlmessages_queue;
    v_now timestamp with time zone := clock_timestamp();
    v_queues record;
    v_writers text[] := '{}';
    v_last_id bigint;
    v_dead int := 0;
BEGIN
    -- A time in the future was stored before the clock was set back.
    SELECT q.maintained_at, q.is_clock_back, q.pending_writers,
           messages._last_checked_at('messages._queues_checked', q.maintained_at) > clock_timestamp() AS was_set_back
    INTO v_queues FROM messages._queues AS q
    WHERE q.maintained_at NOT BETWEEN v_now - interval '1 second' AND v_now
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF v_queues.was_set_back OR v_queues.is_clock_back OR v_queues.pending_writers <> '{}' THEN
        -- Read the writers before _restart_waits: then it sees what those that have ended have stored.
        v_writers := messages._element_writers();
        IF NOT v_queues.was_set_back THEN
            v_writers := messages._remaining_writers(v_writers, v_queues.pending_writers);
        END IF;
        IF v_queues.was_set_back OR v_queues.is_clock_back OR NOT v_writers @> v_queues.pending_writers THEN
            v_queues.is_clock_back := messages._restart_waits();
        END IF;
    END IF;
    -- Store the time that was compared: the clock may change at any moment.
    UPDATE messages._queues
    SET maintained_at = v_now, is_clock_back = v_queues.is_clock_back, pending_writers = v_writers;
    DELETE FROM psqlmessages_elementkey AS k
    WHERE k.id = ANY (ARRAY(
        SELECT x.id FROM psqlmessages_elementkey AS x WHERE x.expires_at <= (SELECT clock_timestamp())
        ORDER BY x.expires_at LIMIT 10000 FOR UPDATE SKIP LOCKED
    ));
    -- Sum up the counts after every 1,000 new rows, so that there are never many to add up.
    v_last_id := (SELECT max(c.id) FROM psqlmessages_queuecount AS c);
    IF (SELECT v_last_id NOT BETWEEN q.counted_id AND q.counted_id + 1000 FROM messages._queues AS q) THEN
        WITH deleted AS (
            DELETE FROM psqlmessages_queuecount AS c
            WHERE c.id = ANY (ARRAY(
                SELECT l.id FROM psqlmessages_queuecount AS l
                WHERE l.id > (
                    SELECT CASE WHEN q.counted_id <= v_last_id THEN q.counted_id - 20000 ELSE 0 END
                    FROM messages._queues AS q
                )
                ORDER BY l.id LIMIT 20000 FOR UPDATE SKIP LOCKED
            ))
            RETURNING c.*
        )
        INSERT INTO psqlmessages_queuecount (queue_id, puts, gets, reserves, commits, rollbacks, dead_letters, removes)
        SELECT d.queue_id, sum(d.puts), sum(d.gets), sum(d.reserves), sum(d.commits), sum(d.rollbacks),
               sum(d.dead_letters), sum(d.removes)
        FROM deleted AS d GROUP BY d.queue_id;
        UPDATE messages._queues SET counted_id = (SELECT max(c.id) FROM psqlmessages_queuecount AS c);
    END IF;
    -- Each reset of a scan start leaves the row before it. This reads the whole table, so do it once a minute.
    IF date_trunc('minute', v_queues.maintained_at) <> date_trunc('minute', v_now) THEN
        DELETE FROM messages._scan_start AS s
        WHERE s.ctid = ANY (ARRAY(
            SELECT l.ctid FROM messages._scan_start AS l
            WHERE l.version < (SELECT max(n.version) FROM messages._scan_start AS n WHERE n.queue_id = l.queue_id)
            LIMIT 100000 FOR UPDATE SKIP LOCKED
        ));
    END IF;
    -- The command prune removes queues whose last wait ended earlier, so that this takes little time.
    PERFORM messages._remove_unused_queues(v_now - interval '1 hour');
    -- An element whose lease has expired is available again without an update, but after its last try a dead letter.
    FOR v_queue IN
        SELECT * FROM psqlmessages_queue AS q
        WHERE q.max_tries IS NOT NULL AND EXISTS (
            SELECT FROM psqlmessages_element AS e
            WHERE e.queue_id = q.id AND e.lease IS NOT NULL AND e.available_at <= (SELECT clock_timestamp())
              AND e.available_at >= messages._get_scan_start(q.id)
        )
        ORDER BY q.name
    LOOP
        v_dead := v_dead + messages._dead_letter_expired_leases(v_queue);
    END LOOP;
    RETURN v_dead;
END
$$;

COMMENT ON FUNCTION messages._maintain_queues IS
    'Delete expired keys, sum up counts, remove unused queues, move dead letters. Many sessions call this; it works at most once a second, in the session that gets the row lock. Returns the number of dead letters. Never waits for locks.';


CREATE OR REPLACE FUNCTION messages._queues_have_work()
RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_queues messages._queues;
    v_last_check timestamp with time zone;
    v_now timestamp with time zone;
BEGIN
    SELECT * INTO v_queues FROM messages._queues;
    v_last_check := messages._last_checked_at('messages._queues_checked', v_queues.maintained_at);
    -- Read the clock only now: a check that another session stores in between would otherwise be in the future.
    v_now := clock_timestamp();
    IF v_last_check BETWEEN v_now - interval '1 second' AND v_now THEN
        RETURN false;
    END IF;
    IF v_last_check NOT BETWEEN v_now - interval '10 seconds' AND v_now
        OR v_queues.is_clock_back
        OR v_queues.pending_writers <> '{}' AND NOT messages._element_writers() @> v_queues.pending_writers
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
                  AND e.available_at >= messages._get_scan_start(q.id)
            )
        )
    THEN
        RETURN true;
    END IF;
    PERFORM messages._store_check('messages._queues_checked', v_queues.maintained_at, v_now);
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._queues_have_work IS
    'Whether _maintain_queues has anything to do. False within a second after a check that found nothing.';


CREATE OR REPLACE FUNCTION messages._replace_queue_channels(
    queues bigint[] DEFAULT NULL
)
RETURNS bigint[]
LANGUAGE plpgsql
AS $$
DECLARE
    v_all bigint[];
    v_replaced bigint[];
BEGIN
    -- Also for queues without a recent queue_listen, because earlier callers may still LISTEN. If awaited_until is the
    -- epoch, no session has the channel, unless a transaction reads it at this moment, which the rules lock prevents.
    v_all := ARRAY(
        SELECT q.id FROM psqlmessages_queue AS q
        WHERE (queues IS NULL OR q.id = ANY (queues))
          AND (q.awaited_until > 'epoch' OR NOT (SELECT messages._holds_rules_lock()))
    );
    v_replaced := ARRAY(
        SELECT l.id FROM psqlmessages_queue AS l WHERE l.id = ANY (v_all) ORDER BY l.id FOR NO KEY UPDATE SKIP LOCKED
    );
    PERFORM messages._notify_waiting_readers(q, 'moved') FROM psqlmessages_queue AS q WHERE q.id = ANY (v_replaced);
    UPDATE psqlmessages_queue AS q SET channel = messages._new_queue_channel(), awaited_until = 'epoch'
    WHERE q.id = ANY (v_replaced) AND q.awaited_until > 'epoch';
    RETURN ARRAY(SELECT u.id FROM unnest(v_all) AS u (id) WHERE u.id <> ALL (v_replaced));
END
$$;

COMMENT ON FUNCTION messages._replace_queue_channels IS
    'Give queues new channels, because permissions may have been removed: waiting readers must call queue_listen again, and get the new channel only if a rule allows it. queues: their ids, null for all. Returns the ids of queues with locked rows, which keep their channel. Never waits.';


CREATE OR REPLACE FUNCTION messages._redrive_dead_letters(
    ids bigint[]
)
RETURNS int
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_dead record;
    v_total int := 0;
BEGIN
    FOR v_dead IN
        SELECT d AS queue, f.name, array_agg(e.id) AS ids
        FROM psqlmessages_element AS e
        JOIN psqlmessages_queue AS d ON d.id = e.queue_id
        JOIN psqlmessages_queue AS f ON f.name = e.headers ->> 'x-dl-from-queue'
        -- Any sender can write the header: trust it only if this is the dead-letter queue of the queue that it names.
        WHERE e.id = ANY (ids) AND f.dead_letter_queue = d.name
        GROUP BY d.id, f.name ORDER BY f.name
    LOOP
        v_total := v_total + messages._move_elements(
            v_dead.queue, messages._get_or_create_queue(v_dead.name), v_dead.ids, false
        );
    END LOOP;
    RETURN v_total;
END
$$;

COMMENT ON FUNCTION messages._redrive_dead_letters IS
    'For the administrator: redrive dead letters to the queues that they came from, as if they were pushed now. Reserved ones stay. Returns the number of redriven ones.';
