"""Permissions to view the monitor, and the nodes that web users may act as."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import psqlmessages.models.names


class Migration(migrations.Migration):
    dependencies = [
        ("auth", "0012_alter_user_first_name_max_length"),
        ("psqlmessages", "0003_sql"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="topic",
            options={
                "ordering": ["name"],
                "permissions": [
                    ("view_monitor", "Can view the live monitor"),
                    ("view_bodies", "Can view the bodies of messages in the live monitor"),
                ],
            },
        ),
        migrations.CreateModel(
            name="WebIdentity",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
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
                    "group",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="auth.group",
                    ),
                ),
                (
                    "user",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "verbose_name": "web identity",
                "verbose_name_plural": "web identities",
                "ordering": ["ident"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("ident", "user", "group"),
                        name="web_identity_is_unique",
                        nulls_distinct=False,
                        violation_error_message="This user or group already has this node.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("user__isnull", True), ("group__isnull", True), _connector="XOR"
                        ),
                        name="web_identity_is_of_a_user_or_a_group",
                        violation_error_message="Choose either a user or a group.",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("ident", ""), _negated=True),
                        name="web_identity_ident_is_not_empty",
                    ),
                ],
            },
        ),
    ]
