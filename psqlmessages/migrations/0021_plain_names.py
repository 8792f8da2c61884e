"""Rename private tables and columns, and update the SQL functions: `schema.install` does both."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0020_reinstall")]

    operations: ClassVar = [ReinstallSQL()]
