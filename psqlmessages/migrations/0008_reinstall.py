"""Nothing: 0010 brings a database that an earlier state of this version installed up to date."""

from typing import ClassVar

from django.db import migrations


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0007_upgrade")]

    operations: ClassVar = []
