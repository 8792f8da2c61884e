"""Settings of a project with handlers, for tests that start `manage.py` as a process."""

from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.django.shop"]  # noqa: F405
PSQLMESSAGES = {"NODE": "shop"}
