-- What was staged is published, or pushed, as one batch of a query; a batch that comes again changes nothing.

CREATE OR REPLACE FUNCTION messages._see_rows(
    rows bigint,
    row_count bigint
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF rows <> row_count THEN
        PERFORM messages._raise(messages._error(64, rows::text, row_count::text));
    END IF;
END
$$;

COMMENT ON FUNCTION messages._see_rows IS
    'Raise error 64 where staged rows were removed, or added, since they were counted.';


CREATE OR REPLACE FUNCTION messages._store_staged(
    topic_id bigint,
    slot smallint,
    last_id bigint,
    secret bytea,
    sender text,
    stagings uuid[],
    row_count bigint
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_rows bigint;
    -- Ids are drawn with these locks held.
    v_is_begun boolean := messages._begin_publishing(topic_id, last_id, secret);
BEGIN
    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)
    SELECT topic_id, nextval('messages._stream_id'), slot, sender, clock_timestamp(), b.enc, coalesce(b.body, '')
    FROM (
        -- Not in FROM: there each array would be written out before its first body is taken.
        SELECT unnest(s.bodies) AS body, unnest(s.encs) AS enc
        FROM unnest(stagings) AS u (staging)
        CROSS JOIN LATERAL (
            SELECT r.bodies, r.encs FROM messages.staged AS r
            WHERE r.staging = u.staging AND r.role = session_user ORDER BY r.place
        ) AS s
    ) AS b;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    PERFORM messages._see_rows(v_rows, row_count);
    RETURN CASE WHEN v_rows > 0 THEN currval('messages._stream_id') END;
END
$$;

COMMENT ON FUNCTION messages._store_staged IS
    'Keep staged rows as messages of a topic, in their order; answers the last id. Raises error 64 where others are there than were counted.';


CREATE OR REPLACE FUNCTION messages._distinct(
    stagings uuid[]
)
RETURNS uuid[]
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT ARRAY(
        SELECT u.staging FROM unnest(stagings) WITH ORDINALITY AS u (staging, place)
        GROUP BY u.staging ORDER BY min(u.place)
    )
$$;

COMMENT ON FUNCTION messages._distinct IS
    'Each of them once, in the order of their first places.';


CREATE OR REPLACE FUNCTION messages.publish_staged(
    client_id text,
    topic text,
    query text,
    batch bigint,
    stagings uuid[],
    row_count bigint
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- In the order of the index: sorting would move all bodies.
SET enable_seqscan = off
SET enable_sort = off
SET jit = off
AS $$
DECLARE
    v_fault json := messages._publishing_fault(client_id, topic);
    v_topic record;
    v_stagings uuid[];
    v_id bigint;
BEGIN
    PERFORM messages._log_command('publish_staged', client_id, topic, query, batch::text);
    IF v_fault IS NOT NULL OR query IS NULL THEN
        RETURN coalesce(v_fault, '{"Err":"0","Rows":0}');
    END IF;
    v_stagings := messages._distinct(stagings);
    v_fault := coalesce(
        messages._staged_fault(query, batch), messages._batch_answer(query, batch, v_stagings),
        messages._rows_fault(v_stagings, row_count)
    );
    IF v_fault IS NULL AND NOT messages._hold_topic(client_id, topic) THEN
        -- The last rule for it went away this moment.
        v_fault := messages._error(2, 'Topic', topic);
    END IF;
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    SELECT * INTO v_topic FROM messages._stream_of(topic);
    v_id := messages._store_staged(v_topic.id, v_topic.slot, v_topic.last_id, v_topic.secret, client_id, v_stagings, row_count);
    PERFORM messages._wake(topic, messages._allowed_wakes(topic, v_topic.wakes));
    -- It may have waited for another connection, and the right be gone.
    v_fault := messages._publishing_fault(client_id, topic);
    IF v_fault IS NOT NULL THEN
        PERFORM messages._raise(v_fault);
    END IF;
    PERFORM messages._end_batch(query, batch, v_stagings);
    RETURN ('{"Err":"0","Id":' || coalesce(v_id::text, 'null') || ',"Rows":' || row_count || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.publish_staged IS
    'Publish what was copied into messages.staged as one batch of a query: all of it at this transaction''s commit, once; subscribers are woken once, live listeners get nothing. Already: 1 where this batch was committed before. With query null it only says whether the rules allow it. Errors: 54, 1, 15, 16, 9, 2, 3, 63, 65, 64, 51.';


CREATE OR REPLACE FUNCTION messages._staged_rows(
    stagings uuid[]
)
RETURNS TABLE (
    body text,
    enc text,
    headers text,
    key text
)
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce(b.body, ''), b.enc, b.headers, b.key
    FROM unnest(stagings) AS u (staging)
    CROSS JOIN LATERAL (
        SELECT r.bodies, r.encs, r.headers, r.keys FROM messages.staged AS r
        WHERE r.staging = u.staging AND r.role = session_user ORDER BY r.place
    ) AS s
    CROSS JOIN LATERAL unnest(s.bodies, s.encs, s.headers, s.keys) AS b (body, enc, headers, key)
$$;

COMMENT ON FUNCTION messages._staged_rows IS
    'What this role has staged, row by row, in order.';


CREATE OR REPLACE FUNCTION messages._push_staged(
    queue psqlmessages_queue,
    stagings uuid[],
    row_count bigint
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_rows bigint;
BEGIN
    INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, enc, headers, body)
    SELECT queue.id, statement_timestamp(), statement_timestamp(), s.enc,
           CASE WHEN s.headers <> '' THEN messages._parsed_headers(s.headers) ELSE '{}' END, s.body
    FROM messages._staged_rows(stagings) AS s;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    PERFORM messages._see_rows(v_rows, row_count);
    RETURN v_rows;
END
$$;

COMMENT ON FUNCTION messages._push_staged IS
    'Put staged rows into a queue, in their order; answers how many. Raises error 64 where others are there than were counted.';


CREATE OR REPLACE FUNCTION messages._push_staged_keyed(
    queue psqlmessages_queue,
    stagings uuid[],
    row_count bigint
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_staged bigint;
    v_rows bigint;
BEGIN
    WITH staged AS MATERIALIZED (
        SELECT s.*, row_number() OVER () AS place, nextval('psqlmessages_element_id_seq') AS id
        FROM messages._staged_rows(stagings) AS s
    ), claimed AS MATERIALIZED (
        -- In order of the keys, so that no two pushes wait for each other. The first of those that are equal stays.
        SELECT k.place, messages._claim_key(queue, k.key, k.id) AS id
        FROM (SELECT s.place, s.key, s.id FROM staged AS s WHERE s.key <> '' ORDER BY s.key, s.place) AS k
    ), pushed AS (
        INSERT INTO psqlmessages_element (id, queue_id, mature_at, available_at, enc, headers, body)
        SELECT s.id, queue.id, statement_timestamp(), statement_timestamp(), s.enc,
               CASE WHEN s.headers <> '' THEN messages._parsed_headers(s.headers) ELSE '{}' END, s.body
        FROM staged AS s LEFT JOIN claimed AS c ON c.place = s.place
        WHERE c.id > 0 OR c.id IS NULL ORDER BY s.place
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM staged), (SELECT count(*) FROM pushed) INTO v_staged, v_rows;
    PERFORM messages._see_rows(v_staged, row_count);
    RETURN v_rows;
END
$$;

COMMENT ON FUNCTION messages._push_staged_keyed IS
    'Put staged rows into a queue but those whose keys were pushed already; answers how many. Raises error 64 as _push_staged does.';


CREATE OR REPLACE FUNCTION messages._elements_fault(
    stagings uuid[]
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF EXISTS (
        SELECT FROM messages._staged_rows(stagings) AS s
        WHERE s.headers <> '' AND messages._parsed_headers(s.headers) IS NULL
    ) THEN
        RETURN messages._error(63, 'headers', 'a JSON object of at most 64 KiB is needed');
    ELSIF EXISTS (SELECT FROM messages._staged_rows(stagings) AS s WHERE length(s.key) > 200) THEN
        RETURN messages._error(54);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._elements_fault IS
    'Why staged rows cannot be elements: error 63 for headers, 54 for keys; or null.';


CREATE OR REPLACE FUNCTION messages.push_staged(
    client_id text,
    queue text,
    query text,
    batch bigint,
    stagings uuid[],
    row_count bigint
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- In the order of the index: sorting would move all bodies.
SET enable_seqscan = off
SET enable_sort = off
SET jit = off
AS $$
DECLARE
    v_fault json;
    v_queue psqlmessages_queue;
    v_stagings uuid[];
    v_rows bigint;
BEGIN
    PERFORM messages._log_command('push_staged', client_id, queue, query, batch::text);
    IF messages._may_use(client_id, queue, 'W') IS NOT TRUE THEN
        RETURN messages._refusal(client_id, queue, 'W');
    ELSIF query IS NULL THEN
        RETURN '{"Err":"0","Rows":0}';
    END IF;
    v_stagings := messages._distinct(stagings);
    v_fault := coalesce(
        messages._staged_fault(query, batch), messages._batch_answer(query, batch, v_stagings),
        messages._rows_fault(v_stagings, row_count), messages._elements_fault(v_stagings)
    );
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    v_queue := messages._queue(queue);
    IF EXISTS (SELECT FROM messages.staged AS s WHERE s.staging = ANY (v_stagings) AND s.keys IS NOT NULL) THEN
        v_rows := messages._push_staged_keyed(v_queue, v_stagings, row_count);
    ELSE
        v_rows := messages._push_staged(v_queue, v_stagings, row_count);
    END IF;
    IF v_rows > 0 THEN
        PERFORM messages._count(v_queue.id, puts => v_rows);
        PERFORM messages._wake_readers(v_queue);
    END IF;
    -- It may have waited for another connection, and the right be gone.
    IF messages._may_use(client_id, queue, 'W') IS NOT TRUE THEN
        PERFORM messages._raise(messages._refusal(client_id, queue, 'W'));
    END IF;
    PERFORM messages._end_batch(query, batch, v_stagings);
    RETURN ('{"Err":"0","Rows":' || v_rows || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.push_staged IS
    'Push what was copied into messages.staged as one batch of a query: all of it at this transaction''s commit, once. Rows: without those whose keys were pushed already. Already: 1 where this batch was committed before. With query null it only says whether the rules allow it. Errors: 54, 1, 15, 16, 62, 2, 3, 63, 65, 64, 51.';


CREATE OR REPLACE FUNCTION messages.unstage(
    VARIADIC stagings text[]
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_malformed text;
BEGIN
    PERFORM messages._log_command('unstage');
    SELECT coalesce(u.staging, 'null') INTO v_malformed FROM unnest(stagings) AS u (staging)
    WHERE u.staging IS NULL OR u.staging !~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$' LIMIT 1;
    IF FOUND THEN
        RETURN messages._error(63, 'staging', left(v_malformed, 100));
    END IF;
    RETURN ('{"Err":"0","Rows":' || messages._unstage(stagings::uuid[]) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.unstage IS
    'Remove rows that this role has copied into messages.staged and that will not be committed. Errors: 63.';
