"""Access to the monitor: permissions for pages and bodies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpRequest, HttpResponse

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


# Content-Security-Policy: the monitor's pages load only their own scripts and styles.

_HEADER: Final = "Content-Security-Policy"


def with_policy(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Set the Content-Security-Policy of a view's pages, unless the view has set one."""

    @wraps(view)
    def wrapped(request: HttpRequest, *arguments: Any, **named: Any) -> HttpResponse:
        response = view(request, *arguments, **named)
        response.headers.setdefault(_HEADER, policy())
        return response

    return wrapped


def policy() -> str:
    """Build the policy: allow this origin, and the origin of STATIC_URL for static files."""
    static = urlsplit(settings.STATIC_URL or "")
    files = f"'self' {static.scheme}://{static.netloc}" if static.netloc else "'self'"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {files}",
            f"style-src {files}",
            f"img-src {files} data:",
            f"font-src {files}",
            "connect-src 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        )
    )
