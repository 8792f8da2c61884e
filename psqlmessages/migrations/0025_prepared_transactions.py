"""Recognise prepared transactions before and after a restart of the server."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0024_writers_before_the_clock_was_set_back")]

    operations: ClassVar = [ReinstallSQL()]
