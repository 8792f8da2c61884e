-- Bring the tables of an earlier development state up to date, before the numbered scripts run. In other databases this
-- changes nothing, because until 1.0 the migrations and scripts are rewritten and create the current tables.

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
        ) AS s
        ORDER BY s.turn
    LOOP
        EXECUTE v_statement;
    END LOOP;
END
$$;
