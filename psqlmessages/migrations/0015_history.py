"""History: counts per minute of topics and queues."""

from typing import ClassVar

from django.db import migrations, models

import psqlmessages.models.names


class Migration(migrations.Migration):
    dependencies: ClassVar = [
        ("psqlmessages", "0014_exchange_no_route"),
    ]

    operations: ClassVar = [
        migrations.CreateModel(
            name="HistoryPeriod",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[("topic", "Topic"), ("queue", "Queue")],
                        db_collation="C",
                        max_length=5,
                    ),
                ),
                ("starts_at", models.DateTimeField()),
                ("ends_at", models.DateTimeField(null=True)),
                ("pid", models.IntegerField()),
            ],
        ),
        migrations.CreateModel(
            name="QueueMinute",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("queue", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("minute", models.DateTimeField()),
                ("puts", models.BigIntegerField()),
                ("gets", models.BigIntegerField()),
                ("removes", models.BigIntegerField()),
                ("backlog", models.BigIntegerField()),
            ],
            options={
                "indexes": [models.Index(fields=["minute"], name="queue_minute_by_time")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("queue", "minute"), name="queue_minute_is_unique"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="TopicMinute",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("topic", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("minute", models.DateTimeField()),
                ("messages", models.BigIntegerField()),
                ("bytes", models.BigIntegerField()),
            ],
            options={
                "indexes": [models.Index(fields=["minute"], name="topic_minute_by_time")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("topic", "minute"), name="topic_minute_is_unique"
                    )
                ],
            },
        ),
    ]
