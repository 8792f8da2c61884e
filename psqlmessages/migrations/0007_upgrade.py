"""Bring a database that an earlier state of this version installed up to date.

Until 1.0 the migrations before this one are rewritten in place: a new database has all of it.
"""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL

COLUMNS = """
    ALTER TABLE psqlmessages_element ADD COLUMN IF NOT EXISTS wait_began_at timestamp with time zone;
"""


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0006_pipeline")]

    operations: ClassVar = [
        migrations.RunSQL(COLUMNS, reverse_sql=migrations.RunSQL.noop),
        ReinstallSQL(),
    ]
