"""Protocol of a node's WebSocket: one JSON object per frame. Pure functions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from psqlmessages.exceptions import MalformedFrame
from psqlmessages.wire import MalformedText, describe_unstorable, parse_strict_json

# The client chooses the ref of a request, and the answer repeats it.
Ref = str | int | float | None
Argument = str | bool | None

MAX_REF_CHARACTERS: Final = 100
_MAX_VALUE_CHARACTERS: Final = 100


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an operation. ``default``: its value if it is missing or null."""

    type: type[str] | type[bool] = str
    is_required: bool = True
    default: Argument = None


_TEXT = Field()
_OPTIONAL_TEXT = Field(is_required=False)
_TOPIC = {"topic": _TEXT}

# The fields of each operation: except for init and deinit, the arguments of its SQL function.
OPERATIONS: Final[dict[str, dict[str, Field]]] = {
    "init": {"ident": _TEXT, "events": Field(bool, is_required=False, default=True)},
    "deinit": {},
    "topic_listen": _TOPIC,
    "topic_unlisten": _TOPIC,
    "topic_notify": _TOPIC,
    "topic_unnotify": _TOPIC,
    "topic_status": _TOPIC,
    "topic_auth": _TOPIC,
    "topic_send": {"topic": _TEXT, "body": _TEXT, "token": _OPTIONAL_TEXT, "enc": _OPTIONAL_TEXT},
    "rpc": {"node": _TEXT, "token": _TEXT, "body": _TEXT, "enc": _OPTIONAL_TEXT},
    "return": {"node": _TEXT, "token": _TEXT, "body": _TEXT, "enc": _OPTIONAL_TEXT},
    "return_error": {"node": _TEXT, "token": _TEXT, "reason": _TEXT},
}


@dataclass(frozen=True, slots=True)
class Request:
    """A requested operation; ``arguments`` has all fields of the operation, in order."""

    op: str
    ref: Ref
    arguments: dict[str, Argument]


class InvalidFrame(MalformedFrame):
    """A frame is not a valid request. ``ref`` is None if it is missing or invalid."""

    def __init__(self, reason: str, ref: Ref = None) -> None:
        super().__init__(f"malformed frame: {reason}")
        self.ref = ref


def parse_frame(text: str) -> Request:
    """Parse a frame; raise InvalidFrame with the reason if it is not a valid request."""
    try:
        fields = parse_strict_json(text)
    except MalformedText as error:
        raise InvalidFrame(str(error)) from None
    if not isinstance(fields, dict):
        raise InvalidFrame(f"{_describe(fields)} is not a JSON object")
    ref = _take_ref(fields)
    op = fields.pop("op", None)
    allowed = OPERATIONS.get(op) if isinstance(op, str) else None
    if allowed is None:
        raise InvalidFrame(f"unknown op {_describe(op)}", ref)
    if unknown := [name for name in fields if name not in allowed]:
        raise InvalidFrame(f"{op} has no field {_describe(unknown[0])}", ref)
    try:
        arguments = {name: _parse_argument(name, allowed[name], fields) for name in allowed}
    except InvalidFrame as error:
        error.ref = ref
        raise
    return Request(op, ref, arguments)


def format_answer(ref: Ref, content: dict[str, Any]) -> str:
    """Write the answer to a request as a frame, ``ref`` first."""
    # The hub's channel stays on the server: anyone who knows it can send notifications to it.
    public = {key: value for key, value in content.items() if key != "Channel"}
    return json.dumps({"ref": ref, **public} if ref is not None else public, separators=(",", ":"))


def _take_ref(fields: dict[str, Any]) -> Ref:
    """Remove the ref from the fields, check it and return it; None without a ref."""
    if "ref" not in fields:
        return None
    ref: str | int | float = fields.pop("ref")
    if isinstance(ref, str):
        _check_text("ref", ref)
        if len(ref) > MAX_REF_CHARACTERS:
            raise InvalidFrame(f"ref is longer than {MAX_REF_CHARACTERS} characters")
    elif type(ref) not in (int, float):
        raise InvalidFrame(f"ref is {_describe(ref)}, neither text nor a number")
    # Python parses 1e999 as infinity, which JSON cannot represent.
    elif abs(ref) >= 10**MAX_REF_CHARACTERS:
        raise InvalidFrame(f"ref is not between -1e{MAX_REF_CHARACTERS} and 1e{MAX_REF_CHARACTERS}")
    return ref


def _parse_argument(name: str, field: Field, fields: dict[str, Any]) -> Argument:
    value: Any = fields.get(name)
    if value is None and not field.is_required:
        return field.default
    if name not in fields:
        raise InvalidFrame(f"the field {name} is missing")
    if type(value) is not field.type:
        expected = "text" if field.type is str else "true or false"
        raise InvalidFrame(f"{name} is {_describe(value)}, not {expected}")
    if isinstance(value, str):
        _check_text(name, value)
    return value


def _check_text(name: str, text: str) -> None:
    if character := describe_unstorable(text):
        raise InvalidFrame(f"{name} has {character}")


def _describe(value: Any) -> str:
    """Describe a value in an error: as ASCII JSON, truncated; for objects and arrays, the kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, str):
        value = value[:_MAX_VALUE_CHARACTERS]
    return json.dumps(value)[:_MAX_VALUE_CHARACTERS]
