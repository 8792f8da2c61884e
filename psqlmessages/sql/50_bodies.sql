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
    SELECT class * 3 + (
        (extract(epoch FROM clock_timestamp())::bigint / CASE class
            WHEN 0 THEN 10 WHEN 1 THEN 100 WHEN 2 THEN 1000 WHEN 3 THEN 10000
            WHEN 4 THEN 100000 WHEN 5 THEN 1000000 ELSE 2147483647
        END + turn) % 3
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
    v_slot int := messages._slot(
        CASE
            WHEN timeout <= 10 THEN 0 WHEN timeout <= 100 THEN 1 WHEN timeout <= 1000 THEN 2
            WHEN timeout <= 10000 THEN 3 WHEN timeout <= 100000 THEN 4 WHEN timeout <= 1000000 THEN 5
            ELSE 6
        END, 0
    );
    v_expires_ms bigint := extract(epoch FROM clock_timestamp()) * 1000 + timeout * 1000.0;
    v_id uuid := gen_random_uuid();
BEGIN
    INSERT INTO psqlmessages_body (slot, id, topic_id, client_id, expires_at, header, body)
    VALUES (v_slot, v_id, topic_id, client_id, to_timestamp(v_expires_ms / 1000.0), header, message);
    RETURN '{' || header || ',"Dkey":"' || timeout || '.' || v_slot || '.' || v_expires_ms || '.'
        || replace(v_id::text, '-', '') || '"}';
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


CREATE OR REPLACE FUNCTION messages._listens(
    node bigint,
    topic_id bigint
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM psqlmessages_membership AS m
        WHERE m.client_id = node AND m.topic_id = _listens.topic_id AND m.kind = 'listen'
    );
END
$$;

COMMENT ON FUNCTION messages._listens IS
    'Whether a node listens to a topic.';


CREATE OR REPLACE FUNCTION messages._receives(
    node bigint,
    topic_id bigint
)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN messages._listens(node, topic_id) OR EXISTS (
        SELECT FROM psqlmessages_topic AS t
        JOIN psqlmessages_observation AS o ON o.pattern = ANY (messages._patterns(t.name))
        WHERE t.id = _receives.topic_id AND o.client_id = node
    );
END
$$;

COMMENT ON FUNCTION messages._receives IS
    'Whether a node listens to a topic or observes it.';


CREATE OR REPLACE FUNCTION messages._dkey(
    message text
)
RETURNS text
LANGUAGE plpgsql
IMMUTABLE
AS $$
BEGIN
    RETURN split_part(message, E'\n', 1)::json ->> 'Dkey';
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._dkey IS
    'The key in a payload''s header, or null where that is no JSON or has none.';


CREATE OR REPLACE FUNCTION messages.get_data(
    message text
)
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_dkey text := messages._dkey(message);
    -- No counted repetitions: they make a regular expression take 50 microseconds.
    v_slot text := substring(v_dkey FROM '^[0-9]+[.](1?[0-9]|20)[.][0-9]+[.][0-9a-f]+$');
    v_node record;
    v_topic bigint;
    v_client bigint;
    v_answer text;
BEGIN
    SELECT * INTO v_node FROM messages._acting();
    IF v_node.id IS NULL THEN
        RETURN messages._error(50);
    ELSIF v_slot IS NOT NULL AND length(split_part(v_dkey, '.', 4)) = 32 THEN
        -- One partition only: a look through the parent would lock them all, and hold up truncation.
        EXECUTE 'SELECT b.topic_id, b.client_id, ''{"Err":"0",'' || b.header || E''}\n'' || b.body'
            ' FROM psqlmessages_body_' || v_slot || ' AS b'
            ' WHERE b.slot = $1 AND b.id = $2 AND b.expires_at > clock_timestamp()'
        INTO v_topic, v_client, v_answer USING v_slot::smallint, split_part(v_dkey, '.', 4)::uuid;
    END IF;
    IF current_setting('messages.evaluated', true)
            IS DISTINCT FROM extract(epoch FROM clock_timestamp())::bigint::text
        OR current_setting('client_min_messages') ^@ 'debug'
    THEN
        PERFORM messages._log_command('get_data');
        PERFORM messages._evaluate_if_due();
    END IF;
    IF v_client = v_node.id OR messages._receives(v_node.id, v_topic) THEN
        RETURN v_answer;
    END IF;
    RETURN messages._refuse_data(v_node.role, v_node.ident, v_dkey, v_topic);
END
$$;

COMMENT ON FUNCTION messages.get_data IS
    'Fetch the body that a payload with Dkey announces: a JSON line, a newline, the body; on an error that line alone. Errors: 50, 52, 12, 13, 11.';


CREATE OR REPLACE FUNCTION messages._has_expired(
    dkey text
)
RETURNS boolean
LANGUAGE sql
AS $$
    SELECT CASE
        WHEN dkey ~ '^[0-9]+[.][0-9]+[.][0-9]+[.][0-9a-f]+$' AND length(split_part(dkey, '.', 3)) <= 15
        THEN split_part(dkey, '.', 3)::bigint < extract(epoch FROM clock_timestamp()) * 1000
        ELSE false
    END
$$;

COMMENT ON FUNCTION messages._has_expired IS
    'Whether a key has the form of one, and is over by what it says itself.';


CREATE OR REPLACE FUNCTION messages._refuse_data(
    role text,
    ident text,
    dkey text,
    topic_id bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_topic text;
BEGIN
    IF dkey IS NULL THEN
        RETURN messages._error(52);
    ELSIF messages._has_expired(dkey) THEN
        RETURN messages._error(12, left(dkey, 100));
    END IF;
    SELECT t.name INTO v_topic FROM psqlmessages_topic AS t WHERE t.id = topic_id;
    IF (SELECT r.can_read FROM messages._rights(role, ident, 'Topic', v_topic) AS r) THEN
        RETURN messages._error(11, v_topic);
    END IF;
    RETURN messages._error(13, left(dkey, 100));
END
$$;

COMMENT ON FUNCTION messages._refuse_data IS
    'Why a node does not get a body.';
