"""Headers: the first lines of payloads, where those of one sender and topic are parsed once."""

from __future__ import annotations

import re
from typing import Any, Final

from psqlmessages.client.messages import CONNECTION_LOST, RECONNECTED, SYS, TOPIC, TYPES
from psqlmessages.client.pulse import PROBE
from psqlmessages.wire import MalformedPayload

# Size, all between size and id, and id; so that a string in it cannot look like these, it is kept
# only after it was parsed.
_TOPIC: Final = re.compile(
    r'\{"Type":"Topic","Size":([0-9]{1,18}),(.{0,4000}),"Id":([0-9]{1,18})\}\n'
)
_FIELDS: Final[dict[str, type]] = {
    "Id": int,
    "Size": int,
    **dict.fromkeys(
        ("From", "To", "Token", "Evt", "Ident", "Topic", "Dkey", "Enc", "Err", "Errstr"), str
    ),
}
# The events that a node or gateway itself makes: no notification may claim them.
_LOCAL_EVENTS = frozenset({CONNECTION_LOST, RECONNECTED})
# Of so many pairs of topic and sender; then it begins anew.
_KNOWN: Final = 1_000


class Headers:
    """What lies between size and id in the headers that were found to be good."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def split(self, payload: str) -> tuple[dict[str, Any], str] | None:
        """Split a payload whose header is like an earlier one; None where none is."""
        if (like := _TOPIC.match(payload)) is None:
            return None
        size, between, number = like.groups()
        if (known := self._known.get(between)) is None:
            return None
        header = known.copy()
        header["Size"] = int(size)
        header["Id"] = int(number)
        return header, payload[like.end() :]

    def keep(self, payload: str, header: dict[str, Any]) -> None:
        """Keep a header that was parsed and checked, unless it is one of its own kind."""
        if "Token" in header or (like := _TOPIC.match(payload)) is None:
            return
        size, between, number = like.groups()
        # A name may stand twice: the last one holds, which is not what stands where it was sought.
        is_same = header.get("Size") == int(size) and header.get("Id") == int(number)
        if is_same and header.get("Type") == TOPIC:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[between] = header.copy()


def check(header: dict[str, Any]) -> None:
    """Raise MalformedPayload where a header is not of the form that the server writes."""
    kind = header.get("Type")
    if kind == PROBE:
        return
    if not isinstance(kind, str) or kind not in TYPES:
        raise MalformedPayload(f"unknown type {kind!r:.100}")
    for name, value in header.items():
        # An exact comparison: JSON's true is no number, though Python's is.
        if type(value) is not _FIELDS.get(name, type(value)):
            raise MalformedPayload(f"{name} is not of its type")
    if "Err" in header and not header["Err"].isdecimal():
        raise MalformedPayload("Err is not a number")
    if kind == SYS and (not header.get("Evt") or header["Evt"] in _LOCAL_EVENTS):
        raise MalformedPayload("not an event of the server")
    if kind != SYS and not (header.get("From") and header.get("To")):
        raise MalformedPayload("a message without sender or destination")
