"""Update a database with an earlier development state of this version.

Until 1.0 the earlier migrations are rewritten, so this changes nothing in a new database.
"""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL

# Alters only tables that lack something. ALTER TABLE with IF NOT EXISTS locks the others too, in
# another order than calls do, which then may end in a deadlock.
TABLES = """
DO $$
DECLARE
    v_statement text;
BEGIN
    FOR v_statement IN
        SELECT format('ALTER TABLE psqlmessages_%s ADD COLUMN %s %s', n.relation, n.name, n.definition)
        FROM (VALUES
            ('element', 'wait_began_at', 'timestamp with time zone'),
            ('queue', 'is_removed', 'boolean NOT NULL DEFAULT false'),
            ('queuecount', 'removes', 'bigint NOT NULL DEFAULT 0')
        ) AS n (relation, name, definition)
        WHERE NOT EXISTS (
            SELECT FROM pg_attribute AS a
            WHERE a.attrelid = to_regclass('psqlmessages_' || n.relation) AND a.attname = n.name
        )
    LOOP
        EXECUTE v_statement;
    END LOOP;
    IF NOT EXISTS (
        SELECT FROM pg_constraint AS c
        WHERE c.conrelid = to_regclass('psqlmessages_auth') AND c.conname = 'rule_to_administer_is_for_a_queue'
    ) THEN
        ALTER TABLE psqlmessages_auth
            DROP CONSTRAINT IF EXISTS rule_mode_is_known,
            ADD CONSTRAINT rule_mode_is_known CHECK (mode IN ('W', 'R', 'RW', 'O', 'A')),
            ADD CONSTRAINT rule_to_administer_is_for_a_queue CHECK (mode <> 'A' OR type = 'Queue');
    END IF;
END
$$;
"""


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0009_reinstall")]

    operations: ClassVar = [
        migrations.RunSQL(TABLES, reverse_sql=migrations.RunSQL.noop),
        ReinstallSQL(),
    ]
