"""Correct the help text of a rule's timeout, and update the SQL functions."""

from typing import ClassVar

from django.db import migrations, models

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0016_reinstall")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="auth",
            name="timeout",
            field=models.IntegerField(
                help_text="How long large bodies and large answers are stored, in seconds."
            ),
        ),
        ReinstallSQL(),
    ]
