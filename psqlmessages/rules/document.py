"""JSON documents of rules and web identities: parsing, checks and writing. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from psqlmessages.wire import MalformedText, decode_document, describe_unstorable, parse_strict_json

# Entries of a document: rules and web identities, with their errors and warnings

TYPES = ("Rpc", "Topic", "Queue")
MODES = ("W", "R", "RW", "O", "A")
NAME_CHARACTERS = 100
ROLE_CHARACTERS = 63
MAX_SECONDS = 2**31 - 1


class RuleError(NamedTuple):
    """An error of an entry: the name of the invalid field, and a sentence."""

    field: str
    sentence: str


class RuleEntry(NamedTuple):
    """A rule, with the columns of ``messages.auth``."""

    role: str
    ident: str
    type: str
    dest: str
    mode: str
    timeout: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The fields that identify a rule."""
        return self.role, self.ident, self.type, self.dest

    def __str__(self) -> str:
        return f"{self.ident} ({self.role}): {self.mode} {self.type} {self.dest}, {self.timeout} s"

    def errors(self) -> Iterator[RuleError]:
        """Yield the errors of this rule."""
        yield from _name_errors("role", self.role, ROLE_CHARACTERS)
        yield from _name_errors("ident", self.ident)
        yield from _name_errors("dest", self.dest)
        if self.type not in TYPES:
            text = f"The type {self.type!r:.100} is not one of {', '.join(TYPES)}."
            yield RuleError("type", text)
        if self.mode not in MODES:
            text = f"The mode {self.mode!r:.100} is not one of {', '.join(MODES)}."
            yield RuleError("mode", text)
        elif self.type == "Rpc" and self.mode != "W":
            yield RuleError(
                "mode",
                f"Mode {self.mode} is not valid for Rpc: a rule allows calling (W), and answering"
                " needs no rule.",
            )
        elif self.mode == "O" and self.type == "Queue":
            yield RuleError("mode", "Mode O is for topics only: a queue cannot be observed.")
        elif self.mode == "A" and self.type == "Topic":
            yield RuleError("mode", "Mode A is for queues only: a topic has no settings.")
        if self.timeout <= 0:
            yield RuleError("timeout", "The timeout must be 1 second or more.")
        elif self.timeout > MAX_SECONDS:
            yield RuleError("timeout", f"The timeout must be {MAX_SECONDS:,} seconds or less.")

    def remarks(self) -> Iterator[str]:
        """Yield warnings about values that are allowed, but probably not intended."""
        for label, name in (("node", self.ident), ("destination", self.dest)):
            yield from _remarks_of_name(label, name)
        yield from _remarks_of_blanks("role", self.role)


class Identity(NamedTuple):
    """An ident that a user or the users of a group may use; ``user`` or ``group`` is None."""

    user: str | None
    group: str | None
    ident: str

    def __str__(self) -> str:
        owner = f"user {self.user}" if self.group is None else f"group {self.group}"
        return f"{owner} as {self.ident}"

    def errors(self) -> Iterator[RuleError]:
        """Yield the errors of this identity."""
        yield from _name_errors("ident", self.ident)
        if (self.user is None) == (self.group is None):
            yield RuleError("user", "Name either a user or a group, not both.")

    def remarks(self) -> Iterator[str]:
        """Yield warnings about values that are allowed, but probably not intended."""
        yield from _remarks_of_name("node", self.ident)


def _name_errors(field: str, name: str, maximum: int = NAME_CHARACTERS) -> Iterator[RuleError]:
    if not name:
        yield RuleError(field, "It is empty.")
    elif len(name) > maximum:
        yield RuleError(field, f"It has {len(name):,} characters; the maximum is {maximum}.")
    elif describe_unstorable(name):
        yield RuleError(field, f"{name!r:.100} contains a character that PostgreSQL cannot store.")


def _remarks_of_name(label: str, name: str) -> Iterator[str]:
    if "*" in name[:-1]:
        yield (
            f"The * in the {label} {name} is not at the end, so it is an ordinary character and"
            " matches only itself."
        )
    yield from _remarks_of_blanks(label, name)


def _remarks_of_blanks(label: str, name: str) -> Iterator[str]:
    if name != name.strip():
        yield f"The {label} “{name}” begins or ends with a space, which is part of the name."


VERSION = 1
MAX_BYTES = 10 * 1024 * 1024

_MAX_ERRORS = 20
_Entry = TypeVar("_Entry", RuleEntry, Identity)


