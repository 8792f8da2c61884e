-- Remove what drop_code.sql leaves of the schema, the kept bodies and streams; the other tables are Django's.

DO $$
DECLARE
    v_object record;
BEGIN
    FOR v_object IN
        SELECT c.oid::regclass AS name,
               CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'messages'::regnamespace AND c.relkind IN ('S', 'r')
    LOOP
        EXECUTE format('DROP %s %s', v_object.kind, v_object.name);
    END LOOP;
    DROP TABLE IF EXISTS psqlmessages_body, psqlmessages_streammessage;
    DROP SCHEMA messages;
END
$$;
