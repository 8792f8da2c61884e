-- Drop all views and functions of the schema messages, and the triggers that call them, except those whose oids the
-- setting messages.kept lists.

DO $$
DECLARE
    v_trigger record;
    v_drop text;
    v_dropped boolean := true;
    v_reason text;
    v_kept oid[] := string_to_array(current_setting('messages.kept', true), ',');
BEGIN
    FOR v_trigger IN
        SELECT t.tgname, t.tgrelid::regclass AS relation
        FROM pg_catalog.pg_trigger AS t
        JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
        WHERE p.pronamespace = to_regnamespace('messages') AND NOT t.tgisinternal
          AND t.oid <> ALL (coalesce(v_kept, '{}'))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', v_trigger.tgname, v_trigger.relation);
    END LOOP;
    -- Views and functions may depend on each other: repeat until nothing can be dropped.
    WHILE v_dropped LOOP
        v_dropped := false;
        v_reason := NULL;
        FOR v_drop IN
            SELECT format('DROP VIEW %s', c.oid::regclass)
            FROM pg_catalog.pg_class AS c
            WHERE c.relnamespace = to_regnamespace('messages') AND c.relkind = 'v'
              AND c.oid <> ALL (coalesce(v_kept, '{}'))
            UNION ALL
            SELECT format('DROP FUNCTION %s', p.oid::regprocedure)
            FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = to_regnamespace('messages')
              AND p.oid <> ALL (coalesce(v_kept, '{}'))
        LOOP
            BEGIN
                EXECUTE v_drop;
                v_dropped := true;
            EXCEPTION WHEN dependent_objects_still_exist THEN
                GET STACKED DIAGNOSTICS v_reason = PG_EXCEPTION_DETAIL;
            END;
        END LOOP;
    END LOOP;
    IF v_reason IS NOT NULL THEN
        RAISE EXCEPTION 'the functions and views of psqlmessages cannot be dropped: %', v_reason
            USING ERRCODE = 'dependent_objects_still_exist',
                HINT = 'Drop the objects that depend on them first. After an update, create them again.';
    END IF;
END
$$;
