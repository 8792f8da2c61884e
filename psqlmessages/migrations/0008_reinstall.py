"""Install the SQL functions again where an earlier state of this version is installed."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0007_upgrade")]

    operations: ClassVar = [ReinstallSQL()]
