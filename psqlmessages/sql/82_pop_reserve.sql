-- Pop and reserve: take available elements, oldest first, each by one reader only.

CREATE OR REPLACE VIEW messages.element_rows AS
SELECT e.id, e.body, e.enc, e.headers, e.mature_at AS mature, e.tries, 0 AS hops, e.pushed_at, ''::text AS lease,
       e.delivered
FROM psqlmessages_element AS e;

COMMENT ON VIEW messages.element_rows IS
    'The row type of pop, reserve, take and renew.';


CREATE OR REPLACE FUNCTION messages._dead_letter_elements(
    queue psqlmessages_queue,
    ids bigint[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_dead_letter_queue psqlmessages_queue := messages._get_or_create_queue(queue.dead_letter_queue);
    v_count bigint;
    v_first timestamp with time zone;
BEGIN
    WITH moved AS (
        UPDATE psqlmessages_element AS e
        SET queue_id = v_dead_letter_queue.id, lease = NULL, tries = 0,
            mature_at = clock_timestamp(), available_at = clock_timestamp(), wait_began_at = clock_timestamp(),
            headers = e.headers || jsonb_build_object(
                'x-dl-from-queue', queue.name, 'x-dl-t', to_json(clock_timestamp()), 'x-dl-tries', e.tries
            )
        WHERE e.id = ANY (ids)
        RETURNING e.available_at
    )
    SELECT count(*), min(m.available_at) INTO v_count, v_first FROM moved AS m;
    IF v_count > 0 THEN
        PERFORM messages._add_queue_counts(queue.id, dead_letters => v_count);
        PERFORM messages._add_queue_counts(v_dead_letter_queue.id, puts => v_count);
        PERFORM messages._reset_scan_start(v_dead_letter_queue.id, v_first);
        PERFORM messages._notify_waiting_readers(v_dead_letter_queue);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._dead_letter_elements IS
    'Move elements of a queue to its dead-letter queue, with headers that name the source. The last try must have been counted before.';


CREATE OR REPLACE FUNCTION messages._dead_letter_expired_leases(
    queue psqlmessages_queue
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_ids bigint[];
BEGIN
    IF queue.max_tries IS NULL OR queue.dead_letter_queue = queue.name THEN
        RETURN 0;
    END IF;
    v_ids := ARRAY(
        SELECT e.id FROM psqlmessages_element AS e
        WHERE e.queue_id = queue.id AND e.lease IS NOT NULL AND e.available_at <= (SELECT clock_timestamp())
          AND e.available_at >= (SELECT messages._get_scan_start(queue.id))
          AND e.tries >= queue.max_tries - 1
        ORDER BY e.available_at LIMIT 1000 FOR UPDATE SKIP LOCKED
    );
    -- If another transaction is creating the dead-letter queue, leave the elements until it has committed.
    IF v_ids <> '{}' AND messages._get_or_create_queue(queue.dead_letter_queue, false) IS NULL THEN
        RETURN 0;
    ELSIF v_ids <> '{}' THEN
        UPDATE psqlmessages_element AS e SET tries = messages._increment_tries(e.tries) WHERE e.id = ANY (v_ids);
        PERFORM messages._dead_letter_elements(queue, v_ids);
    END IF;
    RETURN cardinality(v_ids);
END
$$;

COMMENT ON FUNCTION messages._dead_letter_expired_leases IS
    'Move elements, at most 1,000, to the dead-letter queue if their lease has expired in the last try. Returns their number.';


CREATE OR REPLACE FUNCTION messages._validated_queue(
    client_id text,
    queue text,
    count int,
    duration float8
)
RETURNS psqlmessages_queue
LANGUAGE plpgsql
AS $$
BEGIN
    IF messages._may_use_queue(client_id, queue, 'R') IS NOT TRUE THEN
        PERFORM messages._raise(messages._queue_error(client_id, queue, 'R'));
    ELSIF count <= 0 OR count IS NULL THEN
        PERFORM messages._raise(messages._error(60, 'count'));
    ELSIF count > 4096 THEN
        PERFORM messages._raise(messages._error(58, '4096 elements'));
    ELSIF duration <= 0 OR duration IS NULL OR messages._to_interval(duration) IS NULL THEN
        PERFORM messages._raise(messages._error(60, 'duration'));
    END IF;
    RETURN (SELECT q FROM psqlmessages_queue AS q WHERE q.name = queue);
END
$$;

COMMENT ON FUNCTION messages._validated_queue IS
    'Check the arguments of a call that takes elements, and raise errors 54, 1, 15, 16, 62, 2, 3, 60 and 58. Returns the queue, or null if it does not exist. Slower than _authorized_queue, so pop, reserve and take call it only if that finds no queue, or if a number is wrong.';


CREATE OR REPLACE FUNCTION messages.pop(
    client_id text,
    queue text,
    count int DEFAULT 1
)
RETURNS SETOF messages.element_rows
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- Read in index order, even if the statistics say that the table is empty.
SET enable_seqscan = off
SET jit = off
SET enable_bitmapscan = off
SET enable_sort = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_source record;
    v_queue psqlmessages_queue;
    v_rows bigint;
BEGIN
    PERFORM messages._log_command('pop', client_id, queue);
    SELECT q AS queue, s.start_at, s.element_id, s.seconds, s.made_at INTO v_source
    FROM messages._authorized_queue(client_id, queue, 'R') AS q
    LEFT JOIN LATERAL (
        SELECT r.* FROM messages._scan_start AS r WHERE r.queue_id = q.id ORDER BY r.version DESC LIMIT 1
    ) AS s ON true;
    v_queue := v_source.queue;
    IF (v_queue.id > 0 AND count BETWEEN 1 AND 4096) IS NOT TRUE THEN
        v_queue := messages._validated_queue(client_id, queue, count, 1);
    END IF;
    IF v_queue.max_tries IS NOT NULL THEN
        PERFORM messages._dead_letter_expired_leases(v_queue);
    END IF;
    IF v_queue.is_paused IS NOT FALSE THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH taken AS (
        DELETE FROM psqlmessages_element AS e WHERE e.id = ANY (ARRAY(
            SELECT l.id FROM psqlmessages_element AS l
            WHERE l.queue_id = (SELECT v_queue.id) AND l.available_at <= (SELECT clock_timestamp())
              AND l.available_at >= (SELECT coalesce(v_source.start_at, '-infinity'))
              -- Not if the lease has expired in the last try: the element is a dead letter.
              AND (l.lease IS NULL OR l.tries < v_queue.max_tries - 1 OR v_queue.max_tries IS NULL
                  OR v_queue.dead_letter_queue = v_queue.name)
            ORDER BY l.available_at, l.id + 0
            LIMIT (SELECT count)
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING e.*
    )
    SELECT t.id, t.body, t.enc, t.headers, t.mature_at,
           CASE WHEN t.lease IS NULL THEN t.tries ELSE messages._increment_tries(t.tries) END,
           messages._hop_count(t.headers), t.pushed_at, NULL::text, t.delivered
    FROM taken AS t ORDER BY t.available_at, t.id;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    IF v_rows > 0 THEN
        PERFORM messages._add_queue_counts(v_queue.id, gets => v_rows);
        PERFORM messages._advance_scan_start_if_due(
            v_queue.id, count, v_source.element_id, v_source.seconds, v_source.made_at
        );
    END IF;
    PERFORM messages._schedule_housekeeping_if_due();
END
$$;

COMMENT ON FUNCTION messages.pop IS
    'Take and remove elements of a queue, in the order in which they became available; none if it is paused or does not exist. Errors: 54, 1, 15, 16, 62, 2, 3, 60, 58.';


CREATE OR REPLACE FUNCTION messages.reserve(
    client_id text,
    queue text,
    count int DEFAULT 1,
    duration float8 DEFAULT 120
)
RETURNS SETOF messages.element_rows
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- Read in index order, even if the statistics say that the table is empty.
SET enable_seqscan = off
SET jit = off
SET enable_bitmapscan = off
SET enable_sort = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_source record;
    v_queue psqlmessages_queue;
    v_rows bigint;
BEGIN
    PERFORM messages._log_command('reserve', client_id, queue);
    SELECT q AS queue, s.start_at, s.element_id, s.seconds, s.made_at INTO v_source
    FROM messages._authorized_queue(client_id, queue, 'R') AS q
    LEFT JOIN LATERAL (
        SELECT r.* FROM messages._scan_start AS r WHERE r.queue_id = q.id ORDER BY r.version DESC LIMIT 1
    ) AS s ON true;
    v_queue := v_source.queue;
    IF (v_queue.id > 0 AND count BETWEEN 1 AND 4096 AND duration > 0 AND duration <= 1000000000) IS NOT TRUE THEN
        v_queue := messages._validated_queue(client_id, queue, count, duration);
    END IF;
    IF v_queue.max_tries IS NOT NULL THEN
        PERFORM messages._dead_letter_expired_leases(v_queue);
    END IF;
    IF v_queue.is_paused IS NOT FALSE THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH taken AS (
        UPDATE psqlmessages_element AS e
        SET available_at = clock_timestamp() + make_interval(secs => duration), wait_began_at = clock_timestamp(),
            lease = gen_random_uuid(),
            tries = CASE WHEN e.lease IS NULL THEN e.tries ELSE messages._increment_tries(e.tries) END
        WHERE e.id = ANY (ARRAY(
            SELECT l.id FROM psqlmessages_element AS l
            WHERE l.queue_id = (SELECT v_queue.id) AND l.available_at <= (SELECT clock_timestamp())
              AND l.available_at >= (SELECT coalesce(v_source.start_at, '-infinity'))
              -- Not if the lease has expired in the last try: the element is a dead letter.
              AND (l.lease IS NULL OR l.tries < v_queue.max_tries - 1 OR v_queue.max_tries IS NULL
                  OR v_queue.dead_letter_queue = v_queue.name)
            ORDER BY l.available_at, l.id + 0
            LIMIT (SELECT count)
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING e.*
    )
    SELECT t.id, t.body, t.enc, t.headers, t.mature_at, t.tries,
           messages._hop_count(t.headers), t.pushed_at, t.id || '.' || t.lease, t.delivered
    FROM taken AS t ORDER BY t.mature_at, t.id;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    IF v_rows > 0 THEN
        PERFORM messages._add_queue_counts(v_queue.id, reserves => v_rows);
        PERFORM messages._advance_scan_start_if_due(
            v_queue.id, count, v_source.element_id, v_source.seconds, v_source.made_at
        );
    END IF;
    PERFORM messages._schedule_housekeeping_if_due();
END
$$;

COMMENT ON FUNCTION messages.reserve(text, text, int, float8) IS
    'Take elements and hide them for duration seconds; none if the queue is paused or does not exist. If they are not committed in this time, they become available again with one more try. lease: identifies the reservation in commit, rollback, release and renew. Errors: 54, 1, 15, 16, 62, 2, 3, 60, 58.';
