-- Bodies over the NOTIFY limit: kept once per message, fetched with get_data, removed by truncating.
-- A body goes to the class of its timeout (10 s, 100 s, … 10^6 s, more) and there to the table of the
-- current period (as long as the class's longest timeout), of three in turn. Two periods later all in
-- that table has expired, and it is truncated.

CREATE TABLE IF NOT EXISTS psqlmessages_body (
    slot smallint NOT NULL,
    id uuid NOT NULL,
    topic_id bigint,
    client_id bigint,
    expires_at timestamp with time zone NOT NULL,
    header text COLLATE "C" NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (slot, id)
) PARTITION BY LIST (slot);

DO $$
BEGIN
    FOR v_slot IN 0 .. 20 LOOP
        EXECUTE format(
            'CREATE UNLOGGED TABLE IF NOT EXISTS psqlmessages_body_%s PARTITION OF psqlmessages_body FOR VALUES IN (%s)',
            v_slot, v_slot
        );
        -- Compressing costs more than it saves for a body that lives for seconds.
        EXECUTE format('ALTER TABLE psqlmessages_body_%s ALTER body SET STORAGE EXTERNAL', v_slot);
    END LOOP;
END
$$;

-- What SQL must know of the Django settings; migrate writes it.
CREATE TABLE IF NOT EXISTS messages._settings (
    id boolean PRIMARY KEY DEFAULT true,
    max_body_bytes bigint NOT NULL DEFAULT 67108864,
    CONSTRAINT settings_have_one_row CHECK (id),
    CONSTRAINT max_body_bytes_is_sensible CHECK (max_body_bytes BETWEEN 8192 AND 536870912)
);
INSERT INTO messages._settings DEFAULT VALUES ON CONFLICT DO NOTHING;


CREATE OR REPLACE FUNCTION messages._slot(
    class int,
    turn int
)
RETURNS int
LANGUAGE sql
STABLE
AS $$
    SELECT class * 3 + mod(
        floor(extract(epoch FROM clock_timestamp())
            / CASE class WHEN 6 THEN 2147483647 ELSE power(10::numeric, class + 1) END)::bigint + turn,
        3
    )::int
$$;

COMMENT ON FUNCTION messages._slot IS
    'The table of a timeout class for the current period (turn 0) or the spare one, whose bodies have all expired (turn 1).';


CREATE OR REPLACE FUNCTION messages._keep(
    timeout int,
    header text,
    message text,
    topic_id bigint,
    client_id bigint
)
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
    v_class int := CASE
        WHEN timeout <= 10 THEN 0 WHEN timeout <= 100 THEN 1 WHEN timeout <= 1000 THEN 2
        WHEN timeout <= 10000 THEN 3 WHEN timeout <= 100000 THEN 4 WHEN timeout <= 1000000 THEN 5
        ELSE 6
    END;
    v_slot int := messages._slot(v_class, 0);
    v_expires_at timestamptz := clock_timestamp() + make_interval(secs => timeout);
    v_id uuid := gen_random_uuid();
BEGIN
    INSERT INTO psqlmessages_body (slot, id, topic_id, client_id, expires_at, header, body)
    VALUES (v_slot, v_id, topic_id, client_id, v_expires_at, header, message);
    RETURN '{' || header || ',"Dkey":"' || timeout || '.' || v_slot || '.'
        || (extract(epoch FROM v_expires_at) * 1000)::bigint || '.' || replace(v_id::text, '-', '')
        || '"}';
END
$$;

COMMENT ON FUNCTION messages._keep IS
    'Keep a body for a topic or for one registration; answers the payload to notify. The key: timeout, slot, expiry in ms, random id.';


CREATE OR REPLACE FUNCTION messages._rotate_bodies()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_table text;
    v_truncated int := 0;
BEGIN
    FOR v_class IN 0 .. 6 LOOP
        v_table := format('psqlmessages_body_%s', messages._slot(v_class, 1));
        CONTINUE WHEN pg_relation_size(v_table::regclass) = 0;
        BEGIN
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE NOWAIT', v_table);
            EXECUTE format('TRUNCATE %I', v_table);
            v_truncated := v_truncated + 1;
        EXCEPTION WHEN lock_not_available THEN
            -- Somebody reads it in a transaction left open; the next evaluation tries again.
            CONTINUE;
        END;
    END LOOP;
    RETURN v_truncated;
END
$$;

COMMENT ON FUNCTION messages._rotate_bodies IS
    'Empty the spare tables; answers how many. Never waits. The cost does not depend on what is kept.';


CREATE OR REPLACE FUNCTION messages.get_data(
    message text
)
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_node record;
    v_dkey text;
    v_key text[];
    v_body record;
    v_topic text;
BEGIN
    PERFORM messages._log_command('get_data');
    SELECT * INTO v_node FROM messages._acting();
    IF v_node.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    PERFORM messages._evaluate_if_due();
    BEGIN
        v_dkey := split_part(message, E'\n', 1)::json ->> 'Dkey';
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        v_dkey := NULL;
    END;
    IF v_dkey IS NULL THEN
        RETURN messages._error(52);
    END IF;
    v_key := regexp_match(v_dkey, '^[0-9]{1,10}[.]([0-9]|1[0-9]|20)[.]([0-9]{1,15})[.]([0-9a-f]{32})$');
    IF v_key IS NULL THEN
        RETURN messages._error(13, left(v_dkey, 100));
    ELSIF v_key[2]::bigint < extract(epoch FROM clock_timestamp()) * 1000 THEN
        RETURN messages._error(12, v_dkey);
    END IF;
    -- One partition only: a look through the parent would lock them all, and hold up truncation.
    EXECUTE format(
        'SELECT b.topic_id, b.client_id, b.header, b.body FROM psqlmessages_body_%s AS b '
        'WHERE b.slot = $1 AND b.id = $2 AND b.expires_at > clock_timestamp()', v_key[1]
    )
    INTO v_body USING v_key[1]::smallint, v_key[3]::uuid;
    IF v_body.client_id = v_node.id OR messages._receives(v_node.id, v_body.topic_id) THEN
        RETURN '{"Err":"0",' || v_body.header || E'}\n' || v_body.body;
    END IF;
    SELECT t.name INTO v_topic FROM psqlmessages_topic AS t WHERE t.id = v_body.topic_id;
    IF (SELECT r.can_read FROM messages._rights(v_node.role, v_node.ident, 'Topic', v_topic) AS r) THEN
        RETURN messages._error(11, v_topic);
    END IF;
    RETURN messages._error(13, v_dkey);
END
$$;

COMMENT ON FUNCTION messages.get_data IS
    'Fetch the body that a payload with Dkey announces: a JSON line, a newline, the body; on an error that line alone. Errors: 50, 52, 12, 13, 11.';


CREATE OR REPLACE FUNCTION messages._listens(
    node bigint,
    topic_id bigint
)
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT EXISTS (
        SELECT FROM psqlmessages_membership AS m
        WHERE m.client_id = node AND m.topic_id = _listens.topic_id AND m.kind = 'listen'
    )
$$;

COMMENT ON FUNCTION messages._listens IS
    'Whether a node listens to a topic.';


CREATE OR REPLACE FUNCTION messages._receives(
    node bigint,
    topic_id bigint
)
RETURNS boolean
LANGUAGE sql
STABLE
AS $$
    SELECT messages._listens(node, topic_id) OR EXISTS (
        SELECT FROM psqlmessages_topic AS t
        JOIN psqlmessages_observation AS o ON o.pattern = ANY (messages._patterns(t.name))
        WHERE t.id = _receives.topic_id AND o.client_id = node
    )
$$;

COMMENT ON FUNCTION messages._receives IS
    'Whether a node listens to a topic or observes it.';
