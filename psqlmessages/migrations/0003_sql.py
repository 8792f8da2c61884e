"""The SQL functions: they always equal the scripts under ``sql/``."""

from typing import ClassVar

from django.db import migrations, models

from psqlmessages.schema import InstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0002_queues")]

    operations: ClassVar = [
        InstallSQL("0.1", digest="6a2d09c7f9617ee5"),
        # The scripts create these tables, because Django cannot partition them.
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="Body",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "slot",
                                "id",
                                blank=True,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        ("slot", models.SmallIntegerField()),
                        ("id", models.UUIDField()),
                        ("topic_id", models.BigIntegerField(null=True)),
                        ("client_id", models.BigIntegerField(null=True)),
                        ("expires_at", models.DateTimeField()),
                        ("header", models.TextField(db_collation="C")),
                        ("body", models.TextField()),
                    ],
                    options={
                        "verbose_name_plural": "bodies",
                    },
                ),
                migrations.CreateModel(
                    name="StreamMessage",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "topic_id",
                                "id",
                                "slot",
                                blank=True,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        ("topic_id", models.BigIntegerField()),
                        ("id", models.BigIntegerField()),
                        ("slot", models.SmallIntegerField()),
                        ("sender", models.TextField(db_collation="C")),
                        ("published_at", models.DateTimeField()),
                        ("enc", models.TextField(null=True)),
                        ("payload", models.TextField()),
                    ],
                    options={
                        "verbose_name": "stream message",
                    },
                ),
            ],
        ),
    ]
