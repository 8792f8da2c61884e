-- Prepare the tables for an installation or a removal: take all locks, then rename and alter the tables of an earlier
-- development state. The locks are those that the numbered scripts need. If a call holds one of them and waits for
-- another, release all and try again, before PostgreSQL detects a deadlock and ends the call. If the setting
-- messages.locks is 'all', also take the locks for dropping every table, view and sequence. No lock is taken to drop a
-- trigger that only an older version had, or to add the column role_identity: then a call may end in a deadlock.

DO $$
DECLARE
    v_locks text[];
    v_lock text;
    v_began timestamp with time zone;
    v_timeout text := current_setting('lock_timeout');
    v_is_renamed boolean := to_regclass('messages._gate') IS NOT NULL;
    v_has_writers boolean := EXISTS (
        SELECT FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = to_regclass('messages._queues') AND a.attname = 'pending_writers'
    );
    -- At most 800 ms, because calls wait meanwhile, and less than deadlock_timeout (one second by default), after which
    -- PostgreSQL ends a waiting call.
    v_limit_ms float := least(
        800, 0.8 * (SELECT s.setting::float FROM pg_catalog.pg_settings AS s WHERE s.name = 'deadlock_timeout')
    );
BEGIN
    -- The scripts alter these tables. The locks do not block readers of rules, and block readers of topics only if
    -- a column is renamed below.
    SELECT array_agg(format('LOCK TABLE %s IN %s MODE', to_regclass(t.name), t.mode) ORDER BY t.turn) INTO v_locks
    FROM (VALUES
        (1, 'psqlmessages_auth', 'SHARE ROW EXCLUSIVE'),
        (2, 'psqlmessages_topic', CASE WHEN v_is_renamed THEN 'ACCESS EXCLUSIVE' ELSE 'SHARE ROW EXCLUSIVE' END),
        (3, 'psqlmessages_membership', 'SHARE'), (4, 'messages._housekeeping_request', 'ACCESS EXCLUSIVE'),
        (5, 'messages.staged', 'ACCESS EXCLUSIVE'), (6, 'messages._batch', 'SHARE'),
        (7, 'messages._scan_start', 'SHARE'), (8, 'messages._gate', 'ACCESS EXCLUSIVE'),
        (9, CASE WHEN v_is_renamed THEN 'messages._stream' END, 'ACCESS EXCLUSIVE'),
        (10, CASE WHEN NOT v_has_writers THEN 'messages._queues' END, 'ACCESS EXCLUSIVE'),
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

-- Rename and alter the tables of an earlier development state, before the numbered scripts run. Other databases do not
-- change, because until 1.0 the migrations and scripts are rewritten and create the current tables.

DO $$
DECLARE
    v_statement text;
BEGIN
    IF to_regclass('messages._gate') IS NOT NULL THEN
        ALTER TABLE messages._gate DROP COLUMN IF EXISTS version, DROP COLUMN IF EXISTS role_memberships;
        ALTER TABLE IF EXISTS messages._queues ADD COLUMN IF NOT EXISTS is_clock_back boolean NOT NULL DEFAULT false;
        ALTER TABLE IF EXISTS messages._stream ADD COLUMN IF NOT EXISTS secret bytea NOT NULL
            DEFAULT sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));
        ALTER TABLE IF EXISTS messages.staged SET LOGGED;
    END IF;
    FOR v_statement IN
        WITH columns AS (
            SELECT to_regclass(v.relation) AS relation, v.old, v.new
            FROM (VALUES
                ('psqlmessages_topic', 'wakes', 'subscriber_channels'),
                ('messages._evaluation', 'pid', 'xact'),
                ('messages._queues', 'tended_at', 'maintained_at'),
                ('messages._stream', 'tended_at', 'maintained_at'),
                ('messages._stream', 'cleared_at', 'garbage_removed_at')
            ) AS v (relation, old, new)
        ), relations AS (
            SELECT to_regclass('messages._' || v.old) AS relation, v.old, v.new
            FROM (VALUES
                ('gate', 'rules_lock'),
                ('evaluation', 'housekeeping_request'),
                ('stream_last', 'last_removed_message'),
                ('stream_gone', 'removed_topic'),
                ('rechecks_rest_until', 'rechecks_paused_until')
            ) AS v (old, new)
        )
        SELECT s.statement
        FROM (
            SELECT 1 AS turn, format(
                'ALTER TABLE %s RENAME CONSTRAINT %I TO %I', n.relation, c.conname, replace(c.conname, n.old, n.new)
            ) AS statement
            FROM (TABLE columns UNION ALL TABLE relations) AS n
            JOIN pg_catalog.pg_constraint AS c ON c.conrelid = n.relation AND strpos(c.conname, n.old) > 0
            UNION ALL
            SELECT 2, format('ALTER TABLE %s RENAME %I TO %I', n.relation, n.old, n.new)
            FROM columns AS n
            JOIN pg_catalog.pg_attribute AS a ON a.attrelid = n.relation AND a.attname = n.old
            UNION ALL
            SELECT 3, format('ALTER TABLE %s RENAME TO %I', n.relation, '_' || n.new)
            FROM relations AS n WHERE n.relation IS NOT NULL
            UNION ALL
            SELECT 4, 'ALTER TABLE messages._queues ADD COLUMN pending_writers text[] NOT NULL DEFAULT ''{}'''
            FROM pg_catalog.pg_class AS c
            WHERE c.oid = to_regclass('messages._queues') AND NOT EXISTS (
                SELECT FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = c.oid AND a.attname = 'pending_writers'
            )
        ) AS s
        ORDER BY s.turn
    LOOP
        EXECUTE v_statement;
    END LOOP;
END
$$;
