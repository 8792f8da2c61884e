"""Calls that lacked a rule, by node and rule."""

from typing import ClassVar

from django.db import migrations, models

import psqlmessages.models.names
from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0017_rule_timeout")]

    operations: ClassVar = [
        migrations.CreateModel(
            name="RefusedCall",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("ident", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("type", models.CharField(db_collation="C", max_length=5)),
                ("dest", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("mode", models.CharField(db_collation="C", max_length=2)),
                ("count", models.BigIntegerField()),
                ("first_at", models.DateTimeField()),
                ("last_at", models.DateTimeField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("ident", "type", "dest", "mode"), name="refused_call_is_unique"
                    )
                ],
            },
        ),
        ReinstallSQL(),
    ]
