-- The tables of bodies, each named in a statement of its own: through the parent all would be opened
-- and locked, and a dynamic statement would be planned anew each time.

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
    CASE slot
    WHEN 0 THEN INSERT INTO psqlmessages_body_0 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 1 THEN INSERT INTO psqlmessages_body_1 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 2 THEN INSERT INTO psqlmessages_body_2 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 3 THEN INSERT INTO psqlmessages_body_3 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 4 THEN INSERT INTO psqlmessages_body_4 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 5 THEN INSERT INTO psqlmessages_body_5 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 6 THEN INSERT INTO psqlmessages_body_6 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 7 THEN INSERT INTO psqlmessages_body_7 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 8 THEN INSERT INTO psqlmessages_body_8 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 9 THEN INSERT INTO psqlmessages_body_9 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 10 THEN INSERT INTO psqlmessages_body_10 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 11 THEN INSERT INTO psqlmessages_body_11 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 12 THEN INSERT INTO psqlmessages_body_12 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 13 THEN INSERT INTO psqlmessages_body_13 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 14 THEN INSERT INTO psqlmessages_body_14 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 15 THEN INSERT INTO psqlmessages_body_15 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 16 THEN INSERT INTO psqlmessages_body_16 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 17 THEN INSERT INTO psqlmessages_body_17 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 18 THEN INSERT INTO psqlmessages_body_18 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 19 THEN INSERT INTO psqlmessages_body_19 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    WHEN 20 THEN INSERT INTO psqlmessages_body_20 VALUES (slot, id, topic_id, client_id, expires_at, header, body);
    END CASE;
    RETURN id;
END
$$;

COMMENT ON FUNCTION messages._insert_body IS
    'Insert a body into the table of its slot; answers its id.';


CREATE OR REPLACE FUNCTION messages._select_body(
    slot int,
    key uuid,
    OUT topic_id bigint,
    OUT client_id bigint,
    OUT is_ours boolean,
    OUT answer text
)
LANGUAGE plpgsql
AS $$
BEGIN
    CASE slot
    WHEN 0 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_0 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 0 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 1 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_1 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 1 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 2 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_2 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 2 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 3 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_3 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 3 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 4 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_4 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 4 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 5 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_5 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 5 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 6 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_6 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 6 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 7 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_7 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 7 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 8 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_8 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 8 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 9 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_9 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 9 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 10 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_10 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 10 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 11 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_11 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 11 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 12 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_12 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 12 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 13 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_13 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 13 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 14 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_14 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 14 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 15 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_15 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 15 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 16 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_16 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 16 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 17 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_17 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 17 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 18 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_18 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 18 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 19 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_19 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 19 AND b.id = key AND b.expires_at > clock_timestamp();
    WHEN 20 THEN
        SELECT b.topic_id, b.client_id, m.id IS NOT NULL, '{"Err":"0",' || b.header || E'}\n' || b.body
        INTO topic_id, client_id, is_ours, answer
        FROM psqlmessages_body_20 AS b
        LEFT JOIN psqlmessages_membership AS m ON m.topic_id = b.topic_id AND m.kind = 'listen'
            AND m.client_id::text = current_setting('messages.node', true)
            AND m.channel = current_setting('messages.channel', true)
            AND m.pid = pg_backend_pid() AND m.role = session_user
        WHERE b.slot = 20 AND b.id = key AND b.expires_at > clock_timestamp();
    ELSE NULL;
    END CASE;
END
$$;

COMMENT ON FUNCTION messages._select_body IS
    'Find a body that has not expired in the table of its slot; answers it as get_data does. is_ours: the acting node listens to its topic.';
