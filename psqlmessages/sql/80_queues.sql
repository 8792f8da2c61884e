-- Queues: look them up, make them and check permissions. Calls need no session: they name the node that acts.

-- Elements are short-lived, so dead rows must be vacuumed often and at full speed. Only if needed, because ALTER waits for
-- a running vacuum, while calls wait for other locks of the installation.
DO $$
DECLARE
    v_table record;
BEGIN
    FOR v_table IN
        SELECT o.name, o.options
        FROM (VALUES
            ('psqlmessages_element', ARRAY[
                'autovacuum_vacuum_scale_factor=0.02', 'autovacuum_vacuum_threshold=2000',
                'autovacuum_vacuum_cost_delay=0', 'autovacuum_analyze_scale_factor=0.5'
            ]),
            ('psqlmessages_queuecount', ARRAY[
                'autovacuum_vacuum_scale_factor=0.02', 'autovacuum_vacuum_threshold=5000',
                'autovacuum_vacuum_cost_delay=0'
            ])
        ) AS o (name, options)
        JOIN pg_catalog.pg_class AS c ON c.oid = to_regclass(o.name)
        WHERE NOT coalesce(c.reloptions, '{}') @> o.options
    LOOP
        EXECUTE format('ALTER TABLE %s SET (%s)', v_table.name, array_to_string(v_table.options, ', '));
    END LOOP;
END
$$;

