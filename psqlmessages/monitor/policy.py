"""Policy: the monitor's pages run their own scripts and styles, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpRequest, HttpResponse

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
    """Write the policy: all from here, static files also from where the settings say."""
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
