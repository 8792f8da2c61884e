"""Index elements by an expression of their id, so that this index does not replace the primary key."""

from typing import ClassVar

from django.db import migrations, models
from django.db.models import F

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0018_refused_calls")]

    operations: ClassVar = [
        migrations.RemoveIndex(model_name="element", name="element_by_availability"),
        migrations.AddIndex(
            model_name="element",
            index=models.Index(
                "queue", "available_at", F("id") + 0, name="element_by_availability"
            ),
        ),
        ReinstallSQL(),
    ]
