"""The Django setting PSQLMESSAGES: its keys, their defaults, and the checks of values."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

KIB = 1024
MIB = 1024 * KIB
# `psqlmessages.django.call` appends a dot and a suffix. Node names have at most 100 characters.
MAX_NODE_CHARACTERS = 70
# Empty, or a Bearer token (RFC 6750) that is too long to be guessed.
_TOKEN = re.compile(r"([A-Za-z0-9._~+/=-]{16,})?")


def _setting(check: str, default: Any, find_problem: Callable[[Any], str]) -> Any:
    """Define a setting; ``check`` is the id of its system check.

    ``find_problem`` describes why a value is invalid, or returns "".
    """
    return field(default=default, metadata={"check": check, "find_problem": find_problem})


def _number(check: str, default: int, minimum: int, maximum: int) -> Any:
    def find_problem(value: Any) -> str:
        is_valid = type(value) is int and minimum <= value <= maximum
        return "" if is_valid else f"it must be a number between {minimum} and {maximum}"

    return _setting(check, default, find_problem)


def _find_alias_problem(alias: Any) -> str:
    if not isinstance(alias, str) or alias not in settings.DATABASES:
        return f"it must be an alias of DATABASES ({', '.join(settings.DATABASES)})"
    return ""


def _find_direct_alias_problem(alias: Any) -> str:
    problem = _find_alias_problem(alias)
    return f"{problem}, or empty" if problem and alias != "" else ""


def _find_node_problem(name: Any) -> str:
    if not isinstance(name, str) or len(name) > MAX_NODE_CHARACTERS or "\0" in name:
        return f"it must be text of at most {MAX_NODE_CHARACTERS} characters"
    if name.endswith("*"):
        return "a name that ends in * is a pattern and cannot be a node name"
    return ""


def _find_switch_problem(value: Any) -> str:
    return "" if isinstance(value, bool) else "it must be True or False"


def _find_token_problem(token: Any) -> str:
    is_token = isinstance(token, str) and _TOKEN.fullmatch(token)
    return "" if is_token else "it must be 16 or more letters, digits and . _ ~ + / = -, or empty"


def _find_encoder_problem(path: Any) -> str:
    try:
        is_encoder = issubclass(import_string(path), json.JSONEncoder)
    except (ImportError, AttributeError, TypeError):
        is_encoder = False
    return "" if is_encoder else "it must be the dotted path of a subclass of json.JSONEncoder"


@dataclass(frozen=True)
class Settings:
    """The settings of psqlmessages; for their meaning see docs/reference/settings.md."""

    NODE: str = _setting("E002", "", _find_node_problem)
    DATABASE: str = _setting("E019", DEFAULT_DB_ALIAS, _find_alias_problem)
    DIRECT_DATABASE: str = _setting("E020", "", _find_direct_alias_problem)
    MAX_BODY_BYTES: int = _number("E003", 64 * MIB, 8 * KIB, 512 * MIB)
    RELAY_FRAME_BYTES: int = _number("E004", 256 * KIB, KIB, 64 * MIB)
    RELAY_FRAMES_PER_SECOND: int = _number("E005", 50, 1, 10_000)
    RELAY_TOPICS: int = _number("E006", 50, 1, 10_000)
    RELAY_SOCKETS: int = _number("E007", 20, 1, 100_000)
    RELAY_QUEUE_FRAMES: int = _number("E008", 1000, 10, 100_000)
    RELAY_QUEUE_BYTES: int = _number("E009", 4 * MIB, 64 * KIB, 512 * MIB)
    JSON_ENCODER: str = _setting(
        "E021", "django.core.serializers.json.DjangoJSONEncoder", _find_encoder_problem
    )
    METRICS: bool = _setting("E010", False, _find_switch_problem)
    ANSWER_SECONDS: int = _number("E015", 10, 0, 3600)
    HANDLER_SECONDS: int = _number("E016", 60, 1, 24 * 60 * 60)
    HANDLER_CONCURRENCY: int = _number("E022", 1, 1, 1000)
    STOP_SECONDS: int = _number("E017", 8, 1, 3600)
    REQUEST_SECONDS: int = _number("E018", 10, 1, 3600)
    MAX_HOPS: int = _number("E011", 17, 1, 1000)
    TRAFFIC_DAYS_OF_TEN_SECONDS: int = _number("E012", 3, 1, 36_500)
    TRAFFIC_DAYS_OF_MINUTES: int = _number("E013", 30, 1, 36_500)
    TRAFFIC_DAYS_OF_HOURS: int = _number("E014", 730, 1, 36_500)
    PROBLEM_DEAD_LETTERS: int = _number("E023", 1, 1, 10_000)
    PROBLEM_WAIT_SECONDS: int = _number("E024", 60, 1, 30 * 86_400)
    PROBLEM_LAG_SECONDS: int = _number("E025", 60, 1, 30 * 86_400)
    PROBLEM_TRANSACTION_SECONDS: int = _number("E026", 10, 1, 86_400)
    PROBLEM_QUEUE_PERCENT: int = _number("E027", 10, 1, 100)
    PROBLEM_RESTART_SECONDS: int = _number("E028", 900, 0, 7 * 86_400)
    PROBLEM_REFUSED_CALLS: int = _number("E031", 1, 1, 1_000_000)
    HEALTH_TOKEN: str = _setting("E029", "", _find_token_problem)
    HISTORY_DAYS: int = _number("E030", 7, 0, 3650)


def json_default(value: Any) -> Any:
    """Convert a value with the encoder JSON_ENCODER; raise TypeError if this fails."""
    encoder: json.JSONEncoder = import_string(get_settings().JSON_ENCODER)()
    return encoder.default(value)


@cache
def get_settings() -> Settings:
    """Return the settings, which are cached; raise ImproperlyConfigured with all their errors."""
    values = getattr(settings, "PSQLMESSAGES", {})
    if errors := [error.text for error in find_errors(values)]:
        raise ImproperlyConfigured(" ".join(errors))
    return Settings(**values)


class SettingError(NamedTuple):
    """One error in PSQLMESSAGES: the id of its system check, and a sentence."""

    check: str
    text: str


def find_errors(values: Any) -> Iterator[SettingError]:
    """Yield the errors in a value of PSQLMESSAGES."""
    if not isinstance(values, Mapping):
        text = f"PSQLMESSAGES is of type {type(values).__name__}, not a dictionary."
        yield SettingError("E001", text)
        return
    known = {field.name: field for field in fields(Settings)}
    if unknown := sorted(str(key) for key in set(values) - set(known)):
        yield SettingError(
            "E001",
            f"PSQLMESSAGES has unknown keys: {', '.join(unknown)}."
            f" The known ones are {', '.join(sorted(known))}.",
        )
    for key, setting in known.items():
        if key in values and (problem := setting.metadata["find_problem"](values[key])):
            text = f"PSQLMESSAGES[{key!r}] is {values[key]!r:.100}: {problem}."
            yield SettingError(setting.metadata["check"], text)


def _clear_cache(*, setting: str, **_: Any) -> None:
    if setting == "PSQLMESSAGES":
        get_settings.cache_clear()


setting_changed.connect(_clear_cache)
