-- Push: add elements to a queue, available now or later, and only once for each key.

CREATE OR REPLACE FUNCTION messages._available_at(
    mature timestamp with time zone,
    delay float8
)
RETURNS timestamp with time zone
LANGUAGE sql
AS $$
    SELECT CASE
        WHEN mature IS NULL THEN clock_timestamp() + messages._to_interval(coalesce(delay, 0))
        WHEN mature BETWEEN '1970-01-01' AND '9000-01-01' THEN mature
    END
$$;

COMMENT ON FUNCTION messages._available_at IS
    'When an element becomes available: at mature, or delay seconds from now. Null if the delay is invalid, or clients could not read the time. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._element_error(
    enc text,
    headers jsonb[],
    matures timestamp with time zone[],
    tries int,
    keys text[],
    largest_body int
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF array_position(headers, NULL) IS NOT NULL THEN
        RETURN messages._error(63, 'headers', 'a JSON object of at most 64 KiB is needed');
    ELSIF array_position(matures, NULL) IS NOT NULL THEN
        RETURN messages._error(
            63, 'time', 'a delay of 0 to 1,000,000,000 seconds, or a mature from 1970 to 9000, is needed'
        );
    ELSIF tries < 0 OR tries IS NULL THEN
        RETURN messages._error(63, 'tries', coalesce(tries::text, 'null'));
    ELSIF EXISTS (SELECT FROM unnest(keys) AS k (key) WHERE length(k.key) > 200) THEN
        RETURN messages._error(54);
    END IF;
    RETURN messages._content_error(NULL, enc, largest_body);
END
$$;

COMMENT ON FUNCTION messages._element_error IS
    'The error of the arguments of a push (63, 54, 55, 51), or null. headers, matures: as parsed, null if malformed; largest_body: its bytes.';


CREATE OR REPLACE FUNCTION messages._claim_key(
    queue psqlmessages_queue,
    key text,
    element_id bigint
)
RETURNS bigint
LANGUAGE plpgsql STRICT
AS $$
DECLARE
    v_id bigint;
BEGIN
    LOOP
        INSERT INTO psqlmessages_elementkey AS k (queue_id, key, element_id, expires_at)
        VALUES (
            queue.id, _claim_key.key, _claim_key.element_id,
            clock_timestamp() + make_interval(secs => queue.key_timeout)
        )
        ON CONFLICT ON CONSTRAINT element_key_is_unique DO UPDATE
        SET element_id = excluded.element_id, expires_at = excluded.expires_at
        WHERE k.expires_at <= clock_timestamp()
        RETURNING k.element_id INTO v_id;
        EXIT WHEN FOUND;
        SELECT -k.element_id INTO v_id FROM psqlmessages_elementkey AS k
        WHERE k.queue_id = queue.id AND k.key = _claim_key.key;
        EXIT WHEN FOUND;
        -- The key has expired, and another transaction has just removed it: try again.
    END LOOP;
    RETURN v_id;
END
$$;

COMMENT ON FUNCTION messages._claim_key IS
    'Claim a key for an element. Returns element_id, or the negative id of the element that was pushed with this key before; null if key is null. Waits for transactions that push the same key.';


CREATE OR REPLACE FUNCTION messages._push(
    command text,
    client_id text,
    queue text,
    bodies text[],
    enc text,
    headers text[],
    mature timestamp with time zone,
    delay float8,
    tries int,
    keys text[],
    OUT ids bigint[],
    OUT error json
)
LANGUAGE plpgsql
AS $$
DECLARE
    v_mature timestamp with time zone;
    v_headers jsonb[];
    v_queue psqlmessages_queue;
    v_puts bigint;
