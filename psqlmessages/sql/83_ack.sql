-- Acknowledge: commit, roll back, release or renew reserved elements. The lease authorizes the call.

CREATE OR REPLACE FUNCTION messages._lease_format_error(
    leases text[]
)
RETURNS json
LANGUAGE sql
AS $$
    SELECT messages._error(63, 'lease', left(coalesce(l.lease, ''), 100))
    FROM unnest(leases) AS l (lease)
    WHERE l.lease !~ '^[0-9]{1,18}[.][0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' OR l.lease IS NULL
    LIMIT 1
$$;

COMMENT ON FUNCTION messages._lease_format_error IS
    'Error 63 of the first malformed lease, or null.';


CREATE OR REPLACE FUNCTION messages._parse_leases(
    leases text[],
    OUT ids bigint[],
    OUT error json
)
LANGUAGE plpgsql
AS $$
BEGIN
    IF cardinality(leases) > 4096 THEN
        error := messages._error(58, '4096 leases');
        RETURN;
    END IF;
    -- Only a lease without an element is checked further, later: this takes as long as all other work.
    ids := ARRAY(SELECT split_part(l.lease, '.', 1)::bigint FROM unnest(leases) AS l (lease));
EXCEPTION WHEN invalid_text_representation OR numeric_value_out_of_range THEN
    error := messages._lease_format_error(leases);
END
$$;

COMMENT ON FUNCTION messages._parse_leases IS
    'The ids of elements in these leases; or error 58 for too many leases, 63 for a malformed one.';