-- The time of the last housekeeping of queues, and the last row when counts were summed up.
CREATE TABLE IF NOT EXISTS messages._queues (
    id boolean PRIMARY KEY DEFAULT true,
    tended_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    counted_id bigint NOT NULL DEFAULT 0,
    CONSTRAINT queues_has_one_row CHECK (id)
);
-- Whether elements may wait for a time that was set before the clock was put back.
ALTER TABLE messages._queues ADD COLUMN IF NOT EXISTS is_clock_back boolean NOT NULL DEFAULT false;
INSERT INTO messages._queues DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Where readers of a queue start: no element becomes available before start_at. Without it each reader would walk over
-- the index entries of all elements that were taken since the oldest open transaction began, because nobody may remove them.
-- The row with the highest version counts; rows are only inserted and deleted, so nobody waits. UNLOGGED, because after a
-- crash readers may start at the beginning.
CREATE UNLOGGED TABLE IF NOT EXISTS messages._scan_start (
    queue_id bigint NOT NULL,
    version bigint NOT NULL,
    start_at timestamp with time zone NOT NULL,
    -- The next start, with its version, as soon as these transactions, which had written elements by then, have ended.
    pending_at timestamp with time zone NOT NULL,
    pending_version bigint NOT NULL,
    pending_writers text[] NOT NULL,
    -- The last id of an element by then, and how long it took to find the start.
    element_id bigint NOT NULL,
    seconds float8 NOT NULL,
    made_at timestamp with time zone NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS scan_start_by_version ON messages._scan_start (queue_id, version DESC);
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._scan_version;


CREATE OR REPLACE FUNCTION messages._queue_argument_error(
    ident text,
    queue text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_error json;
    v_rights record;
BEGIN
    v_error := messages._ident_and_dest_error(ident, queue);
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    ELSIF right(queue, 1) = '*' THEN
        RETURN messages._error(62, queue);
    END IF;
    SELECT * INTO v_rights FROM messages._permissions(session_user, ident, 'Queue', queue);
    IF v_rights.timeout IS NULL THEN
        RETURN messages._error(2, 'Queue', queue);
    ELSIF mode IN ('W', 'RW') AND NOT v_rights.can_write OR mode IN ('R', 'RW') AND NOT v_rights.can_read
        OR mode = 'A' AND NOT v_rights.can_administer
    THEN
        RETURN messages._error(3, mode, 'Queue', queue);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._queue_argument_error IS
    'Why this role may not use a queue as that node (errors 54, 1, 15, 16, 62, 2, 3 in this order), or null. mode: W, R, RW for both, A, or empty for any rule.';


CREATE OR REPLACE FUNCTION messages._may_use(
    ident text,
    queue text,
    mode text
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
DECLARE
    v_rights record;
BEGIN
    IF length(ident) <= 100 AND length(queue) <= 100 AND ident <> '' AND queue <> ''
        AND right(ident, 1) <> '*' AND right(queue, 1) <> '*'
    THEN
        SELECT * INTO v_rights FROM messages._permissions(session_user, ident, 'Queue', queue);
        RETURN CASE mode
            WHEN 'W' THEN v_rights.can_write
            WHEN 'R' THEN v_rights.can_read
            WHEN 'A' THEN v_rights.can_administer
            ELSE v_rights.can_write AND v_rights.can_read
        END;
    END IF;
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._may_use IS
    'Whether this role may use a queue as that node; if not, _queue_argument_error gives the error. mode: W, R, RW or A.';


CREATE OR REPLACE FUNCTION messages._queue_error(
    ident text,
    queue text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    -- Null only if a rule was added after the first check.
    RETURN coalesce(messages._queue_argument_error(ident, queue, mode), messages._error(2, 'Queue', queue));
END
$$;

COMMENT ON FUNCTION messages._queue_error IS
    'The error of a call that _may_use does not allow.';


CREATE OR REPLACE FUNCTION messages._queue(
    name text,
    waits boolean DEFAULT true
)
RETURNS psqlmessages_queue
LANGUAGE plpgsql
AS $$
DECLARE
    v_queue psqlmessages_queue;
BEGIN
    LOOP
        SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.name = _queue.name;
        IF v_queue.is_removed THEN
            -- Without waiting: while it has elements, a removed queue works as any other.
            UPDATE psqlmessages_queue AS q SET is_removed = false
            WHERE q.id = (SELECT l.id FROM psqlmessages_queue AS l WHERE l.id = v_queue.id FOR NO KEY UPDATE SKIP LOCKED);
        END IF;
        -- The transaction that makes the queue holds this lock until its commit. Until then the queue is empty.
        EXIT WHEN v_queue.id IS NOT NULL OR NOT pg_try_advisory_xact_lock(1886612840, hashtext(_queue.name)) AND NOT waits;
        INSERT INTO psqlmessages_queue (name, channel, awaited_until)
        VALUES (_queue.name, messages._new_queue_channel(), 'epoch')
        ON CONFLICT DO NOTHING
        RETURNING * INTO v_queue;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN v_queue;
END
$$;

COMMENT ON FUNCTION messages._queue IS
    'The queue of this name, made if it does not exist or was removed. Null if another transaction is making it, unless waits.';


CREATE OR REPLACE FUNCTION messages._existing_queue(
    name text
)
RETURNS SETOF psqlmessages_queue
LANGUAGE sql
STABLE
AS $$
    SELECT q.* FROM psqlmessages_queue AS q
    WHERE q.name = _existing_queue.name
      AND (NOT q.is_removed OR EXISTS (SELECT FROM psqlmessages_element AS e WHERE e.queue_id = q.id))
$$;

COMMENT ON FUNCTION messages._existing_queue IS
    'The queue of this name, or no row. A removed queue exists again as soon as it has elements.';


CREATE OR REPLACE FUNCTION messages._authorized_queue(
    ident text,
    queue text,
    mode text
)
RETURNS SETOF psqlmessages_queue
LANGUAGE sql
STABLE
AS $$
    SELECT q.* FROM psqlmessages_queue AS q
    WHERE q.name = _authorized_queue.queue
      AND CASE WHEN length(ident) BETWEEN 1 AND 100 AND length(_authorized_queue.queue) <= 100 AND right(ident, 1) <> '*' THEN coalesce(
          -- A rule without patterns for this role is found five times as fast.
          (
              SELECT true FROM psqlmessages_auth AS a
              WHERE a.ident = _authorized_queue.ident AND a.type = 'Queue' AND a.dest = _authorized_queue.queue
                AND a.role = session_user AND a.mode IN (_authorized_queue.mode, 'RW', 'A')
          ),
          (
              SELECT CASE mode WHEN 'W' THEN r.can_write WHEN 'R' THEN r.can_read ELSE r.can_write AND r.can_read END
              FROM messages._permissions(session_user, ident, 'Queue', _authorized_queue.queue) AS r
          )
      ) END
$$;

COMMENT ON FUNCTION messages._authorized_queue IS
    'A queue, also a removed one, that this role may use as that node; else no row. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._queues_like(
    pattern text
)
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $$
    SELECT q.id
    FROM messages._name_range(pattern) AS n
    CROSS JOIN LATERAL (
        SELECT p.id FROM psqlmessages_queue AS p
        WHERE p.name BETWEEN n.low AND n.high AND starts_with(p.name, n.low) OFFSET 0
    ) AS q
$$;

COMMENT ON FUNCTION messages._queues_like IS
    'The queues that match a name or pattern.';


CREATE OR REPLACE FUNCTION messages._new_queue_channel()
RETURNS text
LANGUAGE sql
AS $$
    SELECT 'queue_' || replace(gen_random_uuid()::text, '-', '')
$$;

COMMENT ON FUNCTION messages._new_queue_channel IS
    'A channel name that is hard to guess.';


CREATE OR REPLACE FUNCTION messages._notify_readers(
    channel text,
    queue text,
    evt text
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- Without an Id, so that PostgreSQL delivers only one of many in a transaction.
    PERFORM pg_notify(channel, '{"Type":"Sys","Evt":"' || evt || '","Queue":' || to_json(queue) || '}');
END
$$;

COMMENT ON FUNCTION messages._notify_readers IS
    'Notify the sessions that LISTEN on the channel of a queue.';


CREATE OR REPLACE FUNCTION messages._wake_readers(
    queue psqlmessages_queue,
    evt text DEFAULT 'pushed'
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF queue.awaited_until > clock_timestamp() THEN
        PERFORM messages._notify_readers(queue.channel, queue.name, evt);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._wake_readers IS
    'Notify waiting readers, if there are any, that a queue may have elements for them.';


CREATE OR REPLACE FUNCTION messages._scan_start(
    queue_id bigint
)
RETURNS timestamp with time zone
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce((
        SELECT s.start_at FROM messages._scan_start AS s
        WHERE s.queue_id = _scan_start.queue_id ORDER BY s.version DESC LIMIT 1
    ), '-infinity')
$$;

COMMENT ON FUNCTION messages._scan_start IS
    'No element of the queue becomes available before this time.';


CREATE OR REPLACE FUNCTION messages._advance_scan_start(
    queue_id bigint
)
RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $$
DECLARE
    -- The order matters: a transaction that is not among the writers locks the table later. So it stores later times, or
    -- resets the start with a higher version.
    v_version bigint := nextval('messages._scan_version');
    v_next_version bigint := nextval('messages._scan_version');
    v_now timestamp with time zone := clock_timestamp();
    v_writers text[] := ARRAY(
        SELECT l.virtualtransaction FROM pg_catalog.pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = 'psqlmessages_element'::regclass AND l.mode = 'RowExclusiveLock'
          AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
    );
    v_last record;
    v_next_at timestamp with time zone := v_now;
    v_bound timestamp with time zone;
    v_first timestamp with time zone;
BEGIN
    -- An older snapshot does not show what was stored since.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;
    END IF;
    -- Read it after the writers: a reset by a transaction that has ended by then is visible.
    SELECT s.ctid AS place, s.* INTO v_last FROM messages._scan_start AS s
    WHERE s.queue_id = _advance_scan_start.queue_id ORDER BY s.version DESC LIMIT 1;
    IF v_last.version > v_version THEN
        RETURN;
    ELSIF FOUND THEN
        DELETE FROM messages._scan_start AS s WHERE s.ctid = (
            SELECT l.ctid FROM messages._scan_start AS l WHERE l.ctid = v_last.place FOR UPDATE SKIP LOCKED
        );
        -- Another session does the same. If its transaction stays open, its row does not count.
        IF NOT FOUND AND v_last.made_at BETWEEN v_now - interval '1 second' AND v_now THEN
            RETURN;
        END IF;
    END IF;
    IF v_writers = '{}' THEN
        v_bound := v_now;
    ELSIF v_last.version IS NULL THEN
        v_bound := '-infinity';
    ELSIF NOT v_last.pending_writers && v_writers THEN
        v_bound := v_last.pending_at;
        v_version := v_last.pending_version;
    ELSE
        v_version := v_last.version;
        v_next_at := v_last.pending_at;
        v_next_version := v_last.pending_version;
        v_writers := ARRAY(SELECT unnest(v_writers) INTERSECT SELECT unnest(v_last.pending_writers));
    END IF;
    IF v_bound IS NOT NULL THEN
        SELECT e.available_at INTO v_first FROM psqlmessages_element AS e
        WHERE e.queue_id = _advance_scan_start.queue_id
          AND e.available_at >= (SELECT coalesce(v_last.start_at, '-infinity'))
        ORDER BY e.available_at, e.id LIMIT 1;
    END IF;
    INSERT INTO messages._scan_start (
        queue_id, version, start_at, pending_at, pending_version, pending_writers, element_id, seconds
    )
    VALUES (
        _advance_scan_start.queue_id, v_version,
        greatest(coalesce(v_last.start_at, '-infinity'), least(v_bound, v_first)),
        v_next_at, v_next_version, v_writers, pg_sequence_last_value('psqlmessages_element_id_seq'),
        extract(epoch FROM clock_timestamp() - v_now)
    );
END
$$;

COMMENT ON FUNCTION messages._advance_scan_start IS
    'Move the start of a queue''s readers behind the elements that were taken. All that was stored before the transactions that write now is visible, all later elements become available later.';


CREATE OR REPLACE FUNCTION messages._advance_scan_start_if_due(
    queue_id bigint,
    element_id float8,
    seconds float8,
    made_at timestamp with time zone
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- At most a twentieth of the time is spent on it.
    IF clock_timestamp() BETWEEN made_at AND made_at + interval '1 second' AND (
        clock_timestamp() < made_at + greatest(0.002, 20 * seconds) * interval '1 second'
        OR pg_sequence_last_value('psqlmessages_element_id_seq') < element_id
    ) THEN
        RETURN;
    END IF;
    PERFORM messages._advance_scan_start(queue_id);
END
$$;

COMMENT ON FUNCTION messages._advance_scan_start_if_due IS
    'Advance the start of a queue''s readers when that many elements were pushed since, or a second has passed.';


CREATE OR REPLACE FUNCTION messages._reset_scan_start(
    queue_id bigint,
    first_at timestamp with time zone DEFAULT '-infinity'
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF first_at > '-infinity' AND first_at >= (
        SELECT greatest(s.start_at, s.pending_at) FROM messages._scan_start AS s
        WHERE s.queue_id = _reset_scan_start.queue_id ORDER BY s.version DESC LIMIT 1
    ) IS NOT FALSE THEN
        RETURN;
    END IF;
    INSERT INTO messages._scan_start (
        queue_id, version, start_at, pending_at, pending_version, pending_writers, element_id, seconds
    )
    VALUES (
        _reset_scan_start.queue_id, nextval('messages._scan_version'), '-infinity', '-infinity',
        nextval('messages._scan_version'), '{}', 0, 0
    );
END
$$;

COMMENT ON FUNCTION messages._reset_scan_start IS
    'Let readers of a queue start at the beginning, because this transaction stores elements that are available earlier: at an old place (no first_at), or at first_at if the clock was put back. Call it after the first write to psqlmessages_element.';


CREATE OR REPLACE FUNCTION messages._count(
    queue_id bigint,
    puts bigint DEFAULT 0,
    gets bigint DEFAULT 0,
    reserves bigint DEFAULT 0,
    commits bigint DEFAULT 0,
    rollbacks bigint DEFAULT 0,
    dead_letters bigint DEFAULT 0,
    removes bigint DEFAULT 0
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- A crash may lose a lease, because the element is then available again.
    IF reserves = 0 AND current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- One more row each time, summed up later: a single row would have a version for each change since the oldest
    -- transaction began, and each update would read them all.
    INSERT INTO psqlmessages_queuecount (queue_id, puts, gets, reserves, commits, rollbacks, dead_letters, removes)
    VALUES (queue_id, puts, gets, reserves, commits, rollbacks, dead_letters, removes);
END
$$;

COMMENT ON FUNCTION messages._count IS
    'Count changes of the elements of a queue without waiting for other transactions. Makes the commit durable, except for reserves.';


CREATE OR REPLACE FUNCTION messages._hops(
    headers jsonb
)
RETURNS int
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT CASE
        WHEN headers ->> 'x-hop-count' IS NULL THEN 0
        WHEN headers ->> 'x-hop-count' ~ '^[0-9]{1,9}$' THEN (headers ->> 'x-hop-count')::int
        WHEN headers ->> 'x-hop-count' ~ '^[0-9]+$' THEN 999999999
        ELSE 0
    END
$$;

COMMENT ON FUNCTION messages._hops IS
    'The hop count in headers; 0 if there is none or it is no whole number.';


CREATE OR REPLACE FUNCTION messages._increment_tries(
    tries int
)
RETURNS int
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT least(tries, 2147483646) + 1
$$;

COMMENT ON FUNCTION messages._increment_tries IS
    'Add one to the number of tries, up to the maximum of int.';


CREATE OR REPLACE FUNCTION messages._parsed_headers(
    headers text
)
RETURNS jsonb
LANGUAGE plpgsql
AS $$
DECLARE
    v_headers jsonb;
    v_length int;
BEGIN
    IF headers IS NULL OR headers = '' THEN
        RETURN '{}';
    ELSIF octet_length(headers) <= 65536 THEN
        BEGIN
            v_headers := headers::jsonb;
        EXCEPTION WHEN data_exception OR program_limit_exceeded OR statement_too_complex THEN
            v_headers := NULL;
        END;
    END IF;
    v_length := length(v_headers::text);
    -- Python reads at most 200 levels, and numbers of 4,300 digits. Shorter headers have neither.
    IF jsonb_typeof(v_headers) IS DISTINCT FROM 'object'
        OR v_length > 400 AND jsonb_path_exists(v_headers, 'strict $.**{202}')
        OR v_length > 4300 AND EXISTS (
            SELECT FROM jsonb_path_query(v_headers, 'strict $.** ? (@.type() == "number")') AS n (number)
            WHERE length(n.number::text) > 4300
        )
    THEN
        RETURN NULL;
    END IF;
    RETURN v_headers;
END
$$;

COMMENT ON FUNCTION messages._parsed_headers IS
    'The headers of an element; null unless they are a JSON object of at most 64 KiB that Python can read (error 63).';


CREATE OR REPLACE FUNCTION messages._seconds(
    seconds float8
)
RETURNS interval
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT CASE WHEN seconds BETWEEN 0 AND 1000000000 THEN make_interval(secs => seconds) END
$$;

COMMENT ON FUNCTION messages._seconds IS
    'A delay as an interval; null if it is null, negative, no number, or over 1,000,000,000 s (error 63).';
