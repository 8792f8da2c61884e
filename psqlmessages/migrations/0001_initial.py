"""The tables."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import psqlmessages.models.names


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Auth",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "role",
                    psqlmessages.models.names.RoleField(
                        db_collation="C",
                        help_text="The PostgreSQL role allowed. For a group role, its members are allowed.",
                        max_length=63,
                    ),
                ),
                (
                    "ident",
                    psqlmessages.models.names.NameField(
                        db_collation="C",
                        help_text="Node name, or a prefix and * for all names that begin with it.",
                        max_length=100,
                    ),
                ),
                (
                    "type",
                    models.CharField(
                        choices=[("Rpc", "Rpc"), ("Topic", "Topic"), ("Queue", "Queue")],
                        db_collation="C",
                        max_length=5,
                    ),
                ),
                (
                    "dest",
                    psqlmessages.models.names.NameField(
                        db_collation="C",
                        help_text="Node (Rpc), topic or queue, or a prefix and * for all that begin with it.",
                        max_length=100,
                        verbose_name="destination",
                    ),
                ),
                (
                    "mode",
                    models.CharField(
                        choices=[
                            ("W", "W (send)"),
                            ("R", "R (receive)"),
                            ("RW", "RW (send and receive)"),
                            ("O", "O (observe)"),
                            ("A", "A (administer)"),
                        ],
                        db_collation="C",
                        max_length=2,
                    ),
                ),
                (
                    "timeout",
                    models.IntegerField(
                        help_text="How long large bodies are stored and reply tokens stay valid, in seconds."
                    ),
                ),
            ],
            options={
                "verbose_name": "rule",
                "ordering": ["type", "dest", "ident", "role"],
                "indexes": [
                    models.Index(fields=["type", "dest"], name="rule_by_destination"),
                    models.Index(fields=["role"], name="rule_by_role"),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("ident", "type", "dest", "role"),
                        name="rule_is_unique",
                        violation_error_message="This role, node, type and destination already have a rule.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("role", ""), _negated=True),
                            models.Q(("ident", ""), _negated=True),
                            models.Q(("dest", ""), _negated=True),
                        ),
                        name="rule_names_are_not_empty",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("timeout__gt", 0)), name="rule_timeout_is_positive"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("type__in", ["Rpc", "Topic", "Queue"])),
                        name="rule_type_is_known",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("mode__in", ["W", "R", "RW", "O", "A"])),
                        name="rule_mode_is_known",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("type", "Rpc"), _negated=True), ("mode", "W"), _connector="OR"
                        ),
                        name="rule_for_rpc_has_mode_w",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("mode", "O"), _negated=True),
                            ("type", "Topic"),
                            _connector="OR",
                        ),
                        name="rule_to_observe_is_for_a_topic",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("mode", "A"), _negated=True),
                            ("type", "Queue"),
                            _connector="OR",
                        ),
                        name="rule_to_administer_is_for_a_queue",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Session",
            fields=[
                ("id", models.IntegerField(primary_key=True, serialize=False)),
                ("pid", models.IntegerField()),
                ("role", psqlmessages.models.names.RoleField(db_collation="C", max_length=63)),
                ("channel", models.CharField(db_collation="C", max_length=63)),
                (
                    "started_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
            ],
            options={
                "permissions": [
                    ("terminate_session", "Can end connections with open transactions")
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("channel",), name="session_channel_is_its_own")
                ],
            },
        ),
        migrations.CreateModel(
            name="Client",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("ident", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("role", psqlmessages.models.names.RoleField(db_collation="C", max_length=63)),
                (
                    "connected_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                (
                    "session",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="clients",
                        to="psqlmessages.session",
                    ),
                ),
            ],
            options={
                "verbose_name": "connected node",
                "ordering": ["ident"],
            },
        ),
        migrations.CreateModel(
            name="Topic",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                (
                    "retention",
                    models.IntegerField(
                        db_default=0,
                        default=0,
                        help_text="Seconds that each message is stored, even without a subscription.",
                    ),
                ),
                ("listeners", models.IntegerField(db_default=0, editable=False)),
                (
                    "channels",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.TextField(), db_default=[], editable=False, size=None
                    ),
                ),
                ("subscriptions", models.IntegerField(db_default=0, editable=False)),
                (
                    "subscriber_channels",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.TextField(), db_default=[], editable=False, size=None
                    ),
                ),
                ("is_made_by_publish", models.BooleanField(db_default=False, editable=False)),
            ],
            options={
                "ordering": ["name"],
                "constraints": [
                    models.UniqueConstraint(fields=("name",), name="topic_name_is_unique"),
                    models.CheckConstraint(
                        condition=models.Q(("retention__gte", 0)),
                        name="topic_retention_is_not_negative",
                        violation_error_message="The retention is 0 seconds or more.",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Membership",
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
                        choices=[("notify", "sends"), ("listen", "listens")],
                        db_collation="C",
                        max_length=6,
                    ),
                ),
                ("channel", models.CharField(db_collation="C", max_length=63)),
                ("pid", models.IntegerField()),
                ("role", psqlmessages.models.names.RoleField(db_collation="C", max_length=63)),
                ("header", models.TextField()),
                ("timeout", models.IntegerField()),
                (
                    "client",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="memberships",
                        to="psqlmessages.client",
                    ),
                ),
                (
                    "topic",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="memberships",
                        to="psqlmessages.topic",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Observation",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("pattern", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("channel", models.CharField(db_collation="C", max_length=63)),
                (
                    "client",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="observations",
                        to="psqlmessages.client",
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["pattern"], name="observation_by_pattern")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("client", "pattern"), name="observation_is_unique"
                    )
                ],
            },
        ),
        migrations.AddConstraint(
            model_name="client",
            constraint=models.UniqueConstraint(fields=("ident",), name="ident_is_registered_once"),
        ),
        migrations.AddIndex(
            model_name="membership",
            index=models.Index(fields=["topic", "kind"], name="membership_by_topic"),
        ),
        migrations.AddConstraint(
            model_name="membership",
            constraint=models.UniqueConstraint(
                fields=("client", "topic", "kind"), name="membership_is_unique"
            ),
        ),
        migrations.AddConstraint(
            model_name="membership",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["notify", "listen"])),
                name="membership_kind_is_known",
            ),
        ),
        migrations.CreateModel(
            name="Subscription",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("ident", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("topic", psqlmessages.models.names.NameField(db_collation="C", max_length=100)),
                ("position", models.BigIntegerField(help_text="Id of the last message read.")),
                (
                    "timeout",
                    models.IntegerField(help_text="Seconds after its last ping at which it ends."),
                ),
                (
                    "started_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                (
                    "pinged_at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                ("is_alive", models.BooleanField(db_default=True)),
                ("is_recovered", models.BooleanField(db_default=True)),
            ],
            options={
                "ordering": ["topic", "ident"],
                "indexes": [models.Index(fields=["topic"], name="subscription_by_topic")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("ident", "topic"), name="subscription_is_unique"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("timeout__gt", 0)),
                        name="subscription_timeout_is_positive",
                    ),
                ],
            },
        ),
    ]