CREATE OR REPLACE FUNCTION messages._leased_elements_error(
    client_id text,
    leases text[],
    ids bigint[],
    queues bigint[]
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_error json;
    v_queue text;
BEGIN
    IF cardinality(ids) < cardinality(leases) THEN
        v_error := messages._lease_format_error(leases);
    END IF;
    IF ids = '{}' THEN
        v_error := coalesce(v_error, messages._ident_and_dest_error(client_id, '*'));
    END IF;
    FOR v_queue IN
        SELECT q.name FROM psqlmessages_queue AS q
        WHERE q.id = ANY (ARRAY(SELECT DISTINCT u.id FROM unnest(queues) AS u (id)))
    LOOP
        EXIT WHEN v_error IS NOT NULL;
        IF messages._may_use_queue(client_id, v_queue, 'R') IS NOT TRUE THEN
            v_error := messages._queue_error(client_id, v_queue, 'R');
        END IF;
    END LOOP;
    RETURN v_error;
END
$$;

COMMENT ON FUNCTION messages._leased_elements_error IS
    'The error if a lease without an element is malformed (63), or if this role may not read the queue of an element; or null. ids, queues: of the elements that were found for the leases.';


CREATE OR REPLACE FUNCTION messages._lock_leased_elements(
    client_id text,
    leases text[],
    OUT ids bigint[],
    OUT valid_leases text[],
    OUT error json
)
LANGUAGE plpgsql
AS $$
DECLARE
    v_parsed record;
    v_queues bigint[];
BEGIN
    SELECT * INTO v_parsed FROM messages._parse_leases(leases);
    error := v_parsed.error;
    IF error IS NULL THEN
        -- Lock in the order of ids, so that two calls cannot deadlock. The plan must use the primary key and a hash of
        -- the leases: IS TRUE prevents a join, which might read the whole table.
        SELECT coalesce(array_agg(e.id), '{}'), coalesce(array_agg(e.id || '.' || e.lease), '{}'),
               array_agg(e.queue_id)
        INTO ids, valid_leases, v_queues
        FROM (
            SELECT h.id, h.lease, h.queue_id FROM psqlmessages_element AS h
            WHERE h.id = ANY (v_parsed.ids) AND (h.id || '.' || h.lease IN (SELECT unnest(leases))) IS TRUE
            ORDER BY h.id FOR UPDATE
        ) AS e;
        error := messages._leased_elements_error(client_id, leases, ids, v_queues);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._lock_leased_elements IS
    'Lock the elements of these leases, and return their ids and the valid leases; or the error of _parse_leases or _leased_elements_error.';


CREATE OR REPLACE FUNCTION messages._leases_answer(
    leases text[],
    valid_leases text[],
    dead_ids bigint[] DEFAULT '{}'
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF cardinality(valid_leases) = cardinality(leases) AND dead_ids = '{}' THEN
        RETURN ('{"Err":"0","Done":[' || rtrim(repeat('true,', cardinality(leases)), ',') || ']}')::json;
    END IF;
    RETURN (
        SELECT '{"Err":"0","Done":' || json_agg(l.is_valid ORDER BY l.ordinal)
            || CASE
                WHEN dead_ids <> '{}'
                THEN ',"DeadLettered":' || json_agg(l.is_valid AND l.id = ANY (dead_ids) ORDER BY l.ordinal)
                ELSE ''
            END || '}'
        FROM (
            -- An element may have a valid lease and expired ones here.
            SELECT split_part(u.lease, '.', 1)::bigint AS id, u.lease IN (SELECT unnest(valid_leases)) AS is_valid, u.ordinal
            FROM unnest(leases) WITH ORDINALITY AS u (lease, ordinal)
        ) AS l
    )::json;
END
$$;

COMMENT ON FUNCTION messages._leases_answer IS
    'The answer of commit, rollback and release. Done: for each lease whether it was valid; DeadLettered, if any element became a dead letter: for each lease whether its element did.';


CREATE OR REPLACE FUNCTION messages.commit(
    client_id text,
    VARIADIC leases text[]
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
-- Read in the order of ids.
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_queue_id bigint;
    v_parsed record;
    v_deleted record;
    v_queue record;
    v_error json;
BEGIN
    PERFORM messages._log_command('commit', client_id);
    -- The common case in one statement.
    IF cardinality(leases) = 1 THEN
        DELETE FROM psqlmessages_element AS e USING psqlmessages_queue AS q
        -- A regular expression would take ten times as long.
        WHERE e.id = CASE
                WHEN ltrim(split_part(leases[1], '.', 1), '0123456789') = ''
                    AND length(split_part(leases[1], '.', 1)) BETWEEN 1 AND 18
                THEN split_part(leases[1], '.', 1)::bigint
            END
          -- Not =, which might lead to a search of all reserved elements.
          AND e.lease::text IS NOT DISTINCT FROM substr(leases[1], strpos(leases[1], '.') + 1)
          -- + 0: while PostgreSQL believes that the table is empty, it would read the whole queue.
          AND q.id = e.queue_id + 0 AND EXISTS (SELECT FROM messages._authorized_queue(client_id, q.name, 'R'))
        RETURNING e.queue_id INTO v_queue_id;
        IF FOUND THEN
            PERFORM messages._add_queue_counts(v_queue_id, commits => 1);
            PERFORM messages._schedule_housekeeping_if_due();
            RETURN '{"Err":"0","Done":[true]}';
        END IF;
    END IF;
    SELECT * INTO v_parsed FROM messages._parse_leases(leases);
    IF v_parsed.error IS NOT NULL THEN
        RETURN v_parsed.error;
    END IF;
    BEGIN
        -- As in _lock_leased_elements, but without a separate lock, which would take twice the time.
        WITH deleted AS (
            DELETE FROM psqlmessages_element AS e
            WHERE e.id = ANY (v_parsed.ids) AND (e.id || '.' || e.lease IN (SELECT unnest(leases))) IS TRUE
            RETURNING e.id, e.lease, e.queue_id
        )
        SELECT coalesce(array_agg(d.id), '{}') AS ids, coalesce(array_agg(d.id || '.' || d.lease), '{}') AS valid_leases,
               array_agg(d.queue_id) AS queues
        INTO v_deleted FROM deleted AS d;
        v_error := messages._leased_elements_error(client_id, leases, v_deleted.ids, v_deleted.queues);
        IF v_error IS NOT NULL THEN
            -- Roll back the DELETE.
            RAISE EXCEPTION USING ERRCODE = 'PM000';
        END IF;
    EXCEPTION WHEN SQLSTATE 'PM000' THEN
        RETURN v_error;
    END;
    FOR v_queue IN SELECT d.id, count(*) AS commits FROM unnest(v_deleted.queues) AS d (id) GROUP BY d.id LOOP
        PERFORM messages._add_queue_counts(v_queue.id, commits => v_queue.commits);
    END LOOP;
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN messages._leases_answer(leases, v_deleted.valid_leases);
END
$$;

COMMENT ON FUNCTION messages.commit IS
    'Remove reserved elements. Done: true for each valid lease; false if another reader has taken the element since, or it was removed. Errors: 58, 63, 54, 15, 16, 2, 3.';


CREATE OR REPLACE FUNCTION messages._roll_back_elements(
    ids bigint[],
    delay interval
)
RETURNS bigint[]
LANGUAGE plpgsql
AS $$
DECLARE
    v_queue psqlmessages_queue;
    v_returned bigint[];
    v_dead bigint[];
    v_all_dead bigint[] := '{}';
    v_first_at timestamp with time zone;
BEGIN
    FOR v_queue IN
        SELECT q.* FROM psqlmessages_queue AS q
        WHERE q.id = ANY (ARRAY(SELECT e.queue_id FROM psqlmessages_element AS e WHERE e.id = ANY (ids)))
        ORDER BY q.name
    LOOP
        WITH returned AS (
            UPDATE psqlmessages_element AS e
            SET tries = messages._increment_tries(e.tries), lease = NULL,
                mature_at = clock_timestamp() + coalesce(
                    delay, make_interval(secs => least(power(2, least(e.tries, 10)), 300))
                ),
                available_at = clock_timestamp() + coalesce(
                    delay, make_interval(secs => least(power(2, least(e.tries, 10)), 300))
                ),
                wait_began_at = clock_timestamp()
            WHERE e.id = ANY (ids) AND e.queue_id + 0 = v_queue.id
            RETURNING e.id, e.tries, e.available_at
        )
        SELECT array_agg(r.id), array_agg(r.id) FILTER (WHERE r.tries >= v_queue.max_tries), min(r.available_at)
        INTO v_returned, v_dead, v_first_at FROM returned AS r;
        PERFORM messages._reset_scan_start(v_queue.id, v_first_at);
        PERFORM messages._add_queue_counts(v_queue.id, rollbacks => cardinality(v_returned));
        IF v_dead <> '{}' AND v_queue.dead_letter_queue <> v_queue.name THEN
            PERFORM messages._dead_letter_elements(v_queue, v_dead);
            v_all_dead := v_all_dead || v_dead;
        END IF;
        PERFORM messages._notify_waiting_readers(v_queue);
    END LOOP;
    RETURN v_all_dead;
END
$$;

COMMENT ON FUNCTION messages._roll_back_elements IS
    'Roll back elements: count one more try, and make them available again after the delay (null: 1 s, 2 s, 4 s ... 5 minutes, by the number of tries), or move them to the dead-letter queue after the last try. Returns the ids of the dead letters.';


CREATE OR REPLACE FUNCTION messages.rollback(
    client_id text,
    delay float8,
    VARIADIC leases text[]
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_leased record;
    v_delay interval := messages._to_interval(coalesce(delay, 0));
    v_dead bigint[];
BEGIN
    PERFORM messages._log_command('rollback', client_id);
    IF v_delay IS NULL THEN
        RETURN messages._error(63, 'delay', '0 to 1,000,000,000 seconds are needed');
    END IF;
    SELECT * INTO v_leased FROM messages._lock_leased_elements(client_id, leases);
    IF v_leased.error IS NOT NULL THEN
        RETURN v_leased.error;
    END IF;
    v_dead := messages._roll_back_elements(v_leased.ids, v_delay);
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN messages._leases_answer(leases, v_leased.valid_leases, v_dead);
END
$$;

COMMENT ON FUNCTION messages.rollback(text, float8, text[]) IS
    'Give back reserved elements with one more try. They become available after delay seconds (null: now, behind the elements that are available). Done: for each lease whether it was valid. DeadLettered, if any element moved to the dead-letter queue: for each lease whether its element did. Errors: 63, 58, 54, 15, 16, 2, 3.';


CREATE OR REPLACE FUNCTION messages.release(
    client_id text,
    VARIADIC leases text[]
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_leased record;
BEGIN
    PERFORM messages._log_command('release', client_id);
    SELECT * INTO v_leased FROM messages._lock_leased_elements(client_id, leases);
    IF v_leased.error IS NOT NULL THEN
        RETURN v_leased.error;
    END IF;
    -- The element was available when it was taken, even if the clock has been set back since.
    UPDATE psqlmessages_element AS e SET lease = NULL, available_at = least(e.mature_at, clock_timestamp())
    WHERE e.id = ANY (v_leased.ids);
    PERFORM messages._reset_scan_start(q.id), messages._notify_waiting_readers(q) FROM psqlmessages_queue AS q
    WHERE q.id = ANY (ARRAY(SELECT e.queue_id FROM psqlmessages_element AS e WHERE e.id = ANY (v_leased.ids)));
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN messages._leases_answer(leases, v_leased.valid_leases);
END
$$;

COMMENT ON FUNCTION messages.release IS
    'Give back reserved elements that were not processed: they become available at their old place, and their tries do not change. Done: for each lease whether it was valid. Errors: 58, 63, 54, 15, 16, 2, 3.';


CREATE OR REPLACE FUNCTION messages.renew(
    client_id text,
    queue text,
    duration float8,
    VARIADIC leases text[]
)
RETURNS SETOF messages.element_rows
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_queue psqlmessages_queue := messages._validated_queue(client_id, queue, 1, duration);
    v_leased record;
BEGIN
    PERFORM messages._log_command('renew', client_id, queue);
    SELECT * INTO v_leased FROM messages._lock_leased_elements(client_id, leases);
    IF v_leased.error IS NOT NULL THEN
        PERFORM messages._raise(v_leased.error);
    END IF;
    RETURN QUERY
    WITH renewed AS (
        UPDATE psqlmessages_element AS e
        SET available_at = clock_timestamp() + make_interval(secs => duration), wait_began_at = clock_timestamp()
        WHERE e.id = ANY (ARRAY(SELECT unnest(v_leased.ids))) AND e.queue_id + 0 = (SELECT v_queue.id)
        RETURNING e.*
    )
    SELECT r.id, r.body, r.enc, r.headers, r.mature_at, r.tries,
           messages._hop_count(r.headers), r.pushed_at, r.id || '.' || r.lease, r.delivered
    FROM renewed AS r ORDER BY r.mature_at, r.id;
    PERFORM messages._schedule_housekeeping_if_due();
END
$$;

COMMENT ON FUNCTION messages.renew(text, text, float8, text[]) IS
    'Extend leases of a queue to duration seconds from now. Returns the elements with valid leases; an expired lease is valid until another reader takes the element. Errors: 54, 1, 15, 16, 62, 2, 3, 60, 58, 63.';
