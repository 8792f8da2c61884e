-- Large bodies: those over the NOTIFY limit are stored once per message, fetched with get_data, and removed by
-- TRUNCATE. The timeout of a body determines its class (up to 10 s, 100 s, ... 10^6 s, more). Each class has three
-- tables, which are filled in turn, each for one period as long as the longest timeout of the class. One full period
-- after that, all bodies of a table have expired. It is then the spare table of the class, and is truncated before it
-- is filled again.

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
        -- Without compression, which costs more than it saves for a body that is stored for seconds. ALTER only if
        -- needed: its exclusive lock may end in a deadlock with calls that wait for other locks of the installation.
        IF EXISTS (
            SELECT FROM pg_catalog.pg_attribute AS a
            WHERE a.attrelid = to_regclass('psqlmessages_body_' || v_slot) AND a.attname = 'body' AND a.attstorage <> 'e'
        ) THEN
            EXECUTE format('ALTER TABLE psqlmessages_body_%s ALTER body SET STORAGE EXTERNAL', v_slot);
        END IF;
    END LOOP;
END
$$;

-- The Django settings that these functions need; migrate writes them.
CREATE TABLE IF NOT EXISTS messages._settings (
    id boolean PRIMARY KEY DEFAULT true,
    max_body_bytes bigint NOT NULL DEFAULT 67108864,
    CONSTRAINT settings_have_one_row CHECK (id),
    CONSTRAINT max_body_bytes_is_sensible CHECK (max_body_bytes BETWEEN 8192 AND 536870912)
);
INSERT INTO messages._settings DEFAULT VALUES ON CONFLICT DO NOTHING;


CREATE OR REPLACE FUNCTION messages._body_slot(
    class int,
    periods_ahead int
)
RETURNS int
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    RETURN class * 3 + (
        date_part('epoch', clock_timestamp())::bigint
        / ('{10,100,1000,10000,100000,1000000,2147483647}'::int[])[class + 1] + periods_ahead
    ) % 3;
END
$$;

COMMENT ON FUNCTION messages._body_slot IS
    'The slot of the table that a timeout class fills now (periods_ahead 0) or in the next period (1): the spare table, in which all bodies have expired.';


