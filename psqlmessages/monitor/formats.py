"""Durations, counts and rules as text."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django.utils.translation import gettext

from psqlmessages.exceptions import insert_rules

# Elements and messages are counted up to this number.
MAX_COUNTED: Final = 10_000


def format_age(age: timedelta | float | None) -> str:
    """Format a duration, or its seconds, as in ``3 min``; "" if it is unknown."""
    if age is None:
        return ""
    seconds = max(0, int(age.total_seconds() if isinstance(age, timedelta) else age))
    if seconds >= 2 * 86_400:
        return gettext("{number} days").format(number=seconds // 86_400)
    if seconds >= 2 * 3600:
        return gettext("{number} h").format(number=seconds // 3600)
    if seconds >= 2 * 60:
        return gettext("{number} min").format(number=seconds // 60)
    return gettext("{number} s").format(number=seconds)


def format_count(number: int | None, limit: int = MAX_COUNTED) -> str:
    """Format a number, or ``over 10,000`` if it exceeds this ``limit``; "" if it is unknown."""
    if number is None:
        return ""
    return gettext("over {limit:,}").format(limit=limit) if number > limit else f"{number:,}"


def rule_statement(ident: str, type_: str, dest: str, mode: str) -> str:
    """Return the statement that adds a rule, with the placeholder ROLE for the role.

    Without ``dest``, it has the placeholder TOPIC. The default type is Topic, the default mode W.
    """
    return insert_rules(("ROLE", ident, type_ or "Topic", dest or "TOPIC", mode or "W"))
