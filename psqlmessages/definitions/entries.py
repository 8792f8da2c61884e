"""Entries of a document: a rule, a web identity, and what is wrong or odd with one. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TYPES = ("Rpc", "Topic", "Queue")
MODES = ("W", "R", "RW", "O")
NAME_CHARACTERS = 100
ROLE_CHARACTERS = 63
MOST_SECONDS = 2**31 - 1


class Fault(NamedTuple):
    """Why an entry cannot be: in which field, as a sentence."""

    field: str
    sentence: str


class Rule(NamedTuple):
    """A rule, as ``messages.auth`` shows it."""

    role: str
    ident: str
    type: str
    dest: str
    mode: str
    timeout: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells a rule from all others."""
        return self.role, self.ident, self.type, self.dest

    def __str__(self) -> str:
        return f"{self.ident} ({self.role}): {self.mode} {self.type} {self.dest}, {self.timeout} s"

    def faults(self) -> Iterator[Fault]:
        """Yield why this rule cannot mean anything."""
        yield from _name_faults("role", self.role, ROLE_CHARACTERS)
        yield from _name_faults("ident", self.ident)
        yield from _name_faults("dest", self.dest)
        if self.type not in TYPES:
            yield Fault("type", f"The type {self.type!r:.100} is none of {', '.join(TYPES)}.")
        if self.mode not in MODES:
            yield Fault("mode", f"The mode {self.mode!r:.100} is none of {', '.join(MODES)}.")
        elif self.type == "Rpc" and self.mode != "W":
            yield Fault(
                "mode",
                f"Mode {self.mode} means nothing for Rpc: a rule says who may ask (W), and who is"
                " asked needs none to answer.",
            )
        elif self.mode == "O" and self.type == "Queue":
            yield Fault("mode", "Mode O is for topics only: a queue cannot be observed.")
        if self.timeout <= 0:
            yield Fault("timeout", "The timeout must be 1 second or more.")
        elif self.timeout > MOST_SECONDS:
            yield Fault("timeout", f"The timeout must be {MOST_SECONDS:,} seconds or less.")

    def remarks(self) -> Iterator[str]:
        """Yield what is allowed, but hardly meant."""
        for what, name in (("ident", self.ident), ("destination", self.dest)):
            yield from _remarks_of_name(what, name)
        yield from _remarks_of_blanks("role", self.role)


class Identity(NamedTuple):
    """A web identity: a user or a group, the other being None, and the ident it may use."""

    user: str | None
    group: str | None
    ident: str

    def __str__(self) -> str:
        who = f"user {self.user}" if self.group is None else f"group {self.group}"
        return f"{who} as {self.ident}"

    def faults(self) -> Iterator[Fault]:
        """Yield why this identity cannot be."""
        yield from _name_faults("ident", self.ident)
        if (self.user is None) == (self.group is None):
            yield Fault("user", "It names a user or a group: one of them, and not both.")

    def remarks(self) -> Iterator[str]:
        """Yield what is allowed, but hardly meant."""
        yield from _remarks_of_name("ident", self.ident)


def _name_faults(field: str, name: str, most: int = NAME_CHARACTERS) -> Iterator[Fault]:
    if not name:
        yield Fault(field, "It is empty.")
    elif len(name) > most:
        yield Fault(field, f"It has {len(name):,} characters; {most} are the most.")
    elif "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        yield Fault(field, f"{name!r:.100} holds a character that PostgreSQL cannot keep.")


def _remarks_of_name(what: str, name: str) -> Iterator[str]:
    if "*" in name[:-1]:
        yield (
            f"In the {what} {name} a * stands before the end: there it is a plain character,"
            " and matches nothing but itself."
        )
    yield from _remarks_of_blanks(what, name)


def _remarks_of_blanks(what: str, name: str) -> Iterator[str]:
    if name != name.strip():
        yield f"The {what} “{name}” begins or ends with a blank, which belongs to the name."
