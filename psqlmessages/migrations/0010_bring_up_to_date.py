"""Update a database with an earlier development state of this version.

Until 1.0 the earlier migrations are rewritten, so this changes nothing in a new database.
"""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL

TABLES = """
    ALTER TABLE psqlmessages_element ADD COLUMN IF NOT EXISTS wait_began_at timestamp with time zone;
    ALTER TABLE psqlmessages_queue ADD COLUMN IF NOT EXISTS is_removed boolean NOT NULL DEFAULT false;
    ALTER TABLE psqlmessages_queuecount ADD COLUMN IF NOT EXISTS removes bigint NOT NULL DEFAULT 0;
    ALTER TABLE psqlmessages_auth
        DROP CONSTRAINT IF EXISTS rule_mode_is_known,
        DROP CONSTRAINT IF EXISTS rule_to_administer_is_for_a_queue,
        ADD CONSTRAINT rule_mode_is_known CHECK (mode IN ('W', 'R', 'RW', 'O', 'A')),
        ADD CONSTRAINT rule_to_administer_is_for_a_queue CHECK (mode <> 'A' OR type = 'Queue');
"""


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0009_reinstall")]

    operations: ClassVar = [
        migrations.RunSQL(TABLES, reverse_sql=migrations.RunSQL.noop),
        ReinstallSQL(),
    ]
