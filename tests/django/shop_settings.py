"""Settings of a project with handlers, for tests that start `manage.py` as a process."""

import json
import os

from project.settings import *  # noqa: F403

# Without Daphne, whose import takes longer than most commands.
INSTALLED_APPS = [
    *(app for app in INSTALLED_APPS if app != "daphne"),  # noqa: F405
    "tests.django.shop",
]
# On a busy machine the current messages take longer.
GIVEN = json.loads(os.environ.get("SHOP_SETTINGS", "{}"))
PSQLMESSAGES = {"NODE": "shop", "STOP_SECONDS": 60, **GIVEN}
