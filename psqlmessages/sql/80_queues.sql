-- Queues: find and create them, check permissions, count changes. Calls need no session: they name the node that acts.

-- Elements are short-lived, so dead rows must be vacuumed often and at full speed. Only change options that differ:
-- ALTER waits for a running vacuum, while calls wait for the other locks of the installation.
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

-- maintained_at: the last housekeeping of queues that wrote. counted_id: the last id in psqlmessages_queuecount when
-- housekeeping summed up the counts. is_clock_back: whether committed elements may still wait for times that were set
-- before the clock was set back. pending_writers: the transactions that were writing elements when housekeeping noticed
-- that the clock was set back, and that have not ended.
CREATE TABLE IF NOT EXISTS messages._queues (
    id boolean PRIMARY KEY DEFAULT true,
    maintained_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    counted_id bigint NOT NULL DEFAULT 0,
    is_clock_back boolean NOT NULL DEFAULT false,
    pending_writers text[] NOT NULL DEFAULT '{}',
    CONSTRAINT queues_has_one_row CHECK (id)
);
INSERT INTO messages._queues DEFAULT VALUES ON CONFLICT DO NOTHING;

-- The time from which readers of a queue search the index for elements: none becomes available before start_at. Without
-- it each reader would walk through the index entries of all elements taken since the oldest open transaction began,
-- because VACUUM cannot remove them. Only the row with the highest version is valid. Rows are inserted and deleted but
-- never updated, so no transaction waits for another. UNLOGGED, because after a crash readers can start at the
-- beginning.
CREATE UNLOGGED TABLE IF NOT EXISTS messages._scan_start (
    queue_id bigint NOT NULL,
    version bigint NOT NULL,
    start_at timestamp with time zone NOT NULL,
    -- The next start and its version: valid when these virtual transactions, which write elements, have ended.
    pending_at timestamp with time zone NOT NULL,
    pending_version bigint NOT NULL,
    pending_writers text[] NOT NULL,
    -- The last id of an element when this row was written, and how many seconds it took to find the start.
    element_id bigint NOT NULL,
    seconds float8 NOT NULL,
    made_at timestamp with time zone NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS scan_start_by_version ON messages._scan_start (queue_id, version DESC);
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._scan_version;


CREATE OR REPLACE FUNCTION messages._may_use_queue(
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
            WHEN '' THEN v_rights.timeout IS NOT NULL
            ELSE v_rights.can_write AND v_rights.can_read
        END;
    END IF;
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._may_use_queue IS
    'Whether this role may use a queue as that node; null if no rule matches. If not true, call _queue_error. mode: W, R, RW for both, A, or empty for any rule.';


CREATE OR REPLACE FUNCTION messages._queue_error(
    ident text,
    queue text,
    mode text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_error json := messages._ident_and_dest_error(ident, queue);
BEGIN
    IF v_error IS NOT NULL THEN
        RETURN v_error;
    ELSIF right(queue, 1) = '*' THEN
        RETURN messages._error(62, queue);
    ELSIF mode <> '' AND messages._may_use_queue(ident, queue, mode) IS FALSE THEN
        RETURN messages._error(3, mode, 'Queue', queue);
    END IF;
    -- No rule matches, or one was added after the first check.
    RETURN messages._error(2, 'Queue', queue);
END
$$;

COMMENT ON FUNCTION messages._queue_error IS
    'The error of a call that _may_use_queue has not allowed (54, 1, 15, 16, 62, 2 or 3); never null.';


CREATE OR REPLACE FUNCTION messages._get_or_create_queue(
    name text,
    may_wait boolean DEFAULT true
)
RETURNS psqlmessages_queue
LANGUAGE plpgsql
AS $$
DECLARE
    v_queue psqlmessages_queue;
BEGIN
    LOOP
        SELECT * INTO v_queue FROM psqlmessages_queue AS q WHERE q.name = _get_or_create_queue.name;
        IF v_queue.is_removed THEN
            -- Skip a locked row: a removed queue with elements works as any other.
            UPDATE psqlmessages_queue AS q SET is_removed = false
            WHERE q.id = (
                SELECT l.id FROM psqlmessages_queue AS l WHERE l.id = v_queue.id FOR NO KEY UPDATE SKIP LOCKED
            );
        END IF;
        -- A transaction that creates the queue holds this lock. Until its commit the queue is empty for other sessions.
        EXIT WHEN v_queue.id IS NOT NULL
            OR NOT pg_try_advisory_xact_lock(1886612840, hashtext(_get_or_create_queue.name)) AND NOT may_wait;
        INSERT INTO psqlmessages_queue (name, channel, awaited_until)
        VALUES (_get_or_create_queue.name, messages._new_queue_channel(), 'epoch')
        ON CONFLICT DO NOTHING
        RETURNING * INTO v_queue;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN v_queue;
END
$$;

COMMENT ON FUNCTION messages._get_or_create_queue IS
    'The queue with this name, created if it does not exist or was removed. may_wait: whether to wait if another transaction is creating the queue; if false, return null then.';


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
    'The queue with this name, or no row. A removed queue exists again as soon as it has elements.';


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
      AND CASE WHEN length(ident) BETWEEN 1 AND 100 AND length(_authorized_queue.queue) <= 100
          AND right(ident, 1) <> '*' THEN coalesce(
          -- The usual rule, for this role and without patterns: it is found in a fifth of the time.
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
    'The queue with this name, even if removed; no row if it does not exist or this role may not use it as that node. mode: W, R or RW. Inlined where it is called.';


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
    'Ids of the queues that match a name or pattern.';


CREATE OR REPLACE FUNCTION messages._new_queue_channel()
RETURNS text
LANGUAGE sql
AS $$
    SELECT 'queue_' || replace(gen_random_uuid()::text, '-', '')
$$;

COMMENT ON FUNCTION messages._new_queue_channel IS
    'A channel name that is hard to guess.';


CREATE OR REPLACE FUNCTION messages._notify_queue_readers(
    channel text,
    queue text,
    evt text
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- Without an Id: PostgreSQL then delivers equal notifications of a transaction only once.
    PERFORM pg_notify(channel, '{"Type":"Sys","Evt":"' || evt || '","Queue":' || to_json(queue) || '}');
END
$$;

COMMENT ON FUNCTION messages._notify_queue_readers IS
    'Notify the sessions that LISTEN on this channel of a queue. evt: pushed or moved.';


CREATE OR REPLACE FUNCTION messages._notify_waiting_readers(
    queue psqlmessages_queue,
    evt text DEFAULT 'pushed'
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF queue.awaited_until > clock_timestamp() THEN
        PERFORM messages._notify_queue_readers(queue.channel, queue.name, evt);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._notify_waiting_readers IS
    'Notify the readers of a queue that it may have elements, if a session has called queue_listen recently.';


CREATE OR REPLACE FUNCTION messages._get_scan_start(
    queue_id bigint
)
RETURNS timestamp with time zone
LANGUAGE sql
STABLE
AS $$
    SELECT coalesce((
        SELECT s.start_at FROM messages._scan_start AS s
        WHERE s.queue_id = _get_scan_start.queue_id ORDER BY s.version DESC LIMIT 1
    ), '-infinity')
$$;

COMMENT ON FUNCTION messages._get_scan_start IS
    'The time from which to search for elements of a queue: none becomes available before it.';


CREATE OR REPLACE FUNCTION messages._element_writers()
RETURNS text[]
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN ARRAY(
        SELECT l.virtualtransaction FROM pg_catalog.pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = 'psqlmessages_element'::regclass AND l.mode = 'RowExclusiveLock'
          AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
    );
END
$$;

COMMENT ON FUNCTION messages._element_writers IS
    'Virtual ids of the other transactions that hold a write lock on psqlmessages_element. Any other has ended, or will lock the table, and then read the clock, later.';


CREATE OR REPLACE FUNCTION messages._remaining_writers(
    writers text[],
    earlier text[]
)
RETURNS text[]
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT ARRAY(
        SELECT w.id FROM unnest(writers) AS w (id) WHERE w.id = ANY (earlier) OR earlier <> '{}' AND w.id ^@ '-1/'
    )
$$;

COMMENT ON FUNCTION messages._remaining_writers IS
    'The writers that were already there earlier. A prepared transaction has another virtual id after a restart of the server. It begins with -1/ and may be any of the earlier ones.';


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
    -- The order matters: a transaction that is not among the writers locks the table after v_now, so it stores later
    -- times, or resets the start with a higher version.
    v_version bigint := nextval('messages._scan_version');
    v_next_version bigint := nextval('messages._scan_version');
    v_now timestamp with time zone := clock_timestamp();
    v_writers text[] := messages._element_writers();
    v_remaining text[];
    v_current record;
    v_next_at timestamp with time zone := v_now;
    -- The new start is at most this; null if it cannot advance yet.
    v_limit timestamp with time zone;
    v_first timestamp with time zone;
BEGIN
    -- An older snapshot does not show elements that were stored since.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;
    END IF;
    -- Read the row after the writers: then a reset is visible if its transaction is not among them.
    SELECT s.ctid AS row_id, s.* INTO v_current FROM messages._scan_start AS s
    WHERE s.queue_id = _advance_scan_start.queue_id ORDER BY s.version DESC LIMIT 1;
    IF v_current.version > v_version THEN
        RETURN;
    ELSIF FOUND THEN
        DELETE FROM messages._scan_start AS s WHERE s.ctid = (
            SELECT l.ctid FROM messages._scan_start AS l WHERE l.ctid = v_current.row_id FOR UPDATE SKIP LOCKED
        );
        -- Another session is replacing the row. Replace it, too, if that session has not committed within a second.
        IF NOT FOUND AND v_current.made_at BETWEEN v_now - interval '1 second' AND v_now THEN
            RETURN;
        END IF;
    END IF;
    v_remaining := messages._remaining_writers(v_writers, v_current.pending_writers);
    IF v_writers = '{}' THEN
        -- No other transaction is writing elements, so all with an earlier time are visible.
        v_limit := v_now;
    ELSIF v_current.version IS NULL THEN
        -- This is the first row of the queue. Its pending start is valid when these writers have ended.
        v_limit := '-infinity';
    ELSIF v_remaining = '{}' THEN
        -- The writers of the pending start have ended, so it is valid.
        v_limit := v_current.pending_at;
        v_version := v_current.pending_version;
    ELSE
        -- Some of them have not: keep the start and the pending start.
        v_version := v_current.version;
        v_next_at := v_current.pending_at;
        v_next_version := v_current.pending_version;
        v_writers := v_remaining;
    END IF;
    IF v_limit IS NOT NULL THEN
        SELECT e.available_at INTO v_first FROM psqlmessages_element AS e
        WHERE e.queue_id = _advance_scan_start.queue_id
          AND e.available_at >= (SELECT coalesce(v_current.start_at, '-infinity'))
        ORDER BY e.available_at, e.id + 0 LIMIT 1;
    END IF;
    INSERT INTO messages._scan_start (
        queue_id, version, start_at, pending_at, pending_version, pending_writers, element_id, seconds
    )
    VALUES (
        _advance_scan_start.queue_id, v_version,
        greatest(coalesce(v_current.start_at, '-infinity'), least(v_limit, v_first)),
        v_next_at, v_next_version, v_writers, pg_sequence_last_value('psqlmessages_element_id_seq'),
        extract(epoch FROM clock_timestamp() - v_now)
    );
END
$$;

COMMENT ON FUNCTION messages._advance_scan_start IS
    'Move the start of a queue''s readers past taken elements: to the first element that is left, or to the time up to which all elements are visible, whichever is earlier.';


CREATE OR REPLACE FUNCTION messages._advance_scan_start_if_due(
    queue_id bigint,
    max_taken int,
    element_id bigint,
    seconds float8,
    made_at timestamp with time zone
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- Spend at most a twentieth of the time on this.
    IF clock_timestamp() BETWEEN made_at AND made_at + interval '1 second' AND (
        clock_timestamp() < made_at + greatest(0.002, 20 * seconds) * interval '1 second'
        OR pg_sequence_last_value('psqlmessages_element_id_seq') < element_id + 64 * sqrt(max_taken)
    ) THEN
        RETURN;
    END IF;
    PERFORM messages._advance_scan_start(queue_id);
END
$$;

COMMENT ON FUNCTION messages._advance_scan_start_if_due IS
    'After elements were taken: call _advance_scan_start if at least 64 elements (more if many are taken in one call) were pushed since the last time, or a second has passed. max_taken: the count argument; element_id, seconds, made_at: from the row of _scan_start.';


CREATE OR REPLACE FUNCTION messages._reset_scan_start(
    queue_id bigint,
    first_at timestamp with time zone DEFAULT '-infinity'
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- Without a row, readers start at the beginning anyway.
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
    'Let readers of a queue start at the beginning if this transaction stores elements that become available before their start. first_at: when the first of these elements becomes available; unknown by default. Call it after the first write to psqlmessages_element.';


CREATE OR REPLACE FUNCTION messages._add_queue_counts(
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
    -- A crash may only undo a reserve, which makes the element available again.
    IF reserves = 0 AND current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- Each call inserts a row; housekeeping sums them up. A single row would have a version for each change since the
    -- oldest transaction began, and each update would read them all.
    INSERT INTO psqlmessages_queuecount (queue_id, puts, gets, reserves, commits, rollbacks, dead_letters, removes)
    VALUES (queue_id, puts, gets, reserves, commits, rollbacks, dead_letters, removes);
END
$$;

COMMENT ON FUNCTION messages._add_queue_counts IS
    'Count changes of the elements of a queue, without waiting for other transactions. Also makes the commit durable, unless elements were only reserved.';


CREATE OR REPLACE FUNCTION messages._hop_count(
    headers jsonb
)
RETURNS int
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT CASE
        WHEN headers ->> 'x-hop-count' ~ '^[0-9]{1,9}$' THEN (headers ->> 'x-hop-count')::int
        WHEN headers ->> 'x-hop-count' ~ '^[0-9]+$' THEN 999999999
        ELSE 0
    END
$$;

COMMENT ON FUNCTION messages._hop_count IS
    'The hop count in headers; 0 if it is missing or no whole number.';


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
    'One more try, up to the maximum of int.';


CREATE OR REPLACE FUNCTION messages._parse_headers(
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
    -- Python reads at most 200 levels, and numbers with at most 4,300 digits. Only longer headers can exceed that.
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

COMMENT ON FUNCTION messages._parse_headers IS
    'Parse the headers of an element. Null (error 63) unless they are empty, or a JSON object of at most 64 KiB that Python can read.';


CREATE OR REPLACE FUNCTION messages._to_interval(
    seconds float8
)
RETURNS interval
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT CASE WHEN seconds BETWEEN 0 AND 1000000000 THEN make_interval(secs => seconds) END
$$;

COMMENT ON FUNCTION messages._to_interval IS
    'A number of seconds as an interval; null if it is not from 0 to 1,000,000,000.';
