"""Install the SQL functions again: overloads with jsonb and interval."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0009_reinstall")]

    operations: ClassVar = [ReinstallSQL()]
