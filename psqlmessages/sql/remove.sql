-- Remove all that the numbered scripts installed; the Django tables stay, but for the kept bodies.

DO $$
DECLARE
    v_object record;
BEGIN
    FOR v_object IN
        SELECT t.tgname, t.tgrelid::regclass AS relation
        FROM pg_catalog.pg_trigger AS t
        JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
        WHERE p.pronamespace = 'messages'::regnamespace AND NOT t.tgisinternal
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', v_object.tgname, v_object.relation);
    END LOOP;
    FOR v_object IN
        SELECT p.oid::regprocedure AS signature
        FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = 'messages'::regnamespace
    LOOP
        EXECUTE format('DROP FUNCTION %s', v_object.signature);
    END LOOP;
    FOR v_object IN
        SELECT c.oid::regclass AS name,
               CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'messages'::regnamespace AND c.relkind IN ('v', 'S', 'r')
        ORDER BY c.relkind = 'v' DESC
    LOOP
        EXECUTE format('DROP %s %s', v_object.kind, v_object.name);
    END LOOP;
    DROP TABLE IF EXISTS psqlmessages_body;
    DROP SCHEMA messages;
END
$$;
