-- Staging: many rows are copied in by several connections, and become messages or elements in one transaction.

-- Logged: a crash, or the standby that takes over, would empty an UNLOGGED table under queries that run.
-- Arrays of bodies: a row of its own for each would take half of the time that all of it takes.
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
DO $$
BEGIN
    -- Earlier versions made it UNLOGGED.
    IF (SELECT c.relpersistence FROM pg_class AS c WHERE c.oid = 'messages.staged'::regclass) = 'u' THEN
        ALTER TABLE messages.staged SET LOGGED;
    END IF;
END
$$;
CREATE INDEX IF NOT EXISTS staged_by_place ON messages.staged (staging, place);
CREATE INDEX IF NOT EXISTS staged_by_age ON messages.staged USING brin (staged_at);

COMMENT ON TABLE messages.staged IS
    'Bodies that wait for publish_staged or push_staged. Anybody may copy into (staging, place, bodies, encs, headers, keys), nobody may read. staging: a uuid of one writer''s; place: the order; the arrays: some bodies, and for each what belongs to it, or null for none of them. What is left is removed after a day.';

-- The last batch of each query that was committed: what comes again is known.
CREATE TABLE IF NOT EXISTS messages._batch (
    role text COLLATE "C" NOT NULL,
    query text COLLATE "C" NOT NULL,
    batch bigint NOT NULL,
    committed_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (role, query)
);
CREATE INDEX IF NOT EXISTS batch_by_age ON messages._batch (committed_at);


CREATE OR REPLACE FUNCTION messages._staged_fault(
    query text,
    batch bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF length(query) NOT BETWEEN 1 AND 200 THEN
        RETURN messages._error(54);
    ELSIF batch IS NULL OR batch < 0 THEN
        RETURN messages._error(63, 'batch', coalesce(batch::text, 'null'));
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._staged_fault IS
    'What is wrong with the name of a query, or with a batch''s number (errors 54, 63), or null.';


CREATE OR REPLACE FUNCTION messages._last_batch(
    query text
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_batch bigint;
BEGIN
    LOOP
        SELECT b.batch INTO v_batch FROM messages._batch AS b
        WHERE b.role = session_user AND b.query = _last_batch.query FOR UPDATE;
        IF FOUND THEN
            RETURN v_batch;
        END IF;
        INSERT INTO messages._batch (role, query, batch) VALUES (session_user, query, -1) ON CONFLICT DO NOTHING;
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._last_batch IS
    'The last batch that was committed of a query, -1 for none. Waits for a transaction that is committing one.';


CREATE OR REPLACE FUNCTION messages._batch_answer(
    query text,
    batch bigint,
    stagings uuid[]
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_last bigint := messages._last_batch(query);
BEGIN
    IF batch > v_last THEN
        RETURN NULL;
    ELSIF batch < v_last THEN
        RETURN messages._error(65, batch::text, left(query, 100), v_last::text);
    END IF;
    PERFORM messages._end_batch(query, batch, stagings);
    RETURN '{"Err":"0","Already":1}';
END
$$;

COMMENT ON FUNCTION messages._batch_answer IS
    'The answer where a batch was committed before: Already, or error 65 where a later one was; null where it is new.';


CREATE OR REPLACE FUNCTION messages._rows_fault(
    stagings uuid[],
    row_count bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_rows bigint;
    v_largest bigint;
BEGIN
    SELECT count(*), max(octet_length(b.body)) INTO v_rows, v_largest
    FROM (
        SELECT unnest(s.bodies) AS body FROM messages.staged AS s
        WHERE s.staging = ANY (stagings) AND s.role = session_user
    ) AS b;
    IF v_rows IS DISTINCT FROM row_count THEN
        RETURN messages._error(64, v_rows::text, coalesce(row_count::text, 'null'));
    END IF;
    RETURN messages._content_fault(NULL, NULL, v_largest);
END
$$;

COMMENT ON FUNCTION messages._rows_fault IS
    'Why what is staged cannot be committed (errors 64, 51), or null.';


CREATE OR REPLACE FUNCTION messages._unstage(
    stagings uuid[]
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_rows bigint;
BEGIN
    WITH gone AS (
        DELETE FROM messages.staged AS s WHERE s.staging = ANY (stagings) AND s.role = session_user
        RETURNING cardinality(s.bodies) AS rows
    )
    SELECT coalesce(sum(g.rows), 0) INTO v_rows FROM gone AS g;
    RETURN v_rows;
END
$$;

COMMENT ON FUNCTION messages._unstage IS
    'Remove rows that this role has staged; answers how many.';


CREATE OR REPLACE FUNCTION messages._end_batch(
    query text,
    batch bigint,
    stagings uuid[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE messages._batch AS b SET batch = _end_batch.batch, committed_at = clock_timestamp()
    WHERE b.role = session_user AND b.query = _end_batch.query AND b.batch < _end_batch.batch;
    PERFORM messages._unstage(stagings);
    PERFORM messages._evaluate_if_due();
END
$$;

COMMENT ON FUNCTION messages._end_batch IS
    'Record that a batch is committed, and clear away what was staged for it.';


CREATE OR REPLACE FUNCTION messages._forget_staged()
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
    -- What is written once has a name that nobody gives a second time.
    DELETE FROM messages._batch AS b
    WHERE b.ctid = ANY (ARRAY(
        SELECT o.ctid FROM messages._batch AS o
        WHERE o.committed_at < (SELECT clock_timestamp() - interval '1 year')
           OR o.committed_at BETWEEN (SELECT clock_timestamp() - interval '1 year')
                             AND (SELECT clock_timestamp() - interval '1 day') AND starts_with(o.query, 'once/')
        ORDER BY o.committed_at LIMIT 5000 FOR UPDATE SKIP LOCKED
    ))
$$;

COMMENT ON FUNCTION messages._forget_staged IS
    'Remove some of what was staged more than a day ago, and queries whose last batch is a year old (a day where the name begins with once/). Never waits.';
