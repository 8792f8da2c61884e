"""Access to the monitor: permissions of its users, and the Content-Security-Policy of its pages."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings

VIEW_MONITOR: Final = "psqlmessages.view_monitor"
VIEW_BODIES: Final = "psqlmessages.view_bodies"
VIEW_ELEMENTS: Final = "psqlmessages.view_element"
ACCESS_PERMISSIONS: Final = frozenset((VIEW_MONITOR, VIEW_BODIES))
SEND_TEST_MESSAGES: Final = "psqlmessages.send_test_messages"
# The permissions for the buttons on the admin's page of an exchange.
START_EXCHANGE: Final = ("psqlmessages.change_exchange",)
ADD_RULES_OF_EXCHANGE: Final = (
    "psqlmessages.view_exchange", "psqlmessages.add_auth", "psqlmessages.change_auth",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MonitorAccess:
    """The permissions of a user in the monitor."""

    can_view: bool = False
    can_view_bodies: bool = False


def load_access(user: Any) -> MonitorAccess:
    """Read the permissions of a user in the monitor."""
    is_staff = user.is_active and user.is_staff
    return access_of(
        user, {name for name in ACCESS_PERMISSIONS if is_staff and user.has_perm(name)}
    )


def access_of(user: Any, granted: Set[str]) -> MonitorAccess:
    """Return the access of a user to whom the permissions ``granted`` are given.

    Only active staff users with VIEW_MONITOR have access.
    """
    if not (user.is_active and user.is_staff and VIEW_MONITOR in granted):
        return MonitorAccess()
    return MonitorAccess(can_view=True, can_view_bodies=VIEW_BODIES in granted)


def has_admin_permission(user: Any, permission: str) -> bool:
    """Return whether a user has a permission in the admin, where "change" includes "view"."""
    return user.has_perm(permission) or user.has_perm(permission.replace(".view_", ".change_"))


def content_security_policy() -> str:
    """Build the policy: data come from this origin, files also from the origin of STATIC_URL."""
    static = urlsplit(settings.STATIC_URL or "")
    sources = f"'self' {static.scheme}://{static.netloc}" if static.netloc else "'self'"
    return (
        f"default-src 'none'; script-src {sources}; style-src {sources}; img-src {sources} data:;"
        f" font-src {sources}; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
        " base-uri 'none'"
    )
