"""Install the overloads of push, and the removal of unused queues."""

from typing import ClassVar

from django.db import migrations

from psqlmessages.schema import ReinstallSQL


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0019_element_order")]

    operations: ClassVar = [ReinstallSQL()]
