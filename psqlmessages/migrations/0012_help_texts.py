"""Reword help texts of the admin. The database does not change."""

from typing import ClassVar

from django.db import migrations, models

import psqlmessages.models.names


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0011_exchange_missing_rules")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="auth",
            name="role",
            field=psqlmessages.models.names.RoleField(
                db_collation="C",
                help_text=(
                    "PostgreSQL role that the rule applies to; for a group role, all its members."
                ),
                max_length=63,
            ),
        ),
        migrations.AlterField(
            model_name="subscription",
            name="timeout",
            field=models.IntegerField(
                help_text="The subscription expires this many seconds after its last read."
            ),
        ),
    ]
