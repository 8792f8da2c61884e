"""Health of the parts of this process, for /healthz."""

from __future__ import annotations

from collections.abc import Callable

# By part: the function that returns whether it is broken.
_checks: dict[str, Callable[[], bool]] = {}


def register(name: str, is_broken: Callable[[], bool]) -> None:
    """Register a part of this process when its module is imported; /healthz shows its name.

    The event loop of /healthz calls ``is_broken``, which must not wait or raise an error.
    """
    _checks[name] = is_broken


def broken_parts() -> list[str]:
    """Return the names of the parts that do not work now."""
    return sorted(name for name, is_broken in _checks.items() if is_broken())
