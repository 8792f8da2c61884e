"""Health of the parts of this process, for /healthz."""

from __future__ import annotations

from collections.abc import Callable

# By the name that /healthz shows. The event loop of /healthz calls them.
_checks: dict[str, Callable[[], bool]] = {}


def register(name: str, is_broken: Callable[[], bool]) -> None:
    """Register the check of a part, at import of its module. It must not wait or raise."""
    _checks[name] = is_broken


def broken_parts() -> list[str]:
    """Return the names of the parts that do not work now."""
    return sorted(name for name, is_broken in _checks.items() if is_broken())
