-- Queue calls: what is done to a queue as a whole, what is known of it, and waiting for its elements.

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
        RETURN messages._refusal(client_id, queue, 'RW');
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
    PERFORM messages._count(v_queue_id, gets => 1);
    RETURN '{"Err":"0","Done":true}';
END
$$;

COMMENT ON FUNCTION messages.remove IS
    'Remove one element that is not reserved. Done: false where there is none with this id, or somebody has it. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE FUNCTION messages._begin_queue_change(
    client_id text,
    queue text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    -- Who may not must not hold up those who save rules; who may is asked again behind the gate.
    IF messages._may_use(client_id, queue, mode) THEN
        PERFORM messages._share_gate();
        IF messages._may_use(client_id, queue, mode) THEN
            RETURN NULL;
        END IF;
    END IF;
    RETURN messages._refusal(client_id, queue, mode);
END
$$;

COMMENT ON FUNCTION messages._begin_queue_change IS
    'Before a queue''s row changes, as it does when rules change: why this role may not, or null and the gate.';


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
    v_fault json;
    v_queue psqlmessages_queue;
BEGIN
    PERFORM messages._log_command(command, client_id, queue);
    v_fault := messages._begin_queue_change(client_id, queue, 'RW');
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    v_queue := messages._queue(queue);
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
    'pause and resume.';


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
    'From now on pop and reserve give nothing from this queue; pushes go on. Already: 1 where it was paused. Errors: 54, 1, 15, 16, 62, 2, 3.';


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
    'End a pause. Already: 1 where there was none. Errors: 54, 1, 15, 16, 62, 2, 3.';


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
        RETURN messages._refusal(client_id, queue, 'RW');
    END IF;
    v_queue := messages._queue(queue);
    WITH locked AS MATERIALIZED (
        SELECT e.id FROM psqlmessages_element AS e
        WHERE e.queue_id = v_queue.id AND e.available_at <= (SELECT clock_timestamp())
        FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM psqlmessages_element AS e USING locked AS l WHERE e.id = l.id RETURNING 1
    )
    SELECT count(*) INTO v_removed FROM gone;
    IF v_removed > 0 THEN
        PERFORM messages._count(v_queue.id, gets => v_removed);
    END IF;
    RETURN ('{"Err":"0","Removed":' || v_removed || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.drain IS
    'Remove all that can be taken now, also while the queue is paused; Removed: how many. Errors: 54, 1, 15, 16, 62, 2, 3.';


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
    v_fault json;
    v_queue psqlmessages_queue;
    v_now timestamp with time zone := clock_timestamp();
    v_sizes record;
BEGIN
    PERFORM messages._log_command('sizes', client_id, queue);
    v_fault := messages._queue_fault(client_id, queue, '');
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.name = queue;
    IF NOT FOUND THEN
        RETURN messages._error(62, queue);
    END IF;
    SELECT count(*) AS total,
           count(*) FILTER (WHERE e.available_at <= v_now) AS available,
           count(*) FILTER (WHERE e.available_at > v_now AND e.lease IS NULL) AS scheduled,
           count(*) FILTER (WHERE e.available_at > v_now AND e.lease IS NOT NULL) AS reserved,
           min(e.available_at) FILTER (WHERE e.available_at > v_now AND e.lease IS NULL) AS next
    INTO v_sizes
    FROM psqlmessages_element AS e WHERE e.queue_id = v_queue.id;
    RETURN (
        '{"Err":"0","Total":' || v_sizes.total || ',"Available":' || v_sizes.available
        || ',"Scheduled":' || v_sizes.scheduled || ',"Reserved":' || v_sizes.reserved
        || ',"Next":' || coalesce(to_json(v_sizes.next)::text, 'null')
        || ',"Paused":' || v_queue.is_paused || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.sizes IS
    'How many elements a queue has: Total, Available, Scheduled (not mature), Reserved; Next: the next mature time. It never makes a queue. Errors: 54, 1, 15, 16, 62, 2.';


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
    v_fault json;
    v_queue psqlmessages_queue;
    v_next timestamp with time zone;
BEGIN
    PERFORM messages._log_command('queue_listen', client_id, queue);
    v_fault := messages._begin_queue_change(client_id, queue, 'R');
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    v_queue := messages._queue(queue);
    -- Further ahead only if the clock was put back.
    IF v_queue.awaited_until NOT BETWEEN clock_timestamp() + interval '40 seconds' AND clock_timestamp() + interval '60 seconds' THEN
        -- Whoever holds the row now is about to do the same.
        UPDATE psqlmessages_queue AS q SET awaited_until = clock_timestamp() + interval '60 seconds'
        WHERE q.id = (SELECT l.id FROM psqlmessages_queue AS l WHERE l.id = v_queue.id FOR NO KEY UPDATE SKIP LOCKED);
        SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.id = v_queue.id;
    END IF;
    -- Rules may have been changed since, and the channel may be a new one because of that.
    IF NOT messages._may_use(client_id, queue, 'R') THEN
        RETURN messages._refusal(client_id, queue, 'R');
    END IF;
    EXECUTE format('LISTEN %I', v_queue.channel);
    SELECT e.available_at INTO v_next FROM psqlmessages_element AS e
    WHERE e.queue_id = v_queue.id ORDER BY e.available_at LIMIT 1;
    PERFORM messages._evaluate_if_due();
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
    'Be notified, on Channel and for Seconds from now, when there may be something to take. Next: in how many seconds the next element becomes available, null for none; Paused: it gives nothing. Errors: 54, 1, 15, 16, 62, 2, 3.';


CREATE OR REPLACE VIEW messages.queued_rows AS
SELECT e.id, ''::text COLLATE "C" AS queue, e.body, e.enc, e.headers::text AS headers, e.mature_at AS mature, e.tries, 0 AS hops,
       e.pushed_at, ''::text AS state
FROM psqlmessages_element AS e;

COMMENT ON VIEW messages.queued_rows IS
    'The form of the rows that peek returns.';


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
    'The elements of a queue, in the order in which they can be taken. Inlined where it is called.';


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
-- In the order of the index, as when elements are taken.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET max_parallel_workers_per_gather = 0
SET jit = off
AS $$
BEGIN
    PERFORM messages._log_command('peek', client_id, queue);
    IF messages._may_use(client_id, queue, 'R') IS NOT TRUE THEN
        PERFORM messages._raise(messages._refusal(client_id, queue, 'R'));
    ELSIF max_rows <= 0 THEN
        PERFORM messages._raise(messages._error(60, 'max_rows'));
    END IF;
    RETURN QUERY SELECT * FROM messages._queued_rows(
        (SELECT q.id FROM psqlmessages_queue AS q WHERE q.name = queue), queue, max_rows, with_bodies
    );
END
$$;

COMMENT ON FUNCTION messages.peek IS
    'The elements of a queue as they are now, at most max_rows (null: all), in the order in which they can be taken; nothing is taken. state: available, scheduled or reserved. Without with_bodies, body is null and not read. No rows if there is no such queue. Errors: 54, 1, 15, 16, 62, 2, 3, 60.';
