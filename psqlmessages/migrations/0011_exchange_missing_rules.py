"""Store the rules that the workers of an exchange lack."""

from typing import ClassVar

import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0010_bring_up_to_date")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="exchangecount",
            name="missing_rules",
            field=django.contrib.postgres.fields.ArrayField(
                base_field=models.TextField(), db_default=[], size=None
            ),
        ),
    ]
