"""Broken parts: what of this process does not work at present, as its parts report to /healthz."""

from __future__ import annotations

from collections.abc import Callable

# By the name that /healthz shows. Called in the event loop that asks.
_checks: dict[str, Callable[[], bool]] = {}


def register(name: str, is_broken: Callable[[], bool]) -> None:
    """Let a part report, as its module is imported; its check neither waits nor raises."""
    _checks[name] = is_broken


def broken_parts() -> list[str]:
    """Name the parts that do not work now."""
    return sorted(name for name, is_broken in _checks.items() if is_broken())
