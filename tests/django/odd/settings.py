"""Settings that differ from most: ATOMIC_REQUESTS, no time zones, a router, three databases."""

from typing import Any

from project.settings import *  # noqa: F403
from project.settings import DATABASES as USUAL
from project.settings import INSTALLED_APPS as APPS


class OnlyDefault:
    def allow_migrate(self, db: str, app_label: str, **_hints: object) -> bool:
        return db == "default"


INSTALLED_APPS = [*APPS, "tests.django.odd"]
AUTH_USER_MODEL = "odd.Person"
USE_TZ = False
TIME_ZONE = "Asia/Kathmandu"
DATABASES: dict[str, dict[str, Any]] = {
    "default": {**USUAL["default"], "ATOMIC_REQUESTS": True},
    "direct": {**USUAL["default"], "TEST": {"MIRROR": "default"}},
    "legacy": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
DATABASE_ROUTERS = ["tests.django.odd.settings.OnlyDefault"]
PSQLMESSAGES = {"NODE": "odd", "METRICS": True}