BEGIN
    PERFORM messages._log_command(command, client_id, queue);
    IF messages._may_use_queue(client_id, queue, 'W') IS NOT TRUE THEN
        error := messages._queue_error(client_id, queue, 'W');
        RETURN;
    END IF;
    IF headers IS NOT NULL THEN
        v_headers := ARRAY(
            SELECT messages._parse_headers(h.headers)
            FROM unnest(headers) WITH ORDINALITY AS h (headers, ordinal) ORDER BY h.ordinal
        );
    END IF;
    -- Lock before reading the time: _advance_scan_start must see this writer.
    LOCK TABLE psqlmessages_element IN ROW EXCLUSIVE MODE;
    v_mature := messages._available_at(mature, delay);
    error := messages._element_error(
        enc, v_headers, ARRAY[v_mature], tries, keys,
        (SELECT max(octet_length(b.body)) FROM unnest(bodies) AS b (body))
    );
    IF error IS NULL AND cardinality(bodies) > 0 THEN
        v_queue := messages._get_or_create_queue(queue);
        IF keys IS NOT NULL THEN
            -- Ids are drawn here, so that they are in the order of the elements. An id becomes negative if its key was
            -- pushed before. Keys are claimed in their order, so that two pushes cannot deadlock.
            ids := ARRAY(SELECT nextval('psqlmessages_element_id_seq') FROM unnest(bodies));
            ids := ARRAY(
                SELECT c.id
                FROM (
                    SELECT k.ordinal, coalesce(messages._claim_key(v_queue, k.key, k.id), k.id) AS id
                    FROM (
                        SELECT i.ordinal, i.id, nullif(keys[i.ordinal], '') AS key
                        FROM unnest(ids) WITH ORDINALITY AS i (id, ordinal) ORDER BY 3, 1
                    ) AS k
                ) AS c
                ORDER BY c.ordinal
            );
            INSERT INTO psqlmessages_element (id, queue_id, mature_at, available_at, tries, enc, headers, body)
            SELECT i.id, v_queue.id, v_mature, v_mature, tries, enc, coalesce(v_headers[i.ordinal], '{}'),
                   coalesce(bodies[i.ordinal], '')
            FROM unnest(ids) WITH ORDINALITY AS i (id, ordinal) WHERE i.id > 0 ORDER BY i.ordinal;
            GET DIAGNOSTICS v_puts = ROW_COUNT;
        ELSE
            WITH stored AS (
                INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, tries, enc, headers, body)
                SELECT v_queue.id, v_mature, v_mature, tries, enc, coalesce(v_headers[b.ordinal], '{}'),
                       coalesce(b.body, '')
                FROM unnest((SELECT bodies)) WITH ORDINALITY AS b (body, ordinal)
                RETURNING id
            )
            SELECT array_agg(s.id), count(*) INTO ids, v_puts FROM stored AS s;
        END IF;
        IF v_puts > 0 THEN
            PERFORM messages._reset_scan_start(
                v_queue.id, CASE WHEN mature < clock_timestamp() THEN '-infinity' ELSE v_mature END
            );
            PERFORM messages._add_queue_counts(v_queue.id, puts => v_puts);
            PERFORM messages._notify_waiting_readers(v_queue);
        END IF;
        -- A rule may have been removed while this call waited for a transaction that creates the queue or pushes the
        -- key.
        IF messages._may_use_queue(client_id, queue, 'W') IS NOT TRUE THEN
            PERFORM messages._raise(messages._queue_error(client_id, queue, 'W'));
        END IF;
        PERFORM messages._schedule_housekeeping_if_due();
    END IF;
END
$$;

COMMENT ON FUNCTION messages._push IS
    'The implementation of push and push_many. Returns the ids of the elements, negative if the key was pushed before, or the error.';


CREATE OR REPLACE FUNCTION messages.push(
    client_id text,
    queue text,
    body text,
    enc text DEFAULT NULL,
    headers text DEFAULT NULL,
    mature timestamp with time zone DEFAULT NULL,
    delay float8 DEFAULT NULL,
    tries int DEFAULT 0,
    key text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_stored record;
    v_pushed record;
BEGIN
    -- The common case in one statement: PL/pgSQL would initialize each further one again in every transaction.
    IF octet_length(body) <= 8192 AND headers IS NULL AND mature IS NULL AND delay IS NULL AND tries = 0
        AND key IS NULL AND coalesce(enc, 'json') IN ('json', 'b64')
    THEN
        WITH authorized AS MATERIALIZED (
            SELECT q.id, q.name, q.channel, q.awaited_until FROM messages._authorized_queue(client_id, queue, 'W') AS q
            WHERE NOT q.is_removed
        ), pushed AS (
            INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, enc, body)
            SELECT a.id, clock_timestamp(), clock_timestamp(), push.enc, push.body FROM authorized AS a
            RETURNING id, available_at
        )
        SELECT p.id, a.id AS queue_id, a.name, a.channel, a.awaited_until > clock_timestamp() AS is_awaited,
               p.available_at, (
                   SELECT greatest(s.start_at, s.pending_at) FROM messages._scan_start AS s
                   WHERE s.queue_id = a.id ORDER BY s.version DESC LIMIT 1
               ) AS start_at
        INTO v_stored FROM pushed AS p, authorized AS a;
        IF FOUND THEN
            IF v_stored.available_at < v_stored.start_at THEN
                PERFORM messages._reset_scan_start(v_stored.queue_id);
            END IF;
            PERFORM messages._add_queue_counts(v_stored.queue_id, puts => 1);
            IF v_stored.is_awaited THEN
                PERFORM messages._notify_queue_readers(v_stored.channel, v_stored.name, 'pushed');
            END IF;
            IF messages._nothing_is_due() IS NOT TRUE THEN
                PERFORM messages._log_command('push', client_id, queue);
                PERFORM messages._schedule_housekeeping_if_due();
            END IF;
            RETURN '{"Err":"0","Id":' || v_stored.id || '}';
        END IF;
    END IF;
    SELECT * INTO v_pushed FROM messages._push(
        'push', client_id, queue, ARRAY[body], enc, CASE WHEN headers <> '' THEN ARRAY[headers] END,
        mature, delay, tries, CASE WHEN key <> '' THEN ARRAY[key] END
    );
    IF v_pushed.error IS NOT NULL THEN
        RETURN v_pushed.error;
    END IF;
    RETURN (
        '{"Err":"0","Id":' || abs(v_pushed.ids[1]) || CASE WHEN v_pushed.ids[1] < 0 THEN ',"Already":1}' ELSE '}' END
    )::json;
