"""Update the SQL functions of a database that has all earlier migrations."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0020_reinstall")]

    operations: ClassVar = [ReinstallSQL()]
