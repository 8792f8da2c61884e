"""Access to the monitor: permissions of its users, and the Content-Security-Policy of its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings

VIEW_MONITOR: Final = "psqlmessages.view_monitor"
VIEW_BODIES: Final = "psqlmessages.view_bodies"
SEND_TEST_MESSAGES: Final = "psqlmessages.send_test_messages"


@dataclass(frozen=True, slots=True)
class MonitorAccess:
    """The permissions of a user in the monitor."""

    can_view: bool = False
    can_view_bodies: bool = False


def load_access(user: Any) -> MonitorAccess:
    """Read a user's permissions from the database; a user who is not staff has none."""
    if not (user.is_active and user.is_staff and user.has_perm(VIEW_MONITOR)):
        return MonitorAccess()
    return MonitorAccess(can_view=True, can_view_bodies=user.has_perm(VIEW_BODIES))


def content_security_policy() -> str:
    """Build the policy: pages load data from this origin, and files from STATIC_URL too."""
    static = urlsplit(settings.STATIC_URL or "")
    sources = f"'self' {static.scheme}://{static.netloc}" if static.netloc else "'self'"
    return (
        f"default-src 'none'; script-src {sources}; style-src {sources}; img-src {sources} data:;"
        f" font-src {sources}; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
        " base-uri 'none'"
    )
