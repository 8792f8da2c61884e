"""Result of a selector: whether it accepts an element, and its changes to the message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from psqlmessages.exchanges.model import UNCHANGED, SelectorFailed
from psqlmessages.wire import describe_unstorable

# Limits of a result.
MAX_DELAY_SECONDS: Final = 1_000_000_000
MAX_MATURE_SECONDS: Final = 221_845_392_000  # the year 9000
MAX_TRIES: Final = 2**31 - 1
MAX_NESTING: Final = 200
MAX_INT_BITS: Final = 10_000  # about 3,000 digits; Python prints at most 4,300
_MAX_DESCRIPTION: Final = 60


@dataclass(frozen=True, slots=True)
class SelectorResult:
    """Result of one selector: whether it accepts the element, and its changes to the message.

    ``headers`` and ``state`` are merged into the current ones. If ``is_replacement`` is true, they
    replace the current ones. ``body`` replaces the body. None and UNCHANGED change nothing.
    """

    is_accepted: bool
    why: str
    delay: float | None = None
    mature: float | None = None
    tries: int = 0
    headers: dict[str, Any] | None = None
    body: Any = UNCHANGED
    state: dict[str, Any] | None = None
    is_replacement: bool = False


YES: Final = SelectorResult(is_accepted=True, why="true")
NO: Final = SelectorResult(is_accepted=False, why="false")


def to_result(value: Any) -> SelectorResult:
    """Convert the value that a selector returned; raise SelectorFailed for an invalid map."""
    if value is True:
        return YES
    if value is False:
        return NO
    if isinstance(value, Mapping):
        return _map_to_result(value)
    return SelectorResult(is_truthy(value), describe(value))


def is_truthy(value: Any) -> bool:
    """Return False for false, null, zero, NaN and empty text, and True for any other value."""
    if isinstance(value, int | float | str):
        return bool(value) and value == value  # noqa: PLR0124 - NaN is not equal to itself
    return value is not None


def describe(value: Any) -> str:
    """Describe a value in a few characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if len(value) > _MAX_DESCRIPTION:
            return f"{value[: _MAX_DESCRIPTION - 1]}…"
        return value or "empty text"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64):
        return str(value)
    return f"a value of type {type(value).__name__}"


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal JSON; 1, 1.0 and true differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def copy_json(value: Any, field: str, level: int = 0) -> Any:
    """Copy a value as plain JSON types; raise SelectorFailed if it is not JSON or too large."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise SelectorFailed(f"{field}: an integer of more than {MAX_INT_BITS:,} bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SelectorFailed(f"{field}: {value} is not JSON")
        return float(value)
    if level >= MAX_NESTING:
        raise SelectorFailed(f"{field}: nested deeper than {MAX_NESTING} levels")
    if isinstance(value, list | tuple):
        return [copy_json(item, field, level + 1) for item in value]
    if isinstance(value, Mapping):
        return {_key(key, field): copy_json(item, field, level + 1) for key, item in value.items()}
    hint = " (convert it with string(...))" if isinstance(value, datetime | timedelta) else ""
    raise SelectorFailed(f"{field}: a value of type {type(value).__name__} is not JSON{hint}")


def copy_headers(value: Any) -> dict[str, Any]:
    """Copy headers; raise SelectorFailed if they are not a map that PostgreSQL's jsonb can hold."""
    headers = _copy_map(value, "headers")
    _check_texts(headers, "headers")
    return headers


def copy_body(value: Any) -> Any:
    """Copy a body (text, bytes or JSON); raise SelectorFailed for anything else."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str):
        _check_texts(value, "body")
    return copy_json(value, "body")


def _map_to_result(value: Mapping[Any, Any]) -> SelectorResult:
    is_accepted, why = True, "a map"
    if "select" in value:
        is_accepted = is_truthy(value["select"])
        why = f"select: {describe(value['select'])}"
    changes = {
        key: convert(value[key])
        for key, convert in _CONVERTERS.items()
        if value.get(key) is not None
    }
    if "body" in value:
        changes["body"] = copy_body(value["body"])
    return SelectorResult(is_accepted, why, **changes)


def _delay(value: Any) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return _seconds(value, "delay", MAX_DELAY_SECONDS)


def _mature(value: Any) -> float:
    if isinstance(value, datetime):
        value = value.timestamp()
    return _seconds(value, "mature", MAX_MATURE_SECONDS)


def _seconds(value: Any, key: str, maximum: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SelectorFailed(f"{key}: must be a number of seconds, not {describe(value)}")
    if not 0 <= value <= maximum:  # NaN fails this comparison
        text = f"must be between 0 and {maximum} seconds, not {describe(value)}"
        raise SelectorFailed(f"{key}: {text}")
    return float(value)


def _tries(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SelectorFailed(f"tries: must be an integer, not {describe(value)}")
    if not 0 <= value <= MAX_TRIES:
        raise SelectorFailed(f"tries: must be between 0 and {MAX_TRIES}, not {describe(value)}")
    return value


def _copy_map(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SelectorFailed(f"{field}: must be a map, not {describe(value)}")
    return {_key(key, field): copy_json(item, field) for key, item in value.items()}


# If the value of one of these keys is null, the key counts as missing.
_CONVERTERS: Final[dict[str, Callable[[Any], Any]]] = {
    "delay": _delay,
    "mature": _mature,
    "tries": _tries,
    "headers": copy_headers,
    "state": lambda value: _copy_map(value, "state"),
}


def _key(key: Any, field: str) -> str:
    if not isinstance(key, str):
        raise SelectorFailed(f"{field}: a key must be text, not {describe(key)}")
    return str(key)


def _check_texts(value: Any, field: str) -> None:
    """Raise SelectorFailed for texts that PostgreSQL cannot hold."""
    if isinstance(value, str):
        if character := describe_unstorable(value):
            raise SelectorFailed(f"{field}: a text with {character}")
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, field)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key, field)
            _check_texts(item, field)
