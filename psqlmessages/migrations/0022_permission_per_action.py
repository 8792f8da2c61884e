"""Each action in the monitor needs its own permission: remove those that covered several."""

from typing import Any, ClassVar

from django.db import migrations, router

from psqlmessages.schema import ReinstallSQL

TEST_MESSAGES = ("send_test_messages", "Can send test messages to topics and queues")


def update_permissions(apps: Any, schema_editor: Any) -> None:
    """Delete the removed permissions, and write the new name of another one."""
    alias, permission = schema_editor.connection.alias, apps.get_model("auth", "Permission")
    if not router.allow_migrate_model(alias, permission):
        return
    ours = permission.objects.using(alias).filter(content_type__app_label="psqlmessages")
    ours.filter(codename__in=["operate_queues", "operate_streams"]).delete()
    codename, name = TEST_MESSAGES
    ours.filter(codename=codename).update(name=name)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0021_plain_names")]

    operations: ClassVar = [
        migrations.AlterModelOptions(name="queue", options={"ordering": ["name"]}),
        migrations.AlterModelOptions(name="subscription", options={"ordering": ["topic", "ident"]}),
        migrations.AlterModelOptions(
            name="topic",
            options={
                "ordering": ["name"],
                "permissions": [
                    ("view_monitor", "Can view the live monitor"),
                    ("view_bodies", "Can view the bodies of messages in the live monitor"),
                    TEST_MESSAGES,
                ],
            },
        ),
        migrations.RunPython(update_permissions, migrations.RunPython.noop),
        ReinstallSQL(),
    ]
