"""Install push with a delay as an interval, and with a key for a JSON value."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0019_element_order")]

    operations: ClassVar = [ReinstallSQL()]
