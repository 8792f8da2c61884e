"""The SQL functions: they always equal the scripts under ``sql/``."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.operations import InstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0001_initial")]

    operations: ClassVar = [InstallSQL("0.1", digest="d0d2bf30786a014c")]
