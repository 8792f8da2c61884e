"""Admission: who may see the monitor, and the bodies in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

VIEW_MONITOR: Final = "psqlmessages.view_monitor"
VIEW_BODIES: Final = "psqlmessages.view_bodies"


@dataclass(frozen=True, slots=True)
class Permit:
    """What a user may see: the monitor, and bodies in it."""

    monitor: bool = False
    bodies: bool = False


def permit_of(user: Any) -> Permit:
    """Ask what a user may see: staff with the permissions; queries the database."""
    if not (user.is_active and user.is_staff and user.has_perm(VIEW_MONITOR)):
        return Permit()
    return Permit(monitor=True, bodies=user.has_perm(VIEW_BODIES))
