"""Protocol of a node's WebSocket: one JSON object per frame. Pure functions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from psqlmessages.exceptions import MalformedFrame
from psqlmessages.wire import MalformedText, strict_json, unstorable_part

Ref = str | int | float | None
Argument = str | bool | None

REF_CHARACTERS: Final = 100
_SHOWN_CHARACTERS: Final = 100


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an operation; an optional field has the value ``default`` if it is absent."""

    type: type[str] | type[bool] = str
    is_required: bool = True
    default: Argument = None


_NAME = Field()
_OPTIONAL = Field(is_required=False)

# The fields of each operation, in the order of the arguments of the SQL function of that name.
OPERATIONS: Final[dict[str, dict[str, Field]]] = {
    "init": {"ident": _NAME, "events": Field(bool, is_required=False, default=True)},
    "deinit": {},
    **{
        op: {"topic": _NAME}
        for op in (
            "topic_listen",
            "topic_unlisten",
            "topic_notify",
            "topic_unnotify",
            "topic_status",
            "topic_auth",
        )
    },
    "topic_send": {"topic": _NAME, "body": _NAME, "token": _OPTIONAL, "enc": _OPTIONAL},
    "rpc": {"node": _NAME, "token": _NAME, "body": _NAME, "enc": _OPTIONAL},
    "return": {"node": _NAME, "token": _NAME, "body": _NAME, "enc": _OPTIONAL},
    "return_error": {"node": _NAME, "token": _NAME, "reason": _NAME},
}


@dataclass(frozen=True, slots=True)
class Request:
    """A requested operation; ``arguments`` has all fields of the operation, in order."""

    op: str
    ref: Ref
    arguments: dict[str, Argument]


class UnreadableFrame(MalformedFrame):
    """A frame that is not a valid request; ``ref`` is its ref, None if that was unreadable."""

    def __init__(self, reason: str, ref: Ref = None) -> None:
        super().__init__(f"malformed frame: {reason}")
        self.ref = ref


def parse_frame(text: str) -> Request:
    """Parse a frame; raise UnreadableFrame, with the reason and the offending value."""
    try:
        fields = strict_json(text)
    except MalformedText as error:
        raise UnreadableFrame(str(error)) from None
    if not isinstance(fields, dict):
        raise UnreadableFrame(f"{_shown(fields)} is not a JSON object")
    ref = _ref(fields)
    op = fields.pop("op", None)
    known = OPERATIONS.get(op) if isinstance(op, str) else None
    if known is None:
        raise UnreadableFrame(f"unknown op {_shown(op)}", ref)
    if unknown := [name for name in fields if name not in known]:
        raise UnreadableFrame(f"{op} has no field {_shown(unknown[0])}", ref)
    try:
        return Request(op, ref, {name: _value(name, known[name], fields) for name in known})
    except UnreadableFrame as error:
        error.ref = ref
        raise


def answer(ref: Ref, content: dict[str, Any]) -> str:
    """Write the answer to a request as a frame, ``ref`` first."""
    # The hub's channel stays on the server: anyone who knows it can send notifications to it.
    shown = {key: value for key, value in content.items() if key != "Channel"}
    return json.dumps({"ref": ref, **shown} if ref is not None else shown, separators=(",", ":"))


def _ref(fields: dict[str, Any]) -> Ref:
    if "ref" not in fields:
        return None
    ref: str | int | float = fields.pop("ref")
    if isinstance(ref, str):
        _check_text("ref", ref)
        is_short = len(ref) <= REF_CHARACTERS
    elif type(ref) in (int, float):
        # Python parses 1e999 as infinity, which JSON cannot represent.
        is_short = math.isfinite(ref) and abs(ref) < 10**REF_CHARACTERS
    else:
        raise UnreadableFrame(f"ref is {_shown(ref)}, neither text nor a number")
    if not is_short:
        raise UnreadableFrame(f"ref is longer than {REF_CHARACTERS} characters")
    return ref


def _value(name: str, field: Field, fields: dict[str, Any]) -> Argument:
    value: Any = fields.get(name)
    if value is None and not field.is_required:
        return field.default
    if name not in fields:
        raise UnreadableFrame(f"the field {name} is missing")
    if type(value) is not field.type:
        expected = "text" if field.type is str else "true or false"
        raise UnreadableFrame(f"{name} is {_shown(value)}, not {expected}")
    if isinstance(value, str):
        _check_text(name, value)
    return value


def _check_text(name: str, text: str) -> None:
    if part := unstorable_part(text):
        raise UnreadableFrame(f"{name} has {part}")


def _shown(value: Any) -> str:
    """Format a value of the frame for an error: as JSON, in ASCII, truncated if it is long."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, str):
        value = value[:_SHOWN_CHARACTERS]
    return json.dumps(value)[:_SHOWN_CHARACTERS]
