"""Install the SQL functions again: private functions have new names."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0008_reinstall")]

    operations: ClassVar = [ReinstallSQL()]
