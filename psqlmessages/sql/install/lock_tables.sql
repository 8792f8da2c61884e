-- Take all locks that the numbered scripts need, before they change anything. If a call holds one of them and waits for
-- another, release all and try again, before PostgreSQL detects a deadlock and ends the call. If the setting
-- messages.locks is 'all', also take the locks for dropping every table, view and sequence. It takes no lock for dropping
-- a trigger that only an older version had, or for adding the column role_identity: then a call may end in a deadlock.

DO $$
DECLARE
    v_locks text[];
    v_lock text;
    v_began timestamp with time zone;
    v_timeout text := current_setting('lock_timeout');
    v_is_renamed boolean := to_regclass('messages._gate') IS NOT NULL;
    -- At most 800 ms, because calls wait meanwhile, and less than deadlock_timeout (one second by default), after which
    -- PostgreSQL ends a waiting call.
    v_limit_ms float := least(
        800, 0.8 * (SELECT s.setting::float FROM pg_catalog.pg_settings AS s WHERE s.name = 'deadlock_timeout')
    );
BEGIN
    -- The scripts alter these tables. The locks do not block readers of rules, and block readers of topics only if
    -- upgrade_tables.sql renames a column.
    SELECT array_agg(format('LOCK TABLE %s IN %s MODE', to_regclass(t.name), t.mode) ORDER BY t.turn) INTO v_locks
    FROM (VALUES
        (1, 'psqlmessages_auth', 'SHARE ROW EXCLUSIVE'),
        (2, 'psqlmessages_topic', CASE WHEN v_is_renamed THEN 'ACCESS EXCLUSIVE' ELSE 'SHARE ROW EXCLUSIVE' END),
        (3, 'psqlmessages_membership', 'SHARE'), (4, 'messages._housekeeping_request', 'ACCESS EXCLUSIVE'),
        (5, 'messages.staged', 'ACCESS EXCLUSIVE'), (6, 'messages._batch', 'SHARE'),
        (7, 'messages._scan_start', 'SHARE'), (8, 'messages._gate', 'ACCESS EXCLUSIVE'),
        (9, CASE WHEN v_is_renamed THEN 'messages._stream' END, 'ACCESS EXCLUSIVE'),
        (10, CASE WHEN v_is_renamed THEN 'messages._queues' END, 'ACCESS EXCLUSIVE'),
        (11, 'messages._stream_last', 'ACCESS EXCLUSIVE'), (12, 'messages._stream_gone', 'ACCESS EXCLUSIVE'),
        (13, 'messages._evaluation', 'ACCESS EXCLUSIVE')
    ) AS t (turn, name, mode)
    WHERE to_regclass(t.name) IS NOT NULL;
    IF current_setting('messages.locks', true) = 'all' THEN
        -- LOCK TABLE does not accept sequences; ALTER with the same owner locks one and changes nothing.
        SELECT array_agg(
            CASE c.relkind
                WHEN 'S' THEN format('ALTER SEQUENCE %s OWNER TO %I', c.oid::regclass, pg_get_userbyid(c.relowner))
                ELSE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', c.oid::regclass)
            END
            ORDER BY c.relkind <> 'S', c.relname
        ) INTO v_locks
        FROM pg_catalog.pg_class AS c
        WHERE (c.relnamespace = to_regnamespace('messages') AND c.relkind IN ('r', 'p', 'S')
           OR c.relnamespace = to_regnamespace('public') AND c.relkind IN ('r', 'p')
              AND c.relname LIKE 'psqlmessages\_%') AND NOT c.relispartition
          -- Not the sequences of identity columns: they are dropped with their tables, which callers lock first.
          AND NOT (c.relkind = 'S' AND EXISTS (
              SELECT FROM pg_catalog.pg_depend AS d
              WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'i'
          ))
          -- Not a table of another owner with such a name, for instance a copy: locking it may not be allowed.
          AND pg_has_role(c.relowner, 'USAGE');
    END IF;
    -- Views first, because queries lock a view before its tables. LOCK TABLE would also lock the system catalogs that
    -- the view reads; ALTER with the same owner locks only the view and changes nothing.
    SELECT array_agg(format('ALTER VIEW %s OWNER TO %I', c.oid::regclass, pg_get_userbyid(c.relowner))) || v_locks
    INTO v_locks
    FROM pg_catalog.pg_class AS c
    WHERE c.relnamespace = to_regnamespace('messages') AND c.relkind = 'v';
    FOR v_try IN 1 .. 100 LOOP
        BEGIN
            v_began := clock_timestamp();
            FOREACH v_lock IN ARRAY coalesce(v_locks, '{}') LOOP
                -- A transaction that locks in another order may wait for these locks: stop waiting and release them
                -- before PostgreSQL detects the deadlock.
                PERFORM set_config('lock_timeout', greatest(
                    1, v_limit_ms - 1000 * extract(epoch FROM clock_timestamp() - v_began)
                )::int::text, true);
                EXECUTE v_lock;
            END LOOP;
            PERFORM set_config('lock_timeout', v_timeout, true);
            RETURN;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            -- Start with this lock next time: its holders may have waited for the other locks.
            v_locks := v_lock || array_remove(v_locks, v_lock);
            PERFORM pg_sleep(0.2);
        END;
    END LOOP;
    RAISE EXCEPTION 'the functions of psqlmessages are in use by a transaction that does not end'
        USING ERRCODE = 'lock_not_available',
            HINT = 'See pg_stat_activity for "idle in transaction" and for pg_dump, and try again.';
END
$$;
