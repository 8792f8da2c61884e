"""Empty: 0010 does what this migration did in earlier development states."""

from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0008_reinstall")]

    operations: ClassVar = []
