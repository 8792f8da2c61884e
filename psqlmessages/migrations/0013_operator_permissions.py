"""Permissions of operators. The tables do not change."""

from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [
        ("psqlmessages", "0012_help_texts"),
    ]

    operations: ClassVar = [
        migrations.AlterModelOptions(
            name="queue",
            options={
                "ordering": ["name"],
                "permissions": [
                    (
                        "operate_queues",
                        "Can pause queues, and push, move and delete elements, in the monitor",
                    )
                ],
            },
        ),
        migrations.AlterModelOptions(
            name="subscription",
            options={
                "ordering": ["topic", "ident"],
                "permissions": [
                    ("operate_streams", "Can move and delete subscriptions in the monitor")
                ],
            },
        ),
        migrations.AlterModelOptions(
            name="topic",
            options={
                "ordering": ["name"],
                "permissions": [
                    ("view_monitor", "Can view the live monitor"),
                    ("view_bodies", "Can view the bodies of messages in the live monitor"),
                    ("send_test_messages", "Can send test messages to topics"),
                ],
            },
        ),
    ]
