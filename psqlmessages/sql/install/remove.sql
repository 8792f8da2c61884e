-- To be run after drop_code.sql: remove the schema, the large bodies and the streams. Django removes the other tables.

DO $$
DECLARE
    v_object record;
BEGIN
    DROP TABLE IF EXISTS psqlmessages_body;
    IF to_regnamespace('messages') IS NULL THEN
        -- The schema was dropped by hand.
        DROP TABLE IF EXISTS psqlmessages_streammessage;
        RETURN;
    END IF;
    -- Removing the stored messages: mark the subscriptions that miss some of them, and move all positions to the end.
    UPDATE psqlmessages_subscription AS s
    SET position = pg_sequence_last_value('messages._stream_id'),
        is_recovered = s.is_recovered AND NOT EXISTS (
            SELECT FROM psqlmessages_topic AS t JOIN psqlmessages_streammessage AS m ON m.topic_id = t.id
            WHERE t.name = s.topic AND m.id > s.position
            UNION ALL
            SELECT FROM psqlmessages_topic AS t JOIN messages._last_removed_message AS k ON k.topic_id = t.id
            WHERE t.name = s.topic AND k.id > s.position
            UNION ALL
            SELECT FROM messages._removed_topic AS g WHERE g.topic = s.topic AND g.id > s.position
        );
    FOR v_object IN
        SELECT c.oid::regclass AS name,
               CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'messages'::regnamespace AND c.relkind IN ('S', 'r')
          -- Not the sequences of identity columns, which are dropped with their tables.
          AND NOT EXISTS (
              SELECT FROM pg_catalog.pg_depend AS d
              WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'i'
          )
    LOOP
        EXECUTE format('DROP %s %s', v_object.kind, v_object.name);
    END LOOP;
    DROP TABLE IF EXISTS psqlmessages_streammessage;
    DROP SCHEMA messages;
END
$$;
