"""Settings of the sites under test: the example project's, and what a test gives besides."""

import json
import os
from importlib import import_module

from django.apps import AppConfig

from project.settings import *  # noqa: F403
from project.settings import INSTALLED_APPS as EXAMPLE_APPS

# A fast hash for the users of tests.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# Constants to replace, by path: {"psqlmessages.retry.MAX_LOCK_WAIT_SECONDS": 60}.
PATCHED: dict[str, object] = {
    "psqlmessages.monitor.json_views.READ_INTERVAL_SECONDS": 0.2,
    "psqlmessages.monitor.minute_writer.START_SECONDS": 1_000_000,
}
INSTALLED_APPS = [*EXAMPLE_APPS, "tests.web.site_settings.Patched"]

given = json.loads(os.environ.get("SITE_SETTINGS", "{}"))
globals().update(given, PATCHED=PATCHED | given.get("PATCHED", {}))


class Patched(AppConfig):
    """An app that sets the values of PATCHED."""

    name = "tests.web"
    label = "patched"

    def ready(self) -> None:
        for path, value in PATCHED.items():
            module, _, name = path.rpartition(".")
            assert hasattr(import_module(module), name), path
            setattr(import_module(module), name, value)
