"""Types of command-line arguments: what argparse refuses with exit code 2."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import timedelta


def natural(text: str) -> int:
    """Read a whole number that is not negative."""
    return _number(text, 0)


def positive(text: str) -> int:
    """Read a whole number of at least one."""
    return _number(text, 1)


def seconds(text: str) -> timedelta:
    """Read a number of seconds that is not negative."""
    try:
        duration = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise ArgumentTypeError(f"not a number of seconds: {text!r}") from None
    if duration < timedelta(0):
        raise ArgumentTypeError(f"seconds cannot be negative: {text!r}")
    return duration


def _number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"not a whole number: {text!r}") from None
    if number < least:
        raise ArgumentTypeError(f"at least {least} is needed: {text!r}")
    return number
