"""Queues, their elements, keys and counts."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import psqlmessages.models.names


class Migration(migrations.Migration):
    dependencies = [("psqlmessages", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Queue",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                (
                    "is_paused",
                    models.BooleanField(db_default=False, default=False, verbose_name="paused"),
                ),
                (
                    "max_tries",
                    models.IntegerField(
                        blank=True,
                        help_text="After this many failed attempts an element moves to the dead-letter queue. Empty: retry forever.",
                        null=True,
                    ),
                ),
                (
                    "dead_letter_queue",
                    psqlmessages.models.names.NameField(
                        db_collation="C",
                        db_default="__deadletter__",
                        default="__deadletter__",
                        help_text="The queue to which elements move after the last failed attempt.",
                        max_length=100,
                    ),
                ),
                (
                    "key_timeout",
                    models.IntegerField(
                        db_default=86400,
                        default=86400,
                        help_text="Seconds during which a second push with the same key adds nothing.",
                    ),
                ),
                (
                    "channel",
                    models.CharField(
                        db_collation="C", db_default="", editable=False, max_length=63
                    ),
                ),
                (
                    "awaited_until",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), editable=False
                    ),
                ),
                (
                    "is_removed",
                    models.BooleanField(db_default=False, default=False, editable=False),
                ),
            ],
            options={
                "ordering": ["name"],
                "constraints": [
                    models.UniqueConstraint(fields=("name",), name="queue_name_is_unique"),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("name", ""), _negated=True),
                            models.Q(("name__endswith", "*"), _negated=True),
                        ),
                        name="queue_name_is_no_pattern",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("dead_letter_queue", ""), _negated=True),
                            models.Q(("dead_letter_queue__endswith", "*"), _negated=True),
                        ),
                        name="queue_for_dead_letters_is_no_pattern",
                        violation_error_message="A dead-letter queue needs a name that does not end in *.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("max_tries__isnull", True), ("max_tries__gt", 0), _connector="OR"
                        ),
                        name="queue_max_tries_is_positive",
                        violation_error_message="The number of attempts is 1 or more, or empty for no limit.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("key_timeout__gt", 0)),
                        name="queue_key_timeout_is_positive",
                        violation_error_message="The key timeout is 1 second or more.",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Element",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "mature_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                (
                    "available_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                (
                    "pushed_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                ("wait_began_at", models.DateTimeField(null=True)),
                ("lease", models.UUIDField(null=True)),
                ("tries", models.IntegerField(db_default=0)),
                ("enc", models.TextField(null=True)),
                ("headers", models.JSONField(db_default={})),
                (
                    "delivered",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.TextField(), null=True, size=None
                    ),
                ),
                ("body", models.TextField()),
                (
                    "queue",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="elements",
                        to="psqlmessages.queue",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["queue", "available_at", "id"], name="element_by_availability"
                    ),
                    models.Index(
                        condition=models.Q(("lease__isnull", False)),
                        fields=["queue", "available_at"],
                        name="element_reserved",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("tries__gte", 0)), name="element_tries_are_not_negative"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="ElementKey",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("key", models.CharField(db_collation="C", max_length=200)),
                ("element_id", models.BigIntegerField()),
                ("expires_at", models.DateTimeField()),
                (
                    "queue",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="psqlmessages.queue",
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["expires_at"], name="element_key_by_expiry")],
                "constraints": [
                    models.UniqueConstraint(fields=("queue", "key"), name="element_key_is_unique")
                ],
            },
        ),
        migrations.CreateModel(
            name="QueueCount",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("puts", models.BigIntegerField(db_default=0)),
                ("gets", models.BigIntegerField(db_default=0)),
                ("reserves", models.BigIntegerField(db_default=0)),
                ("commits", models.BigIntegerField(db_default=0)),
                ("rollbacks", models.BigIntegerField(db_default=0)),
                ("dead_letters", models.BigIntegerField(db_default=0)),
                (
                    "queue",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="counts",
                        to="psqlmessages.queue",
                    ),
                ),
                ("removes", models.BigIntegerField(db_default=0)),
            ],
            options={
                "indexes": [models.Index(fields=["queue"], name="queue_count_by_queue")],
            },
        ),
    ]
