"""The document: JSON text of rules and web identities, written and read. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from psqlmessages.definitions.entries import Identity, Rule

VERSION = 1
MOST_BYTES = 10 * 1024 * 1024

_FAULTS_SHOWN = 20
_Entry = TypeVar("_Entry", Rule, Identity)


@dataclass(frozen=True)
class Definitions:
    """Rules and web identities; None for a part that a document does not speak of."""

    rules: tuple[Rule, ...] | None = None
    web_identities: tuple[Identity, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the document as JSON holds it, in an order that does not depend on chance."""
        document: dict[str, Any] = {"version": VERSION}
        if self.rules is not None:
            document["rules"] = [rule._asdict() for rule in sorted(self.rules)]
        if self.web_identities is not None:
            identities = sorted(self.web_identities, key=_order)
            document["web_identities"] = [identity._asdict() for identity in identities]
        return document


class MalformedDefinitions(ValueError):
    """A document that cannot be read: ``faults`` holds a sentence for each thing wrong."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def write(definitions: Definitions) -> str:
    """Write a document for people and programs to read."""
    return json.dumps(definitions.as_json(), indent=2, ensure_ascii=False) + "\n"


def read(text: bytes | str) -> Definitions:
    """Read a document; raise MalformedDefinitions with all that is wrong with it."""
    document = _parsed(text)
    if not isinstance(document, dict):
        raise MalformedDefinitions(["The document is no JSON object."])
    if document.get("version") != VERSION or isinstance(document.get("version"), bool):
        raise MalformedDefinitions(
            [f"The version is {document.get('version')!r:.100}; this program reads {VERSION}."]
        )
    faults = [
        f"The document has a field {field!r:.100} that is not known."
        for field in document
        if field not in ("version", "rules", "web_identities")
    ]
    found = Definitions(
        _entries(document, "rules", _rule, faults),
        _entries(document, "web_identities", _identity, faults),
    )
    if faults:
        more = len(faults) - _FAULTS_SHOWN
        raise MalformedDefinitions(
            faults[:_FAULTS_SHOWN] + ([f"And {more:,} more."] if more > 0 else [])
        )
    return found


def _order(identity: Identity) -> tuple[str, str, str]:
    return identity.user or "", identity.group or "", identity.ident


def _parsed(text: bytes | str) -> Any:
    if len(text) > MOST_BYTES:
        raise MalformedDefinitions(
            [f"The document has {len(text):,} bytes; {MOST_BYTES:,} are the most."]
        )
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=_object, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        fault = f"The document is not UTF-8 text: byte {error.start:,} does not fit."
    except RecursionError:
        fault = "The document is nested too deeply."
    except ValueError as error:
        fault = f"The document is no JSON: {error}."
    raise MalformedDefinitions([fault])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the field {twice!r:.100} twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _entries(
    document: dict[str, Any],
    part: str,
    entry_of: Callable[[dict[str, Any]], _Entry | list[str]],
    faults: list[str],
) -> tuple[_Entry, ...] | None:
    """Read one part of the document; add what is wrong with it to the faults."""
    if part not in document:
        return None
    if not isinstance(document[part], list):
        faults.append(f"{part} is no list.")
        return None
    label = {"rules": "Rule", "web_identities": "Web identity"}[part]
    found: dict[object, tuple[int, _Entry]] = {}
    for number, given in enumerate(document[part], 1):
        entry = entry_of(given) if isinstance(given, dict) else ["it is no JSON object."]
        if isinstance(entry, list):
            faults += [f"{label} {number}, {fault}" for fault in entry]
            continue
        key = entry.key if isinstance(entry, Rule) else entry
        first, _ = found.setdefault(key, (number, entry))
        if first != number:
            faults.append(f"{label} {number} is there already: it is of the same names as {first}.")
    return tuple(entry for _, entry in found.values())


def _rule(given: dict[str, Any]) -> Rule | list[str]:
    texts = ("role", "ident", "type", "dest", "mode")
    faults = list(_field_faults(given, Rule._fields, texts))
    timeout = given.get("timeout")
    if "timeout" in given and type(timeout) is not int:
        faults.append(f"timeout: {timeout!r:.100} is no whole number of seconds.")
    if faults:
        return faults
    rule = Rule(**given)
    return [f"{field}: {sentence}" for field, sentence in rule.faults()] or rule


def _identity(given: dict[str, Any]) -> Identity | list[str]:
    with_both: dict[str, Any] = {"user": None, "group": None, **given}
    texts = [
        field for field in Identity._fields if field == "ident" or with_both[field] is not None
    ]
    if faults := list(_field_faults(with_both, Identity._fields, texts)):
        return faults
    identity = Identity(**with_both)
    return [f"{field}: {sentence}" for field, sentence in identity.faults()] or identity


def _field_faults(
    given: dict[str, Any], fields: tuple[str, ...], texts: tuple[str, ...] | list[str]
) -> Iterator[str]:
    """Yield which fields are missing, unknown, or no text."""
    for field in fields:
        if field not in given:
            yield f"{field}: it is missing."
    for field in given:
        if field not in fields:
            yield f"{field!r:.100}: there is no such field; the fields are {', '.join(fields)}."
    for field in texts:
        if field in given and not isinstance(given[field], str):
            yield f"{field}: {given[field]!r:.100} is no text."