@dataclass(frozen=True)
class Definitions:
    """Rules and web identities. If a document lacks a part, the part is None."""

    rules: tuple[RuleEntry, ...] | None = None
    web_identities: tuple[Identity, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object with sorted entries, so that equal rules give equal objects."""
        document: dict[str, Any] = {"version": VERSION}
        if self.rules is not None:
            document["rules"] = [rule._asdict() for rule in sorted(self.rules)]
        if self.web_identities is not None:
            identities = sorted(
                self.web_identities,
                key=lambda entry: (entry.user or "", entry.group or "", entry.ident),
            )
            document["web_identities"] = [identity._asdict() for identity in identities]
        return document


class MalformedDefinitions(ValueError):
    """A document is invalid, or names unknown users or groups. ``errors`` has sentences."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


def write(definitions: Definitions) -> str:
    """Return a document as indented JSON."""
    return json.dumps(definitions.as_json(), indent=2, ensure_ascii=False) + "\n"


def read(text: bytes | str) -> Definitions:
    """Parse a document; raise MalformedDefinitions with its first 20 errors."""
    try:
        document = parse_strict_json(decode_document(text, MAX_BYTES))
    except MalformedText as error:
        raise MalformedDefinitions([error.sentence("The document")]) from None
    if not isinstance(document, dict):
        raise MalformedDefinitions(["The document is not a JSON object."])
    if document.get("version") != VERSION or isinstance(document.get("version"), bool):
        raise MalformedDefinitions(
            [f"The version is {document.get('version')!r:.100}; only {VERSION} is supported."]
        )
    errors = [
        f"The document has an unknown field {field!r:.100}."
        for field in document
        if field not in ("version", "rules", "web_identities")
    ]
    definitions = Definitions(
        _parse_part(document, "rules", _parse_rule, errors),
        _parse_part(document, "web_identities", _parse_identity, errors),
    )
    if errors:
        if (more := len(errors) - _MAX_ERRORS) > 0:
            errors[_MAX_ERRORS:] = [f"And {more:,} more."]
        raise MalformedDefinitions(errors)
    return definitions


def _parse_part(
    document: dict[str, Any],
    part: str,
    parse_entry: Callable[[dict[str, Any]], _Entry | list[str]],
    errors: list[str],
) -> tuple[_Entry, ...] | None:
    """Parse one part of the document; append the errors of its entries to ``errors``."""
    if part not in document:
        return None
    if not isinstance(document[part], list):
        errors.append(f"{part} is not a list.")
        return None
    label = {"rules": "Rule", "web_identities": "Web identity"}[part]
    # By key: the number of the first entry with this key, and the entry.
    entries: dict[object, tuple[int, _Entry]] = {}
    for number, given in enumerate(document[part], 1):
        if not isinstance(given, dict):
            errors.append(f"{label} {number} is not a JSON object.")
            continue
        entry = parse_entry(given)
        if isinstance(entry, list):
            errors += [f"{label} {number}, {error}" for error in entry]
            continue
        key = entry.key if isinstance(entry, RuleEntry) else entry
        first, _ = entries.setdefault(key, (number, entry))
        if first != number:
            errors.append(f"{label} {number} has the same names as {label.lower()} {first}.")
    return tuple(entry for _, entry in entries.values())


def _parse_rule(given: dict[str, Any]) -> RuleEntry | list[str]:
    text_fields = ("role", "ident", "type", "dest", "mode")
    errors = list(_field_errors(given, RuleEntry._fields, text_fields))
    timeout = given.get("timeout")
    if "timeout" in given and type(timeout) is not int:
        errors.append(f"timeout: {timeout!r:.100} is not a whole number of seconds.")
    if errors:
        return errors
    rule = RuleEntry(**given)
    return [f"{field}: {sentence}" for field, sentence in rule.errors()] or rule


def _parse_identity(given: dict[str, Any]) -> Identity | list[str]:
    with_defaults: dict[str, Any] = {"user": None, "group": None, **given}
    text_fields = [
        field for field in Identity._fields if field == "ident" or with_defaults[field] is not None
    ]
    if errors := list(_field_errors(with_defaults, Identity._fields, text_fields)):
        return errors
    identity = Identity(**with_defaults)
    return [f"{field}: {sentence}" for field, sentence in identity.errors()] or identity


def _field_errors(
    given: dict[str, Any], fields: tuple[str, ...], text_fields: tuple[str, ...] | list[str]
) -> Iterator[str]:
    """Yield errors: missing fields, unknown fields, and ``text_fields`` that are not strings."""
    for field in fields:
        if field not in given:
            yield f"{field}: it is missing."
    for field in given:
        if field not in fields:
            yield f"{field!r:.100}: unknown field; the fields are {', '.join(fields)}."
    for field in text_fields:
        if field in given and not isinstance(given[field], str):
            yield f"{field}: {given[field]!r:.100} is not a string."
