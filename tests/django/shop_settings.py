"""Settings of a project with handlers, for tests that start `manage.py` as a process."""

import json
import os

from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.django.shop"]  # noqa: F405
# On a busy machine the current messages take longer.
GIVEN = json.loads(os.environ.get("SHOP_SETTINGS", "{}"))
PSQLMESSAGES = {"NODE": "shop", "STOP_SECONDS": 60, **GIVEN}
