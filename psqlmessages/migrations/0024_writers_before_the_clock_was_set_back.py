"""Remember the transactions that were writing elements when the clock was set back."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0023_exchange_failing_since")]

    operations: ClassVar = [ReinstallSQL()]
