-- Staging: several connections copy many bodies into a table, and one transaction publishes or pushes them all.
-- Staged rows belong to a batch of a query, for example of Spark; a batch that is repeated changes nothing.

-- Not UNLOGGED, because a crash or failover would empty the table while queries run. Each row has arrays of bodies:
-- storing one row for each body would take half of the total time.
CREATE TABLE IF NOT EXISTS messages.staged (
    staging uuid NOT NULL,
    place bigint NOT NULL,
    bodies text[] NOT NULL,
    encs text[],
    headers text[],
    keys text[],
    role text COLLATE "C" NOT NULL DEFAULT session_user,
    staged_at timestamp with time zone NOT NULL DEFAULT statement_timestamp(),
    CONSTRAINT staged_encs_are_known CHECK (array_remove(encs, NULL) <@ ARRAY['b64', 'json']),
    CONSTRAINT staged_arrays_are_of_one_length CHECK (
        cardinality(bodies) = cardinality(coalesce(encs, bodies))
        AND cardinality(bodies) = cardinality(coalesce(headers, bodies))
        AND cardinality(bodies) = cardinality(coalesce(keys, bodies))
    )
) WITH (toast_tuple_target = 8160);
ALTER TABLE messages.staged ALTER COLUMN bodies SET STORAGE EXTERNAL;
CREATE INDEX IF NOT EXISTS staged_by_place ON messages.staged (staging, place);
CREATE INDEX IF NOT EXISTS staged_by_age ON messages.staged USING brin (staged_at);

COMMENT ON TABLE messages.staged IS
    'Bodies for publish_staged or push_staged. All roles may copy into (staging, place, bodies, encs, headers, keys); no role may read. staging: a uuid that the writer has chosen; place: the order of the rows; bodies: some bodies; the other arrays: one value for each body, or null. Rows are removed after a day.';

-- The last committed batch of each query, to recognize repeated batches.
CREATE TABLE IF NOT EXISTS messages._batch (
    role text COLLATE "C" NOT NULL,
    query text COLLATE "C" NOT NULL,
    batch bigint NOT NULL,
    committed_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (role, query)
);
CREATE INDEX IF NOT EXISTS batch_by_age ON messages._batch (committed_at);


