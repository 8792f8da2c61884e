"""Store since when a worker of an exchange lacks rules or has errors."""

from typing import ClassVar

from django.db import migrations, models

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0022_permission_per_action")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="exchangecount",
            name="failing_since",
            field=models.DateTimeField(null=True),
        ),
        ReinstallSQL(),
    ]
