"""Health of the parts of this process, such as the WebSocket hub, for /healthz."""

from __future__ import annotations

from collections.abc import Callable

# Functions that return whether a part is broken, by the name of the part.
_checks: dict[str, Callable[[], bool]] = {}


def register(name: str, is_broken: Callable[[], bool]) -> None:
    """Register a part of this process; /healthz shows ``name`` while ``is_broken`` returns True.

    /healthz calls ``is_broken`` in its event loop, so it must not wait or raise an error.
    """
    _checks[name] = is_broken


def broken_parts() -> list[str]:
    """Return the names of the parts that do not work now."""
    return sorted(name for name, is_broken in _checks.items() if is_broken())
