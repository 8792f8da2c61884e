-- Exchanges: take elements, push copies to destinations, and remove the elements, all in one transaction.

CREATE OR REPLACE FUNCTION messages.take(
    client_id text,
    queue text,
    count int DEFAULT 1,
    with_body boolean DEFAULT true
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
BEGIN
    PERFORM messages._log_command('take', client_id, queue);
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
    SELECT e.id, CASE WHEN with_body THEN e.body END, e.enc, e.headers, e.mature_at,
           CASE WHEN e.lease IS NULL THEN e.tries ELSE messages._increment_tries(e.tries) END,
           messages._hop_count(e.headers), e.pushed_at, NULL::text, e.delivered
    FROM psqlmessages_element AS e
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
    ORDER BY e.available_at, e.id;
    IF FOUND THEN
        PERFORM messages._advance_scan_start_if_due(
            v_queue.id, count, v_source.element_id, v_source.seconds, v_source.made_at
        );
    END IF;
    PERFORM messages._schedule_housekeeping_if_due();
END
$$;

COMMENT ON FUNCTION messages.take IS
    'Lock elements until the end of this transaction; other readers skip them. Call deliver in the same transaction, or they stay unchanged. None if the queue is paused or does not exist. delivered: marks of copies that earlier calls of deliver have pushed. Errors: 54, 1, 15, 16, 62, 2, 3, 60, 58.';


CREATE OR REPLACE VIEW messages._copy_rows AS
SELECT 0::bigint AS ordinal, ''::text AS ref, e.id AS element_id, ''::text AS mark, ''::text AS queue, ''::text AS headers,
       e.body, e.enc, e.mature_at AS mature, e.tries
FROM psqlmessages_element AS e;

COMMENT ON VIEW messages._copy_rows IS
    'The row type of copies to deliver. ordinal: index in the arguments of deliver; ref: id or lease of the element; element_id: its id; mark: names the copy, so that it is pushed only once; queue: the destination, null if it is in another database; the other columns: values that replace those of the element, null to keep them.';


CREATE OR REPLACE FUNCTION messages._lock_elements(
    queue_id bigint,
    refs text[],
    OUT ids bigint[],
    OUT locked_refs text[],
    OUT lost_refs text[]
)
LANGUAGE plpgsql
AS $$
BEGIN
    WITH named AS MATERIALIZED (
        SELECT r.ref, split_part(r.ref, '.', 1)::bigint AS id, nullif(split_part(r.ref, '.', 2), '')::uuid AS lease
        FROM (SELECT DISTINCT u.ref FROM unnest(refs) AS u (ref)) AS r
    ), taken AS (
        SELECT e.id, n.ref
        FROM named AS n
        CROSS JOIN LATERAL (
            SELECT l.id FROM psqlmessages_element AS l
            WHERE l.id = n.id AND l.queue_id + 0 = _lock_elements.queue_id AND l.available_at <= clock_timestamp()
            FOR UPDATE SKIP LOCKED
        ) AS e
        WHERE n.lease IS NULL
    ), leased AS (
        -- Wait for locks, in the order of ids: a reader that began before the element was reserved locks it for a
        -- moment.
        SELECT e.id, n.ref
        FROM (SELECT * FROM named ORDER BY id) AS n
        CROSS JOIN LATERAL (
            SELECT l.id FROM psqlmessages_element AS l
            WHERE l.id = n.id AND l.queue_id + 0 = _lock_elements.queue_id AND l.lease = n.lease
            FOR UPDATE
        ) AS e
        WHERE n.lease IS NOT NULL
    ), locked AS (
        TABLE taken UNION ALL TABLE leased
    )
    SELECT coalesce(array_agg(h.id), '{}'), coalesce(array_agg(h.ref), '{}') INTO ids, locked_refs FROM locked AS h;
    IF cardinality(locked_refs) < cardinality(refs) THEN
        lost_refs := ARRAY(SELECT r.ref FROM unnest(refs) AS r (ref) WHERE r.ref <> ALL (locked_refs));
    ELSE
        lost_refs := '{}';
    END IF;
END
$$;

COMMENT ON FUNCTION messages._lock_elements IS
    'Lock elements that this transaction has taken, or that have a valid lease. refs: ids or leases; ids: of the locked elements; locked_refs: their refs, in the same order; lost_refs: refs of elements that another reader has taken.';


CREATE OR REPLACE FUNCTION messages._copy_error(
    client_id text,
    copy messages._copy_rows
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF messages._may_use_queue(client_id, copy.queue, 'W') IS NOT TRUE
        AND NOT (copy.queue IN ('__no_route__', '__too_many_hops__') AND copy.headers IS NULL AND copy.body IS NULL)
    THEN
        RETURN messages._queue_error(client_id, copy.queue, 'W');
    END IF;
    RETURN messages._element_error(
        copy.enc, ARRAY[messages._parse_headers(copy.headers)],
        ARRAY[messages._available_at(copy.mature, 0)], coalesce(copy.tries, 0), NULL, octet_length(copy.body)
    );
END
$$;

COMMENT ON FUNCTION messages._copy_error IS
    'The error if a copy cannot be pushed (54, 1, 15, 16, 62, 2, 3, 63, 55, 51), or null.';


CREATE OR REPLACE FUNCTION messages._push_copies(
    exchange text,
    copies messages._copy_rows[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_destinations psqlmessages_queue[];
    v_pushed record;
    v_began_at timestamp with time zone := clock_timestamp();
BEGIN
    v_destinations := ARRAY(
        SELECT messages._get_or_create_queue(d.queue)
        FROM (SELECT DISTINCT c.queue FROM unnest(copies) AS c WHERE c.queue IS NOT NULL ORDER BY 1) AS d
    );
    FOR v_pushed IN
        WITH pushed AS (
            INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, tries, enc, headers, body)
            SELECT c.queue_id, coalesce(c.mature, clock_timestamp()), coalesce(c.mature, clock_timestamp()),
                   coalesce(c.tries, 0), CASE WHEN c.body IS NULL THEN s.enc ELSE c.enc END,
                   CASE
                       WHEN c.headers IS NOT NULL THEN messages._parse_headers(c.headers)
                       ELSE s.headers
                           || CASE WHEN c.queue = '__too_many_hops__' THEN '{}'
                              ELSE jsonb_build_object('x-hop-count', messages._hop_count(s.headers) + 1) END
                           || CASE WHEN c.queue IN ('__no_route__', '__too_many_hops__')
                              THEN jsonb_build_object('x-exchange-name', exchange) ELSE '{}' END
                   END,
                   coalesce(c.body, s.body)
            FROM (
                -- Sort before the join with bodies, because sorting bodies takes longer than all other steps.
                SELECT o.*, q.id AS queue_id FROM unnest(copies) AS o JOIN unnest(v_destinations) AS q ON q.name = o.queue
                ORDER BY o.ordinal
            ) AS c
            CROSS JOIN LATERAL (
                SELECT e.enc, e.headers, e.body, e.delivered FROM psqlmessages_element AS e
                WHERE e.id = c.element_id OFFSET 0
            ) AS s
            WHERE s.delivered IS NULL OR c.mark IS NULL OR c.mark <> ALL (s.delivered)
            RETURNING queue_id, available_at
        )
        SELECT q AS queue, p.puts, p.first_at
        FROM (
            SELECT n.queue_id, count(*) AS puts, min(n.available_at) AS first_at FROM pushed AS n GROUP BY n.queue_id
        ) AS p
        JOIN unnest(v_destinations) AS q ON q.id = p.queue_id
    LOOP
        PERFORM messages._reset_scan_start(
            (v_pushed.queue).id, CASE WHEN v_pushed.first_at < v_began_at THEN '-infinity' ELSE v_pushed.first_at END
        );
        PERFORM messages._add_queue_counts((v_pushed.queue).id, puts => v_pushed.puts);
        PERFORM messages._notify_waiting_readers(v_pushed.queue);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._push_copies IS
    'Push the copies that earlier calls of deliver have not pushed, in order.';


CREATE OR REPLACE FUNCTION messages.deliver(
    client_id text,
    source text,
    elements text[],
    failed text[],
    copy_of text[],
    marks text[],
    queues text[],
    headers text[],
    bodies text[],
    encs text[],
    matures timestamp with time zone[],
    tries int[]
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
    v_exchange text := regexp_replace(client_id, '^exchange[.]', '');
    v_source psqlmessages_queue;
    v_locked record;
    v_copies messages._copy_rows[];
    v_refused json[];
    v_allowed text[];
    v_failed bigint[];
    v_ids bigint[];
    v_copy_of bigint[];
    v_destinations psqlmessages_queue[];
    v_malformed text;
    v_counts record;
BEGIN
    PERFORM messages._log_command('deliver', client_id, source);
    SELECT * INTO v_source FROM messages._authorized_queue(client_id, source, 'R');
    IF v_source.id IS NULL AND messages._may_use_queue(client_id, source, 'R') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, source, 'R');
    ELSIF cardinality(elements) > 4096 OR cardinality(copy_of) > 65536 THEN
        RETURN messages._error(58, '4096 elements or 65536 copies');
    END IF;
    -- The common case: this transaction has taken the elements, and all copies are unchanged.
    IF v_source.id IS NOT NULL AND num_nulls(failed, headers, bodies, encs, matures, tries) = 6 THEN
        v_ids := messages._parse_ids(elements);
        v_copy_of := messages._parse_ids(copy_of);
        v_destinations := messages._destination_queues(client_id, copy_of, queues);
        IF num_nulls(v_ids, v_copy_of, v_destinations) = 0 THEN
            v_ids := messages._deliver_unchanged(
                v_exchange, v_source.id, v_destinations, v_ids, v_copy_of, marks, queues
            );
            PERFORM messages._schedule_housekeeping_if_due();
            RETURN ('{"Err":"0","Lost":' || CASE WHEN cardinality(v_ids) = cardinality(elements) THEN '[]'
                ELSE to_json(ARRAY(SELECT l.ref FROM unnest(elements) AS l (ref) WHERE l.ref::bigint <> ALL (v_ids)))::text
                END || ',"Refused":[]}')::json;
        END IF;
    END IF;
    SELECT coalesce(r.ref, 'null') INTO v_malformed
    FROM (SELECT unnest(elements) AS ref UNION ALL SELECT unnest(failed)) AS r
    WHERE r.ref IS NULL
       OR r.ref !~ '^[1-9][0-9]{0,17}([.][0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?$'
    LIMIT 1;
    IF FOUND THEN
        RETURN messages._error(63, 'element', left(v_malformed, 100));
    END IF;
    v_source := messages._get_or_create_queue(source);
    SELECT * INTO v_locked FROM messages._lock_elements(v_source.id, elements);
    v_copies := ARRAY(
        SELECT ROW(c.ordinal, c.ref, h.id, c.mark, c.queue, c.headers, c.body, c.enc,
                   c.mature, c.tries)::messages._copy_rows
        FROM unnest(copy_of, marks, queues, headers, bodies, encs, matures, tries)
            WITH ORDINALITY AS c (ref, mark, queue, headers, body, enc, mature, tries, ordinal)
        JOIN unnest(v_locked.ids, v_locked.locked_refs) AS h (id, ref) ON h.ref = c.ref
    );
    -- An exchange needs no rule for these two queues, but then each element may have only one copy there.
    IF (SELECT count(*) FROM unnest(v_copies) AS c WHERE c.queue IN ('__no_route__', '__too_many_hops__'))
        > cardinality(v_locked.ids)
        AND (messages._may_use_queue(client_id, '__no_route__', 'W')
            AND messages._may_use_queue(client_id, '__too_many_hops__', 'W')) IS NOT TRUE
    THEN
        RETURN messages._error(58, 'one copy of an element to __no_route__ or __too_many_hops__');
    END IF;
    v_allowed := ARRAY(
        SELECT c.queue FROM (SELECT DISTINCT d.queue FROM unnest(v_copies) AS d OFFSET 0) AS c
        WHERE messages._may_use_queue(client_id, c.queue, 'W') OR c.queue IN ('__no_route__', '__too_many_hops__')
    );
    -- Most copies need no further check: they are unchanged and go to an allowed queue.
    v_refused := ARRAY(
        SELECT json_build_array(c.mark, c.ref, f.error ->> 'Errstr', c.ordinal)
        FROM unnest(v_copies) AS c
        CROSS JOIN LATERAL (SELECT messages._copy_error(client_id, c) AS error OFFSET 0) AS f
        WHERE c.queue IS NOT NULL AND f.error IS NOT NULL
          AND (c.headers IS NOT NULL OR c.body IS NOT NULL OR c.mature IS NOT NULL OR c.tries <> 0
              OR c.queue <> ALL (v_allowed))
    );
    IF cardinality(v_refused) > 0 THEN
        v_copies := ARRAY(
            SELECT c FROM unnest(v_copies) AS c
            WHERE c.ordinal <> ALL (ARRAY(SELECT (r.refusal ->> 3)::bigint FROM unnest(v_refused) AS r (refusal)))
        );
    END IF;
    PERFORM messages._push_copies(v_exchange, v_copies);
    v_failed := ARRAY(
        SELECT DISTINCT split_part(f.ref, '.', 1)::bigint AS id
        FROM (
            SELECT unnest(failed) AS ref UNION ALL SELECT r.refusal ->> 1 FROM unnest(v_refused) AS r (refusal)
        ) AS f
        WHERE split_part(f.ref, '.', 1)::bigint = ANY (v_locked.ids) ORDER BY 1
    );
    IF v_failed <> '{}' THEN
        UPDATE psqlmessages_element AS e
        SET delivered = coalesce(e.delivered, '{}') || m.marks
        FROM (
            SELECT c.element_id, array_agg(c.mark) AS marks FROM unnest(v_copies) AS c
            WHERE c.element_id = ANY (v_failed) AND c.mark IS NOT NULL GROUP BY c.element_id
        ) AS m
        WHERE e.id = m.element_id;
        PERFORM messages._roll_back_elements(v_failed, NULL);
    END IF;
    WITH finished AS (
        DELETE FROM psqlmessages_element AS e
        WHERE e.id = ANY (ARRAY(SELECT i.id FROM unnest(v_locked.ids) AS i (id) WHERE i.id <> ALL (v_failed)))
        RETURNING e.lease
    )
    SELECT count(*) FILTER (WHERE f.lease IS NULL) AS gets, count(f.lease) AS commits INTO v_counts FROM finished AS f;
    IF v_counts.gets + v_counts.commits > 0 THEN
        PERFORM messages._add_queue_counts(v_source.id, gets => v_counts.gets, commits => v_counts.commits);
    END IF;
    PERFORM messages._schedule_housekeeping_if_due();
    RETURN ('{"Err":"0","Lost":' || to_json(v_locked.lost_refs) || ',"Refused":' || to_json(v_refused) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.deliver IS
    'Deliver elements of take or reserve: push their copies, remove the elements, and give back the failed ones. elements: ids from take, or leases; failed: those to give back; copy_of and the arguments after it: one entry for each copy. copy_of: its element; queues: its destination, null if it is in another database; headers, bodies, encs, matures, tries: null for the value of the element. Lost: elements that another reader has taken; Refused: copies that could not be pushed, as [mark, element, error, index of the copy]. Errors: 54, 1, 15, 16, 62, 2, 3, 58, 63.';


CREATE OR REPLACE FUNCTION messages._parse_ids(
    refs text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    v_joined text := array_to_string(refs, ',', 'null');
    v_ids bigint[];
BEGIN
    -- One regular expression for all: one for each takes ten times as long.
    IF v_joined ~ '^[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*$' THEN
        v_ids := string_to_array(v_joined, ',')::bigint[];
        IF cardinality(v_ids) = cardinality(refs) THEN
            RETURN v_ids;
        END IF;
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._parse_ids IS
    'Convert refs of elements to ids; null if there are none, or if one is not an id, for example a lease.';


CREATE OR REPLACE FUNCTION messages._destination_queues(
    client_id text,
    copy_of text[],
    queues text[]
)
RETURNS psqlmessages_queue[]
LANGUAGE plpgsql
AS $$
DECLARE
    v_names text[] := ARRAY(
        SELECT DISTINCT u.queue FROM unnest(queues) AS u (queue) WHERE u.queue IS NOT NULL ORDER BY u.queue
    );
    v_destinations psqlmessages_queue[];
BEGIN
    v_destinations := ARRAY(
        SELECT q FROM unnest(v_names) AS n (name)
        CROSS JOIN LATERAL (
            SELECT u AS q FROM messages._authorized_queue(client_id, n.name, 'W') AS u WHERE NOT u.is_removed
            UNION ALL
            SELECT a FROM psqlmessages_queue AS a
            WHERE a.name = n.name AND NOT a.is_removed AND n.name IN ('__no_route__', '__too_many_hops__')
            LIMIT 1
        ) AS f
    );
    -- An exchange needs no rule for these two queues, but then each element may have only one copy there.
    IF cardinality(v_destinations) < cardinality(v_names)
        OR v_names && '{__no_route__,__too_many_hops__}' AND EXISTS (
            SELECT FROM unnest(copy_of, queues) AS c (ref, queue)
            WHERE c.queue IN ('__no_route__', '__too_many_hops__')
            GROUP BY c.ref HAVING count(*) > 1
        )
    THEN
        RETURN NULL;
    END IF;
    RETURN v_destinations;
END
$$;

COMMENT ON FUNCTION messages._destination_queues IS
    'The queues in the argument queues of deliver, each once; null if one does not exist, or if the permission needs a further check.';


CREATE OR REPLACE FUNCTION messages._deliver_unchanged(
    exchange text,
    source bigint,
    destinations psqlmessages_queue[],
    elements bigint[],
    copy_of bigint[],
    marks text[],
    queues text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
-- The plan must find elements by id and join copies by hash, even if the statistics say that the table is empty.
SET enable_seqscan = off
SET jit = off
SET enable_sort = off
SET enable_bitmapscan = off
SET enable_nestloop = off
AS $$
DECLARE
    v_moved record;
    v_destination psqlmessages_queue;
BEGIN
    WITH deleted AS (
        DELETE FROM psqlmessages_element AS e
        WHERE e.ctid = ANY (ARRAY(
            SELECT l.ctid FROM psqlmessages_element AS l
            WHERE l.id = ANY (elements) AND l.queue_id + 0 = source AND l.available_at <= clock_timestamp()
            ORDER BY l.id
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING e.id, e.lease, e.delivered, e.enc, e.body, e.headers,
                  jsonb_set(e.headers, '{x-hop-count}', to_jsonb(messages._hop_count(e.headers) + 1)) AS headers_with_hop
    ), pushed AS (
        INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, tries, enc, headers, body)
        SELECT q.id, clock_timestamp(), clock_timestamp(), 0, d.enc,
               CASE c.queue
                   WHEN '__no_route__' THEN d.headers_with_hop || jsonb_build_object('x-exchange-name', exchange)
                   WHEN '__too_many_hops__' THEN d.headers || jsonb_build_object('x-exchange-name', exchange)
                   ELSE d.headers_with_hop
               END,
               d.body
        FROM unnest(copy_of, marks, queues) WITH ORDINALITY AS c (id, mark, queue, ordinal)
        JOIN unnest(destinations) AS q ON q.name = c.queue
        JOIN deleted AS d ON d.id = c.id
        WHERE d.delivered IS NULL OR c.mark IS NULL OR c.mark <> ALL (d.delivered)
        ORDER BY c.ordinal
        RETURNING queue_id, available_at
    )
    SELECT ARRAY(SELECT d.id FROM deleted AS d) AS ids, (SELECT count(d.lease) FROM deleted AS d) AS leased,
           ARRAY(SELECT p.queue_id FROM pushed AS p) AS pushed, (SELECT min(p.available_at) FROM pushed AS p) AS first_at
    INTO v_moved;
    FOREACH v_destination IN ARRAY destinations LOOP
        IF v_destination.id = ANY (v_moved.pushed) THEN
            PERFORM messages._reset_scan_start(v_destination.id, v_moved.first_at);
            PERFORM messages._add_queue_counts(
                v_destination.id, puts => cardinality(array_positions(v_moved.pushed, v_destination.id))
            );
            PERFORM messages._notify_waiting_readers(v_destination);
        END IF;
    END LOOP;
    IF v_moved.ids <> '{}' THEN
        PERFORM messages._add_queue_counts(
            source, gets => cardinality(v_moved.ids) - v_moved.leased, commits => v_moved.leased
        );
    END IF;
    RETURN v_moved.ids;
END
$$;

COMMENT ON FUNCTION messages._deliver_unchanged IS
    'Deliver unchanged copies: remove the elements, and push the copies that earlier calls of deliver have not pushed, in order. destinations: the queues named in queues; copy_of, marks, queues: as in deliver. Returns the ids of the removed elements; other readers have taken or locked the missing ones.';
