-- Wait until nobody is in the midst of a call, and let nobody in until the end of this transaction.

DO $$
DECLARE
    v_tables text;
    v_view record;
    v_timeout text := current_setting('lock_timeout');
BEGIN
    -- In the order in which calls come to them: then whoever is let through to the first of them finds
    -- the others free.
    SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY coalesce(o.place, 0), c.relname) INTO v_tables
    FROM pg_catalog.pg_class AS c
    LEFT JOIN unnest(ARRAY[
        'psqlmessages_session', 'psqlmessages_auth', '_gate', 'psqlmessages_client', 'psqlmessages_topic',
        'psqlmessages_membership', 'psqlmessages_observation', 'psqlmessages_subscription', 'psqlmessages_queue',
        'psqlmessages_element', 'psqlmessages_elementkey', 'psqlmessages_queuecount', 'psqlmessages_streammessage',
        'psqlmessages_body', '_stream', '_queues', '_evaluation'
    ]) WITH ORDINALITY AS o (name, place) ON o.name = c.relname
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
      AND (c.relnamespace = to_regnamespace('messages')
           OR c.relnamespace = 'public'::regnamespace AND c.relname LIKE 'psqlmessages\_%');
    IF v_tables IS NULL THEN
        RETURN;
    END IF;
    -- Who took them in another order waits for us, and we for it: let go then, before PostgreSQL looks
    -- for deadlocks and ends one of the two.
    FOR v_try IN 1 .. 100 LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '200ms', true);
            -- Who reads a view has locked it before its tables. LOCK TABLE would also want to lock the
            -- views of PostgreSQL in it; this locks the view alone, and changes nothing.
            FOR v_view IN
                SELECT c.oid::regclass AS name, pg_get_userbyid(c.relowner) AS owner
                FROM pg_catalog.pg_class AS c
                WHERE c.relnamespace = to_regnamespace('messages') AND c.relkind = 'v'
            LOOP
                EXECUTE format('ALTER VIEW %s OWNER TO %I', v_view.name, v_view.owner);
            END LOOP;
            EXECUTE 'LOCK TABLE ' || v_tables || ' IN ACCESS EXCLUSIVE MODE';
            PERFORM set_config('lock_timeout', v_timeout, true);
            RETURN;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            PERFORM pg_sleep(0.3);
        END;
    END LOOP;
    RAISE EXCEPTION 'the functions of psqlmessages are in use by a transaction that does not end'
        USING ERRCODE = 'lock_not_available',
            HINT = 'See pg_stat_activity for "idle in transaction" and for pg_dump, and try again.';
END
$$;