CREATE OR REPLACE FUNCTION messages._begin_batch(
    query text,
    batch bigint,
    stagings uuid[],
    row_count bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_last_batch bigint;
    v_rows bigint;
    v_largest bigint;
BEGIN
    IF length(query) NOT BETWEEN 1 AND 200 THEN
        RETURN messages._error(54);
    ELSIF batch IS NULL OR batch < 0 THEN
        RETURN messages._error(63, 'batch', coalesce(batch::text, 'null'));
    END IF;
    LOOP
        SELECT b.batch INTO v_last_batch FROM messages._batch AS b
        WHERE b.role = session_user AND b.query = _begin_batch.query FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO messages._batch (role, query, batch) VALUES (session_user, query, -1) ON CONFLICT DO NOTHING;
    END LOOP;
    IF batch < v_last_batch THEN
        RETURN messages._error(65, batch::text, left(query, 100), v_last_batch::text);
    ELSIF batch = v_last_batch THEN
        PERFORM messages._record_batch(query, batch, stagings);
        RETURN '{"Err":"0","Already":1}';
    END IF;
    SELECT count(*), max(octet_length(b.body)) INTO v_rows, v_largest
    FROM (
        SELECT unnest(s.bodies) AS body FROM messages.staged AS s
        WHERE s.staging = ANY (stagings) AND s.role = session_user
    ) AS b;
    IF v_rows IS DISTINCT FROM row_count THEN
        RETURN messages._error(64, v_rows::text, coalesce(row_count::text, 'null'));
    END IF;
    RETURN messages._content_error(NULL, NULL, v_largest);
END
$$;

COMMENT ON FUNCTION messages._begin_batch IS
    'Lock the query, which waits for a transaction that commits a batch of it, and check the batch. Returns null for a new batch; the answer for a batch that was committed before, whose staged rows it removes; or the error: of the arguments (54, 63), 65 if a later batch was committed, 64 if the number of staged bodies is not row_count, 51 if one of them is too large.';


CREATE OR REPLACE FUNCTION messages._unstage(
    stagings uuid[]
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_rows bigint;
BEGIN
    WITH deleted AS (
        DELETE FROM messages.staged AS s WHERE s.staging = ANY (stagings) AND s.role = session_user
        RETURNING cardinality(s.bodies) AS rows
    )
    SELECT coalesce(sum(d.rows), 0) INTO v_rows FROM deleted AS d;
    RETURN v_rows;
END
$$;

COMMENT ON FUNCTION messages._unstage IS
    'Remove staged rows of this role. Returns the number of their bodies.';


CREATE OR REPLACE FUNCTION messages._record_batch(
    query text,
    batch bigint,
    stagings uuid[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE messages._batch AS b SET batch = _record_batch.batch, committed_at = clock_timestamp()
    WHERE b.role = session_user AND b.query = _record_batch.query AND b.batch < _record_batch.batch;
    PERFORM messages._unstage(stagings);
    PERFORM messages._schedule_housekeeping_if_due();
END
$$;

COMMENT ON FUNCTION messages._record_batch IS
    'Store that a batch is committed, and remove its staged rows.';


CREATE OR REPLACE FUNCTION messages._delete_expired_staged_rows()
RETURNS void
LANGUAGE sql
SET enable_seqscan = off
SET jit = off
AS $$
    DELETE FROM messages.staged AS s
    WHERE s.ctid = ANY (ARRAY(
        SELECT o.ctid FROM messages.staged AS o
        WHERE o.staged_at < (SELECT clock_timestamp() - interval '1 day') LIMIT 500 FOR UPDATE SKIP LOCKED
    ));
    -- A name that starts with once/ is used for one write only.
    DELETE FROM messages._batch AS b
    WHERE b.ctid = ANY (ARRAY(
        SELECT o.ctid FROM messages._batch AS o
        WHERE o.committed_at < (SELECT clock_timestamp() - interval '1 year')
           OR o.committed_at BETWEEN (SELECT clock_timestamp() - interval '1 year')
                             AND (SELECT clock_timestamp() - interval '1 day') AND starts_with(o.query, 'once/')
        ORDER BY o.committed_at LIMIT 5000 FOR UPDATE SKIP LOCKED
    ))
$$;

COMMENT ON FUNCTION messages._delete_expired_staged_rows IS
    'Remove some rows that were staged more than a day ago, and some queries without a batch for a year (a day if the name starts with once/). Skips locked rows.';


CREATE OR REPLACE FUNCTION messages._has_expired_staged_rows()
RETURNS boolean
LANGUAGE sql
SET enable_seqscan = off
SET jit = off
AS $$
    SELECT EXISTS (
        SELECT FROM messages.staged AS s WHERE s.staged_at < (SELECT clock_timestamp() - interval '1 day')
    ) OR EXISTS (
        SELECT FROM messages._batch AS b
        WHERE b.committed_at < (SELECT clock_timestamp() - interval '1 year')
           OR b.committed_at BETWEEN (SELECT clock_timestamp() - interval '1 year')
                             AND (SELECT clock_timestamp() - interval '1 day') AND starts_with(b.query, 'once/')
    )
$$;

COMMENT ON FUNCTION messages._has_expired_staged_rows IS
    'Whether _delete_expired_staged_rows would remove anything.';


CREATE OR REPLACE FUNCTION messages._deduplicate(
    stagings uuid[]
)
RETURNS uuid[]
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT ARRAY(
        SELECT u.staging FROM unnest(stagings) WITH ORDINALITY AS u (staging, ordinal)
        GROUP BY u.staging ORDER BY min(u.ordinal)
    )
$$;

COMMENT ON FUNCTION messages._deduplicate IS
    'The same array without repeated elements.';


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
-- Read in index order, because sorting would move all bodies.
SET enable_seqscan = off
SET enable_sort = off
SET jit = off
AS $$
DECLARE
    v_error json := messages._publish_error(client_id, topic);
    v_topic record;
    v_stagings uuid[];
    v_rows bigint;
BEGIN
    PERFORM messages._log_command('publish_staged', client_id, topic, query, batch::text);
    IF v_error IS NOT NULL OR query IS NULL THEN
        RETURN coalesce(v_error, '{"Err":"0","Rows":0}');
    END IF;
    v_stagings := messages._deduplicate(stagings);
    v_error := messages._begin_batch(query, batch, v_stagings, row_count);
    IF v_error IS NULL AND NOT messages._ensure_topic(client_id, topic) THEN
        -- The last rule was removed at this moment.
        v_error := messages._error(2, 'Topic', topic);
    END IF;
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    END IF;
    SELECT * INTO v_topic FROM messages._publish_target(topic);
    -- Take the locks before drawing ids.
    PERFORM messages._begin_publishing(v_topic.id, v_topic.last_id, v_topic.secret);
    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)
    SELECT v_topic.id, nextval('messages._stream_id'), v_topic.slot, client_id, clock_timestamp(), b.enc,
           coalesce(b.body, '')
    FROM (
        -- unnest in the list of columns, because PostgreSQL materializes functions in FROM.
        SELECT unnest(s.bodies) AS body, unnest(s.encs) AS enc
        FROM unnest(v_stagings) AS u (staging)
        CROSS JOIN LATERAL (
            SELECT r.bodies, r.encs FROM messages.staged AS r
            WHERE r.staging = u.staging AND r.role = session_user ORDER BY r.place
        ) AS s
    ) AS b;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    IF v_rows <> row_count THEN
        -- Staged rows were removed or added since _begin_batch.
        PERFORM messages._raise(messages._error(64, v_rows::text, row_count::text));
    END IF;
    PERFORM messages._notify_subscribers(topic, v_topic.subscriber_channels);
    -- A rule may have been removed while this call waited for another connection.
    PERFORM messages._raise(messages._publish_error(client_id, topic));
    PERFORM messages._record_batch(query, batch, v_stagings);
    RETURN (
        '{"Err":"0","Id":' || CASE WHEN v_rows > 0 THEN currval('messages._stream_id')::text ELSE 'null' END
        || ',"Rows":' || row_count || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.publish_staged IS
    'Publish the bodies of stagings in messages.staged as one batch of a query, exactly once. Subscribers are notified once; listeners get nothing. row_count: the expected number of bodies. Id: of the last message; Rows: number of messages; Already: 1 if this batch was committed before. If query is null, only check the rules. Errors: 54, 1, 15, 16, 9, 2, 3, 63, 65, 64, 51.';


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
    'The staged bodies of this role, in order, one in each row.';


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
-- Read in index order, because sorting would move all bodies.
SET enable_seqscan = off
SET enable_sort = off
SET jit = off
AS $$
DECLARE
    v_now timestamp with time zone;
    v_error json;
    v_queue psqlmessages_queue;
    v_stagings uuid[];
    v_staged bigint;
    v_rows bigint;
BEGIN
    PERFORM messages._log_command('push_staged', client_id, queue, query, batch::text);
    IF messages._may_use_queue(client_id, queue, 'W') IS NOT TRUE THEN
        RETURN messages._queue_error(client_id, queue, 'W');
    ELSIF query IS NULL THEN
        RETURN '{"Err":"0","Rows":0}';
    END IF;
    v_stagings := messages._deduplicate(stagings);
    v_error := messages._begin_batch(query, batch, v_stagings, row_count);
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    ELSIF EXISTS (
        SELECT FROM messages._staged_rows(v_stagings) AS s
        WHERE s.headers <> '' AND messages._parse_headers(s.headers) IS NULL
    ) THEN
        RETURN messages._error(63, 'headers', 'a JSON object of at most 64 KiB is needed');
    ELSIF EXISTS (SELECT FROM messages._staged_rows(v_stagings) AS s WHERE length(s.key) > 200) THEN
        RETURN messages._error(54);
    END IF;
    v_queue := messages._get_or_create_queue(queue);
    -- Lock before reading the time: _advance_scan_start must see this writer.
    LOCK TABLE psqlmessages_element IN ROW EXCLUSIVE MODE;
    v_now := clock_timestamp();
    IF EXISTS (SELECT FROM messages.staged AS s WHERE s.staging = ANY (v_stagings) AND s.keys IS NOT NULL) THEN
        WITH staged AS MATERIALIZED (
            SELECT s.*, row_number() OVER () AS ordinal, nextval('psqlmessages_element_id_seq') AS id
            FROM messages._staged_rows(v_stagings) AS s
        ), claimed AS MATERIALIZED (
            -- In the order of keys, so that two pushes cannot deadlock. The first body with a key is stored.
            SELECT k.ordinal, messages._claim_key(v_queue, k.key, k.id) AS id
            FROM (SELECT s.ordinal, s.key, s.id FROM staged AS s WHERE s.key <> '' ORDER BY s.key, s.ordinal) AS k
        ), pushed AS (
            INSERT INTO psqlmessages_element (id, queue_id, mature_at, available_at, enc, headers, body)
            SELECT s.id, v_queue.id, v_now, v_now, s.enc,
                   CASE WHEN s.headers <> '' THEN messages._parse_headers(s.headers) ELSE '{}' END, s.body
            FROM staged AS s LEFT JOIN claimed AS c ON c.ordinal = s.ordinal
            WHERE c.id > 0 OR c.id IS NULL ORDER BY s.ordinal
            RETURNING 1
        )
        SELECT (SELECT count(*) FROM staged), (SELECT count(*) FROM pushed) INTO v_staged, v_rows;
    ELSE
        INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, enc, headers, body)
        SELECT v_queue.id, v_now, v_now, s.enc,
               CASE WHEN s.headers <> '' THEN messages._parse_headers(s.headers) ELSE '{}' END, s.body
        FROM messages._staged_rows(v_stagings) AS s;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        v_staged := v_rows;
    END IF;
    IF v_staged <> row_count THEN
        -- Staged rows were removed or added since _begin_batch.
        PERFORM messages._raise(messages._error(64, v_staged::text, row_count::text));
    END IF;
    IF v_rows > 0 THEN
        PERFORM messages._reset_scan_start(v_queue.id, v_now);
        PERFORM messages._add_queue_counts(v_queue.id, puts => v_rows);
        PERFORM messages._notify_waiting_readers(v_queue);
    END IF;
    -- A rule may have been removed while this call waited for another connection.
    IF messages._may_use_queue(client_id, queue, 'W') IS NOT TRUE THEN
        PERFORM messages._raise(messages._queue_error(client_id, queue, 'W'));
    END IF;
    PERFORM messages._record_batch(query, batch, v_stagings);
    RETURN ('{"Err":"0","Rows":' || v_rows || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.push_staged IS
    'Push the bodies of stagings in messages.staged as one batch of a query, exactly once. row_count: the expected number of bodies. Rows: number of new elements, without keys that were pushed before; Already: 1 if this batch was committed before. If query is null, only check the rules. Errors: 54, 1, 15, 16, 62, 2, 3, 63, 65, 64, 51.';


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
    'Remove rows that this role has copied into messages.staged, instead of publishing or pushing them. Rows: the number of their bodies. Errors: 63.';