END
$$;

COMMENT ON FUNCTION messages.push(text, text, text, text, text, timestamptz, float8, int, text) IS
    'Add an element to a queue, which is created if it does not exist. mature: when it becomes available, or delay: in how many seconds. key: a second push with this key stores nothing, and returns the Id of the first one and Already: 1. Errors: 54, 1, 15, 16, 62, 2, 3, 63, 55, 51.';


CREATE OR REPLACE FUNCTION messages.push_many(
    client_id text,
    queue text,
    bodies text[],
    enc text DEFAULT NULL,
    headers text[] DEFAULT NULL,
    mature timestamp with time zone DEFAULT NULL,
    delay float8 DEFAULT NULL,
    tries int DEFAULT 0,
    keys text[] DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_stored record;
    v_pushed record;
BEGIN
    -- The common case in one statement.
    IF headers IS NULL AND mature IS NULL AND delay IS NULL AND tries = 0 AND keys IS NULL
        AND coalesce(enc, 'json') IN ('json', 'b64')
    THEN
        -- unnest in the list of columns, because PostgreSQL materializes functions in FROM.
        WITH authorized AS MATERIALIZED (
            SELECT q.id, q.name, q.channel, q.awaited_until, clock_timestamp() AS mature_at
            FROM messages._authorized_queue(client_id, queue, 'W') AS q
            WHERE NOT q.is_removed AND NOT EXISTS (
                SELECT FROM (SELECT unnest(bodies) AS body) AS b WHERE octet_length(b.body) > 8192
            )
        ), pushed AS (
            INSERT INTO psqlmessages_element (queue_id, mature_at, available_at, enc, body)
            SELECT b.id, b.mature_at, b.mature_at, push_many.enc, coalesce(b.body, '')
            FROM (SELECT a.id, a.mature_at, unnest(bodies) AS body FROM authorized AS a) AS b
            RETURNING id
        )
        SELECT a.id AS queue_id, a.name, a.channel, a.awaited_until > clock_timestamp() AS is_awaited, p.puts, p.ids,
               a.mature_at
        INTO v_stored
        FROM authorized AS a, (SELECT count(*) AS puts, string_agg(g.id::text, ',') AS ids FROM pushed AS g) AS p;
        IF v_stored.puts > 0 THEN
            PERFORM messages._reset_scan_start(v_stored.queue_id, v_stored.mature_at);
            PERFORM messages._add_queue_counts(v_stored.queue_id, puts => v_stored.puts);
            IF v_stored.is_awaited THEN
                PERFORM messages._notify_queue_readers(v_stored.channel, v_stored.name, 'pushed');
            END IF;
            IF messages._nothing_is_due() IS NOT TRUE THEN
                PERFORM messages._log_command('push_many', client_id, queue);
                PERFORM messages._schedule_housekeeping_if_due();
            END IF;
            RETURN ('{"Err":"0","Ids":[' || v_stored.ids || ']}')::json;
        END IF;
    END IF;
    -- A slice makes the index of each array start at one.
    SELECT * INTO v_pushed FROM messages._push(
        'push_many', client_id, queue, bodies[:], enc, headers[:], mature, delay, tries, keys[:]
    );
    IF v_pushed.error IS NOT NULL THEN
        RETURN v_pushed.error;
    END IF;
    RETURN (
        '{"Err":"0","Ids":[' || coalesce(
            (SELECT string_agg(abs(i.id)::text, ',' ORDER BY i.ordinal)
             FROM unnest(v_pushed.ids) WITH ORDINALITY AS i (id, ordinal)), ''
        ) || ']}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.push_many IS
    'Push many elements in one call. headers and keys have one entry for each body, null for none. Ids: in the order of the bodies. Errors: 54, 1, 15, 16, 62, 2, 3, 63, 55, 51.';
