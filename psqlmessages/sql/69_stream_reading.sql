-- Reading streams by position: for readers that keep their own place, and ask stream_horizons how far to read.

CREATE OR REPLACE VIEW messages.stored_rows AS
SELECT m.id, ''::text COLLATE "C" AS topic, m.sender::text AS sender, m.payload AS body, m.enc, NULL::text AS headers, m.published_at
FROM psqlmessages_streammessage AS m;

COMMENT ON VIEW messages.stored_rows IS
    'The form of the rows that read_stream returns.';


CREATE OR REPLACE FUNCTION messages._readable_topic(
    client_id text,
    topic text
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_can_read boolean;
BEGIN
    IF length(client_id) <= 100 AND length(topic) <= 100 AND right(client_id, 1) <> '*' AND right(topic, 1) <> '*' THEN
        SELECT r.can_read INTO v_can_read FROM messages._rights(session_user, client_id, 'Topic', topic) AS r;
    END IF;
    IF v_can_read IS NOT TRUE THEN
        -- Null only if the rule came after the first look.
        PERFORM messages._raise(coalesce(
            messages._subscription_fault(client_id, topic, 'R'), messages._error(2, 'Topic', topic)
        ));
    END IF;
    RETURN (SELECT t.id FROM psqlmessages_topic AS t WHERE t.name = topic);
END
$$;

COMMENT ON FUNCTION messages._readable_topic IS
    'The id of a topic that this role may read as that node, or null if the topic is gone. Raises errors 1, 54, 15, 16, 9, 2, 3.';


CREATE OR REPLACE FUNCTION messages._stored_rows(
    topic_id bigint,
    topic text,
    after_id bigint,
    up_to_id bigint,
    max_rows int,
    with_bodies boolean
)
RETURNS SETOF messages.stored_rows
LANGUAGE sql
STABLE
AS $$
    SELECT m.id, _stored_rows.topic, m.sender::text, CASE WHEN with_bodies THEN m.payload END, m.enc, NULL::text,
           m.published_at
    FROM psqlmessages_streammessage AS m
    -- Values as subqueries, so that PostgreSQL does not plan again for each of them.
    WHERE m.topic_id = (SELECT _stored_rows.topic_id) AND m.id > (SELECT after_id) AND m.id <= (SELECT up_to_id)
    ORDER BY m.id
    LIMIT (SELECT max_rows)
$$;

COMMENT ON FUNCTION messages._stored_rows IS
    'The stored messages of a topic within a range of ids, oldest first. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages.read_stream(
    client_id text,
    topic text,
    after_id bigint DEFAULT 0,
    up_to_id bigint DEFAULT NULL,
    max_rows int DEFAULT NULL,
    with_bodies boolean DEFAULT true
)
RETURNS SETOF messages.stored_rows
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- In the order of the index, whatever is known of the tables, which are never analyzed: 50,000 rows took 230 ms by
-- processes that scan a table in parallel, instead of 7.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET max_parallel_workers_per_gather = 0
SET jit = off
AS $$
DECLARE
    v_topic bigint;
    v_last bigint := up_to_id;
BEGIN
    PERFORM messages._check_isolation('read_stream');
    PERFORM messages._log_command('read_stream', client_id, topic);
    v_topic := messages._readable_topic(client_id, topic);
    IF max_rows <= 0 THEN
        PERFORM messages._raise(messages._error(60, 'max_rows'));
    ELSIF v_topic IS NULL THEN
        RETURN;
    END IF;
    -- Before any snapshot that reads: what a truncation moved is then seen where it went.
    LOCK TABLE psqlmessages_streammessage IN ACCESS SHARE MODE;
    IF v_last IS NULL THEN
        v_last := messages._horizon(v_topic);
    END IF;
    RETURN QUERY SELECT * FROM messages._stored_rows(
        v_topic, topic, coalesce(after_id, 0), v_last, max_rows, with_bodies
    );
END
$$;

COMMENT ON FUNCTION messages.read_stream IS
    'The stored messages of a topic with ids above after_id, up to up_to_id (null: up to where all are committed or gone), at most max_rows (null: all), oldest first. Nothing moves. Without with_bodies, body is null and not read. No rows if the topic is gone. Errors: 1, 54, 15, 16, 9, 2, 3, 60.';
