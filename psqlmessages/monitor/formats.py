"""Durations, counts and commands as text."""

from __future__ import annotations

from datetime import timedelta
from shlex import quote
from typing import Final

from django.utils.translation import gettext

# Elements and messages are counted up to this number.
MAX_COUNTED: Final = 10_000
# A text lists at most this number of names.
MAX_NAMES: Final = 10


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


def allow_command(role: str, ident: str, type_: str, dest: str, mode: str) -> str:
    """Return the command that adds a rule, or adds the mode to an existing rule.

    Empty values become the placeholders ROLE, TYPE, NAME and MODE. If ``dest`` is known, an empty
    mode becomes RW.
    """
    mode = mode or ("RW" if dest else "MODE")
    arguments = f"{quote(ident)} {mode} {type_ or 'TYPE'} {quote(dest or 'NAME')}"
    return f"python manage.py psqlmessages allow {arguments} --role {quote(role or 'ROLE')}"


def exchange_command(command: str, name: str) -> str:
    """Return a command line for an exchange; ``command``: run or start."""
    return f"python manage.py psqlmessages exchange {command} {quote(name)}"
