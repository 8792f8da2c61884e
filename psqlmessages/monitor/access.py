"""Access to the monitor: permissions for pages and bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings

VIEW_MONITOR: Final = "psqlmessages.view_monitor"
VIEW_BODIES: Final = "psqlmessages.view_bodies"


@dataclass(frozen=True, slots=True)
class MonitorAccess:
    """The permissions of a user in the monitor: view it, and view message bodies."""

    monitor: bool = False
    bodies: bool = False


def permit_of(user: Any) -> MonitorAccess:
    """Return a user's permissions, none if not staff; queries the database."""
    if not (user.is_active and user.is_staff and user.has_perm(VIEW_MONITOR)):
        return MonitorAccess()
    return MonitorAccess(monitor=True, bodies=user.has_perm(VIEW_BODIES))


def policy() -> str:
    """Build the Content-Security-Policy of the pages: this origin, and files from STATIC_URL."""
    static = urlsplit(settings.STATIC_URL or "")
    files = f"'self' {static.scheme}://{static.netloc}" if static.netloc else "'self'"
    return (
        f"default-src 'none'; script-src {files}; style-src {files}; img-src {files} data:;"
        f" font-src {files}; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
        " base-uri 'none'"
    )
