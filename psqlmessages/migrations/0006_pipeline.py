"""Results of the pipeline. Only Django reads and writes them."""

import django.db.models.functions.datetime
from django.db import migrations, models

import psqlmessages.models.names


class Migration(migrations.Migration):
    dependencies = [
        ("psqlmessages", "0005_exchanges"),
    ]

    operations = [
        migrations.CreateModel(
            name="PipelineJob",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        db_collation="C",
                        max_length=100,
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("starting", "starting"),
                            ("running", "running"),
                            ("waiting", "waiting for the database"),
                            ("stopped", "stopped"),
                            ("failed", "failed"),
                        ],
                        db_collation="C",
                        max_length=8,
                    ),
                ),
                (
                    "started_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                (
                    "seen_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                (
                    "last_batch",
                    models.BigIntegerField(db_default=-1, help_text="-1: no batch yet."),
                ),
                ("last_batch_at", models.DateTimeField(null=True)),
                ("rows", models.BigIntegerField(db_default=0, help_text="Rows since the start.")),
                (
                    "rows_per_second",
                    models.FloatField(db_default=0, help_text="Rate of the last batches."),
                ),
                (
                    "lag_seconds",
                    models.FloatField(
                        help_text="Age of the oldest message not read yet. 0: all are read.",
                        null=True,
                    ),
                ),
                ("error", models.TextField(blank=True, db_default="")),
            ],
            options={
                "verbose_name": "pipeline job",
                "ordering": ["name"],
                "constraints": [
                    models.UniqueConstraint(fields=("name",), name="pipeline_job_name_is_unique")
                ],
            },
        ),
        migrations.CreateModel(
            name="Traffic",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("topic", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("sender", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                (
                    "window_seconds",
                    models.IntegerField(
                        choices=[(10, "10 seconds"), (60, "1 minute"), (3600, "1 hour")],
                        verbose_name="window",
                    ),
                ),
                ("starts_at", models.DateTimeField()),
                ("count", models.BigIntegerField(verbose_name="messages")),
                ("bytes", models.BigIntegerField()),
                ("size_p50", models.FloatField()),
                ("size_p95", models.FloatField()),
                ("size_p99", models.FloatField()),
                ("latency_p50", models.FloatField()),
                ("latency_p95", models.FloatField()),
                ("latency_p99", models.FloatField()),
            ],
            options={
                "verbose_name_plural": "traffic",
                "ordering": ["-starts_at", "window_seconds", "topic", "sender"],
                "indexes": [
                    models.Index(
                        fields=["topic", "window_seconds", "starts_at"], name="traffic_by_topic"
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("window_seconds", "starts_at", "topic", "sender"),
                        name="traffic_is_unique",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("window_seconds__in", (10, 60, 3600))),
                        name="traffic_window_is_known",
                    ),
                ],
            },
        ),
    ]