CREATE OR REPLACE FUNCTION messages._store_body(
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
    v_class int := width_bucket(timeout, '{11,101,1001,10001,100001,1000001}'::int[]);
    v_slot int := messages._body_slot(v_class, 0);
    v_expires_ms bigint := (date_part('epoch', clock_timestamp()) + timeout) * 1000;
    v_id uuid;
BEGIN
    -- An assignment and not PERFORM, because a simple expression needs no executor.
    v_id := messages._insert_body(
        v_slot, gen_random_uuid(), topic_id, client_id, to_timestamp(v_expires_ms / 1000::float8), header, message
    );
    RETURN '{' || header || ',"Dkey":"' || timeout || '.' || v_slot || '.' || v_expires_ms || '.'
        || replace(v_id::text, '-', '') || '"}';
END
$$;

COMMENT ON FUNCTION messages._store_body IS
    'Store a body for the listeners of a topic or for one node, and return the payload to notify. Its Dkey: timeout, slot, expiry in ms since the epoch, random id.';


CREATE OR REPLACE FUNCTION messages._truncate_expired_bodies()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_table text;
    v_truncated int := 0;
BEGIN
    FOR v_class IN 0 .. 6 LOOP
        v_table := format('psqlmessages_body_%s', messages._body_slot(v_class, 1));
        CONTINUE WHEN pg_relation_size(v_table::regclass) = 0;
        BEGIN
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE NOWAIT', v_table);
            EXECUTE format('TRUNCATE %I', v_table);
            v_truncated := v_truncated + 1;
        EXCEPTION WHEN lock_not_available THEN
            -- An open transaction reads it. The next housekeeping tries again.
            CONTINUE;
        END;
    END LOOP;
    RETURN v_truncated;
END
$$;

COMMENT ON FUNCTION messages._truncate_expired_bodies IS
    'Truncate the spare tables, except empty and locked ones, and return how many it truncated. Never waits. The cost does not depend on the number of bodies.';


CREATE OR REPLACE FUNCTION messages._is_listener(
    node bigint,
    topic_id bigint
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM psqlmessages_membership AS m
        WHERE m.client_id = node AND m.topic_id = _is_listener.topic_id AND m.kind = 'listen'
    ) AND (messages._rules_are_applied() OR coalesce((
        SELECT r.can_read FROM psqlmessages_client AS c
        CROSS JOIN psqlmessages_topic AS t
        CROSS JOIN LATERAL messages._permissions(c.role, c.ident, 'Topic', t.name) AS r
        WHERE c.id = node AND t.id = _is_listener.topic_id
    ), false));
END
$$;

COMMENT ON FUNCTION messages._is_listener IS
    'Whether a node listens to a topic and may still read it.';


CREATE OR REPLACE FUNCTION messages.get_data(
    message text
)
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_dkey text;
    v_slot text;
    v_body record;
    v_node record;
    v_topic text;
BEGIN
    BEGIN
        v_dkey := split_part(message, E'\n', 1)::json ->> 'Dkey';
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        v_dkey := NULL;
    END;
    -- Counted repetitions such as {32} would make this regular expression take 50 microseconds.
    v_slot := substring(v_dkey FROM '^[0-9]+[.](1?[0-9]|20)[.][0-9]+[.][0-9a-f]+$');
    -- A caller without a session must not lock a table: its open transaction would delay the TRUNCATE.
    IF v_slot IS NULL OR length(split_part(v_dkey, '.', 4)) <> 32 OR NOT EXISTS (
        SELECT FROM psqlmessages_session AS s
        WHERE s.channel = current_setting('messages.channel', true)
          AND s.pid = pg_backend_pid() AND s.role = session_user
    ) THEN
        v_body := messages._select_body(NULL, NULL);
    ELSE
        v_body := messages._select_body(v_slot::int, split_part(v_dkey, '.', 4)::uuid);
    END IF;
    IF v_body.has_listener AND messages._nothing_is_due() AND messages._rules_are_applied() THEN
        RETURN v_body.answer;
    END IF;
    v_node := messages._acting_node();
    IF v_node.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    PERFORM messages._log_command('get_data');
    PERFORM messages._schedule_housekeeping_if_due();
    IF v_body.client_id = v_node.id OR messages._is_listener(v_node.id, v_body.topic_id) THEN
        RETURN v_body.answer;
    ELSIF EXISTS (
        SELECT FROM psqlmessages_topic AS t
        JOIN psqlmessages_observation AS o ON o.pattern = ANY (messages._patterns(t.name))
        CROSS JOIN LATERAL messages._permissions(v_node.role, v_node.ident, 'Topic', o.pattern) AS r
        WHERE t.id = v_body.topic_id AND o.client_id = v_node.id AND r.can_observe
    ) THEN
        RETURN v_body.answer;
    ELSIF v_dkey IS NULL THEN
        RETURN messages._error(52);
    ELSIF (CASE
        WHEN v_dkey ~ '^[0-9]+[.][0-9]+[.][0-9]+[.][0-9a-f]+$' AND length(split_part(v_dkey, '.', 3)) <= 15
        THEN split_part(v_dkey, '.', 3)::bigint < extract(epoch FROM clock_timestamp()) * 1000
    END) THEN
        RETURN messages._error(12, left(v_dkey, 100));
    END IF;
    SELECT t.name INTO v_topic FROM psqlmessages_topic AS t WHERE t.id = v_body.topic_id;
    IF (SELECT r.can_read FROM messages._permissions(v_node.role, v_node.ident, 'Topic', v_topic) AS r) THEN
        RETURN messages._error(11, v_topic);
    END IF;
    RETURN messages._error(13, left(v_dkey, 100));
END
$$;

COMMENT ON FUNCTION messages.get_data IS
    'Fetch the stored body of a message. message: the payload received, which contains a Dkey. Returns a JSON line, a newline and the body, or on an error only the JSON line. Errors: 50, 52, 12, 13, 11.';


-- Two functions with one statement for each of the 21 tables of bodies. A statement on the parent table would open and
-- lock all of them, and a dynamic statement would be planned at each call.
DO $do$
DECLARE
    v_inserts text := '';
    v_selects text := '';
BEGIN
    FOR v_slot IN 0 .. 20 LOOP
        v_inserts := v_inserts || replace($sql$
    WHEN <slot> THEN INSERT INTO psqlmessages_body_<slot> VALUES (slot, id, topic_id, client_id, expires_at, header, body);
$sql$, '<slot>', v_slot::text);
        v_selects := v_selects || replace($sql$
    WHEN <slot> THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, has_listener, answer
        FROM psqlmessages_body_<slot> AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = <slot> AND b.id = key AND b.expires_at > clock_timestamp();
$sql$, '<slot>', v_slot::text);
    END LOOP;
    EXECUTE format($create$
CREATE OR REPLACE FUNCTION messages._insert_body(
    slot int,
    id uuid,
    topic_id bigint,
    client_id bigint,
    expires_at timestamp with time zone,
    header text,
    body text
)
RETURNS uuid
LANGUAGE plpgsql
AS $$
BEGIN
    CASE slot%s
    END CASE;
    RETURN id;
END
$$$create$, v_inserts);
    EXECUTE format($create$
CREATE OR REPLACE FUNCTION messages._select_body(
    slot int,
    key uuid,
    OUT topic_id bigint,
    OUT client_id bigint,
    OUT has_listener boolean,
    OUT answer text
)
LANGUAGE plpgsql
AS $$
BEGIN
    CASE slot%s
    ELSE NULL;
    END CASE;
END
$$$create$, v_selects);
END
$do$;

COMMENT ON FUNCTION messages._insert_body IS
    'Insert a body into the table of its slot and return its id.';

COMMENT ON FUNCTION messages._select_body IS
    'Find an unexpired body in the table of its slot. answer: the result of get_data; has_listener: whether the acting node listens to its topic. All null if there is none, or if slot is null.';
