"""Exchanges: definitions and counts. Only Django reads and writes them."""

import django.contrib.postgres.fields
import django.db.models.constraints
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import psqlmessages.models.names


class Migration(migrations.Migration):
    dependencies = [
        ("psqlmessages", "0004_web"),
    ]

    operations = [
        migrations.CreateModel(
            name="Exchange",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", psqlmessages.models.names.NameField(db_collation="C", max_length=90)),
                (
                    "source_namespace",
                    models.CharField(
                        default="default",
                        help_text="An alias of DATABASES.",
                        max_length=100,
                        verbose_name="namespace of the source",
                    ),
                ),
                (
                    "source_queue",
                    psqlmessages.models.names.NameField(db_collation="C", max_length=100),
                ),
                (
                    "parallel",
                    models.SmallIntegerField(
                        default=1, help_text="Consumers in each worker process, 1 to 16."
                    ),
                ),
                (
                    "wsize",
                    models.SmallIntegerField(
                        default=100,
                        help_text="Maximum number of elements that a process takes at a time, 1 to 4096.",
                        verbose_name="window size",
                    ),
                ),
                (
                    "reserve",
                    models.BooleanField(
                        default=True,
                        help_text="Reserve elements until every destination in another namespace has its copy. Otherwise copies that fail there are lost.",
                    ),
                ),
                ("is_running", models.BooleanField(default=True, verbose_name="running")),
                ("changed_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "ordering": ["name"],
                "constraints": [
                    models.UniqueConstraint(fields=("name",), name="exchange_name_is_unique"),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("name", ""), _negated=True),
                            models.Q(("name__endswith", "*"), _negated=True),
                        ),
                        name="exchange_name_is_no_pattern",
                        violation_error_message="An exchange needs a name that does not end in *.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("source_queue", ""), _negated=True),
                            models.Q(("source_queue__endswith", "*"), _negated=True),
                        ),
                        name="exchange_source_is_no_pattern",
                        violation_error_message="The source must be a queue name and cannot end in *.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("parallel__range", (1, 16))),
                        name="exchange_parallel_is_within_bounds",
                        violation_error_message="An exchange has 1 to 16 consumers in each process.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("wsize__range", (1, 4096))),
                        name="exchange_wsize_is_within_bounds",
                        violation_error_message="A window has 1 to 4096 elements.",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Destination",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("position", models.SmallIntegerField()),
                (
                    "namespace",
                    models.CharField(
                        default="default", help_text="An alias of DATABASES.", max_length=100
                    ),
                ),
                ("queue", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                (
                    "selector",
                    models.TextField(
                        blank=True,
                        default="",
                        help_text="A CEL expression, or @ and the name of a selector in code. Empty: every element.",
                    ),
                ),
                (
                    "exchange",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="destinations",
                        to="psqlmessages.exchange",
                    ),
                ),
            ],
            options={
                "ordering": ["exchange", "position"],
                "constraints": [
                    models.UniqueConstraint(
                        deferrable=django.db.models.constraints.Deferrable["DEFERRED"],
                        fields=("exchange", "position"),
                        name="destination_position_is_unique",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("queue", ""), _negated=True),
                            models.Q(("queue__endswith", "*"), _negated=True),
                        ),
                        name="destination_is_no_pattern",
                        violation_error_message="The destination must be a queue name and cannot end in *.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("position__gte", 0)),
                        name="destination_position_is_not_negative",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="ExchangeCount",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("worker", models.UUIDField()),
                (
                    "outcome",
                    models.CharField(
                        choices=[
                            ("ok", "routed"),
                            ("no_route", "no route"),
                            ("too_many_hops", "too many hops"),
                            ("failed", "failed"),
                            ("to", "copies"),
                            ("bad_selector", "failed selectors"),
                        ],
                        db_collation="C",
                        max_length=13,
                    ),
                ),
                ("destination", models.SmallIntegerField(default=-1)),
                ("count", models.BigIntegerField(db_default=0)),
                ("seconds", models.FloatField(db_default=0)),
                (
                    "buckets",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.BigIntegerField(), db_default=[], size=None
                    ),
                ),
                ("selector_seconds", models.FloatField(db_default=0)),
                (
                    "seen_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                (
                    "exchange",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="counts",
                        to="psqlmessages.exchange",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("exchange", "worker", "outcome", "destination"),
                        name="exchange_count_is_unique",
                    )
                ],
            },
        ),
    ]
