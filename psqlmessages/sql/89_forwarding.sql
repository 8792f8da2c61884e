-- Forwarding: elements whose copies are all as they are themselves move on in one statement.

CREATE OR REPLACE FUNCTION messages._plain_ids(
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
    -- One look at all of them: one for each takes ten times as long.
    IF v_joined ~ '^[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*$' THEN
        v_ids := string_to_array(v_joined, ',')::bigint[];
        IF cardinality(v_ids) = cardinality(refs) THEN
            RETURN v_ids;
        END IF;
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._plain_ids IS
    'The ids of elements; null where there is none, or one of these is something else, as a lease.';


CREATE OR REPLACE FUNCTION messages._forward_queues(
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
    v_queues psqlmessages_queue[];
BEGIN
    v_queues := ARRAY(
        SELECT q FROM unnest(v_names) AS n (name)
        CROSS JOIN LATERAL (
            SELECT u AS q FROM messages._used_queue(client_id, n.name, 'W') AS u
            UNION ALL
            SELECT a FROM psqlmessages_queue AS a
            WHERE a.name = n.name AND n.name IN ('__no_route__', '__too_many_hops__')
            LIMIT 1
        ) AS f
    );
    -- What is put aside needs no rule, but only once for each element.
    IF cardinality(v_queues) < cardinality(v_names)
        OR v_names && '{__no_route__,__too_many_hops__}' AND EXISTS (
            SELECT FROM unnest(copy_of, queues) AS c (ref, queue)
            WHERE c.queue IN ('__no_route__', '__too_many_hops__')
            GROUP BY c.ref HAVING count(*) > 1
        )
    THEN
        RETURN NULL;
    END IF;
    RETURN v_queues;
END
$$;

COMMENT ON FUNCTION messages._forward_queues IS
    'The queues that copies go to; null where one is not there, or may not be pushed to, or might not.';


CREATE OR REPLACE FUNCTION messages._forward(
    exchange text,
    source bigint,
    targets psqlmessages_queue[],
    elements bigint[],
    copy_of bigint[],
    marks text[],
    queues text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
-- Elements are found by their ids, and by copies by hash, whatever is known of the table: it may have been empty a
-- moment ago.
SET enable_seqscan = off
SET jit = off
SET enable_sort = off
SET enable_bitmapscan = off
SET enable_nestloop = off
AS $$
DECLARE
    v_moved record;
    v_target psqlmessages_queue;
BEGIN
    WITH gone AS (
        DELETE FROM psqlmessages_element AS e
        WHERE e.ctid = ANY (ARRAY(
            SELECT l.ctid FROM psqlmessages_element AS l
            WHERE l.id = ANY (elements) AND l.queue_id = source AND l.available_at <= clock_timestamp()
            ORDER BY l.id
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING e.id, e.lease, e.delivered, e.enc, e.body, e.headers,
                  jsonb_set(e.headers, '{x-hop-count}', to_jsonb(messages._hops(e.headers) + 1)) AS hopped
    ), pushed AS (
        INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, tries, enc, headers, body)
        SELECT t.id, clock_timestamp(), clock_timestamp(), 0, g.enc,
               CASE c.queue
                   WHEN '__no_route__' THEN g.hopped || jsonb_build_object('x-exchange-name', exchange)
                   WHEN '__too_many_hops__' THEN g.headers || jsonb_build_object('x-exchange-name', exchange)
                   ELSE g.hopped
               END,
               g.body
        FROM unnest(copy_of, marks, queues) WITH ORDINALITY AS c (id, mark, queue, place)
        JOIN unnest(targets) AS t ON t.name = c.queue
        JOIN gone AS g ON g.id = c.id
        WHERE g.delivered IS NULL OR c.mark IS NULL OR c.mark <> ALL (g.delivered)
        ORDER BY c.place
        RETURNING queue_id
    )
    SELECT ARRAY(SELECT g.id FROM gone AS g) AS ids, (SELECT count(g.lease) FROM gone AS g) AS leased,
           ARRAY(SELECT p.queue_id FROM pushed AS p) AS pushed
    INTO v_moved;
    FOREACH v_target IN ARRAY targets LOOP
        IF v_target.id = ANY (v_moved.pushed) THEN
            PERFORM messages._count(v_target.id, puts => cardinality(array_positions(v_moved.pushed, v_target.id)));
            PERFORM messages._wake_readers(v_target);
        END IF;
    END LOOP;
    IF v_moved.ids <> '{}' THEN
        PERFORM messages._count(
            source, gets => cardinality(v_moved.ids) - v_moved.leased, commits => v_moved.leased
        );
    END IF;
    RETURN v_moved.ids;
END
$$;

COMMENT ON FUNCTION messages._forward IS
    'Push the copies that have not been made before, in their order, and remove the elements: those that could be.';
