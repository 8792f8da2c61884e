"""The Django setting PSQLMESSAGES: its keys, defaults and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS

KIB = 1024
MIB = 1024 * KIB
# Names have at most 100 characters; the session of `call` appends a suffix.
NODE_CHARACTERS = 70


@dataclass(frozen=True)
class Settings:
    """The settings of psqlmessages; for their meaning see docs/settings.md."""

    NODE: str = ""
    DATABASE: str = DEFAULT_DB_ALIAS
    DIRECT_DATABASE: str = ""
    MAX_BODY_BYTES: int = 64 * MIB
    RELAY_FRAME_BYTES: int = 256 * KIB
    RELAY_FRAMES_PER_SECOND: int = 50
    RELAY_TOPICS: int = 50
    RELAY_SOCKETS: int = 20
    RELAY_QUEUE_FRAMES: int = 1000
    RELAY_QUEUE_BYTES: int = 4 * MIB
    METRICS: bool = False
    ANSWER_SECONDS: int = 10
    HANDLER_SECONDS: int = 60
    STOP_SECONDS: int = 8
    REQUEST_SECONDS: int = 10
    MAX_HOPS: int = 17
    TRAFFIC_DAYS_OF_TEN_SECONDS: int = 3
    TRAFFIC_DAYS_OF_MINUTES: int = 30
    TRAFFIC_DAYS_OF_HOURS: int = 730


# The minimum and maximum of each number.
_RANGES = {
    "MAX_BODY_BYTES": (8 * KIB, 512 * MIB),
    "RELAY_FRAME_BYTES": (KIB, 64 * MIB),
    "RELAY_FRAMES_PER_SECOND": (1, 10_000),
    "RELAY_TOPICS": (1, 10_000),
    "RELAY_SOCKETS": (1, 100_000),
    "RELAY_QUEUE_FRAMES": (10, 100_000),
    "RELAY_QUEUE_BYTES": (64 * KIB, 512 * MIB),
    "ANSWER_SECONDS": (0, 3600),
    "HANDLER_SECONDS": (1, 24 * 60 * 60),
    "STOP_SECONDS": (1, 3600),
    "REQUEST_SECONDS": (1, 3600),
    "MAX_HOPS": (1, 1000),
    "TRAFFIC_DAYS_OF_TEN_SECONDS": (1, 36_500),
    "TRAFFIC_DAYS_OF_MINUTES": (1, 36_500),
    "TRAFFIC_DAYS_OF_HOURS": (1, 36_500),
}


@cache
def get_settings() -> Settings:
    """Read the setting PSQLMESSAGES; raise ImproperlyConfigured with all its errors."""
    given = getattr(settings, "PSQLMESSAGES", {})
    if found := [error.text for error in errors_in(given)]:
        raise ImproperlyConfigured(" ".join(found))
    return Settings(**given)


class SettingError(NamedTuple):
    """One error in PSQLMESSAGES: its key ("" for the whole setting) and a sentence."""

    key: str
    text: str


def errors_in(given: Any) -> Iterator[SettingError]:
    """Yield the errors in a value of PSQLMESSAGES."""
    if not isinstance(given, Mapping):
        yield SettingError("", f"PSQLMESSAGES is of type {type(given).__name__}, not a dictionary.")
        return
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(str(key) for key in set(given) - known):
        yield SettingError(
            "",
            f"PSQLMESSAGES has unknown keys: {', '.join(unknown)}."
            f" The known ones are {', '.join(sorted(known))}.",
        )
    node = given.get("NODE", Settings.NODE)
    if not isinstance(node, str) or len(node) > NODE_CHARACTERS or "\0" in node:
        yield _error("NODE", node, f"text of at most {NODE_CHARACTERS} characters")
    elif node.endswith("*"):
        yield SettingError(
            "NODE",
            f"PSQLMESSAGES['NODE'] is {node!r}: a name that ends in * is a pattern and"
            " cannot be a node name.",
        )
    for key in ("DATABASE", "DIRECT_DATABASE"):
        alias = given.get(key, "")
        if not isinstance(alias, str) or (alias and alias not in settings.DATABASES):
            yield _error(key, alias, f"an alias of DATABASES ({', '.join(settings.DATABASES)})")
    for key, (least, most) in _RANGES.items():
        number = given.get(key, least)
        if type(number) is not int or not least <= number <= most:
            yield _error(key, number, f"a number between {least} and {most}")
    if not isinstance(metrics := given.get("METRICS", False), bool):
        yield _error("METRICS", metrics, "True or False")


def _error(key: str, value: Any, allowed: str) -> SettingError:
    text = f"PSQLMESSAGES[{key!r}] is {value!r:.100}: it must be {allowed}."
    return SettingError(key, text)


def _forget_settings(*, setting: str, **_: Any) -> None:
    if setting == "PSQLMESSAGES":
        get_settings.cache_clear()


setting_changed.connect(_forget_settings)
