"""Documentation page of the API: Swagger UI, without inline scripts."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import ninja
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from ninja.openapi.docs import DocsBase

_FILES: Final = {
    "swagger-ui.css": "text/css; charset=utf-8",
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui-init.js": "text/javascript; charset=utf-8",
}
_YEAR_SECONDS: Final = 365 * 24 * 60 * 60


class DocsPage(DocsBase):
    """The page. This app serves the page's files, so "ninja" need not be in INSTALLED_APPS."""

    def render_page(self, request: HttpRequest, api: Any, **_: Any) -> HttpResponse:
        """Render the page with its Content-Security-Policy."""
        context = {
            "title": api.title,
            "settings": {"url": reverse("psqlmessages:api:openapi-json"), "layout": "BaseLayout"},
            "files": [
                reverse("psqlmessages:api_file", args=[metadata.version("django-ninja"), name])
                for name in _FILES
            ],
        }
        response = render(request, "psqlmessages/rest/docs.html", context)
        response.headers["Content-Security-Policy"] = _content_security_policy()
        return response


def serve_file(_request: HttpRequest, version: str, name: str) -> HttpResponse:
    """Serve a file of Swagger UI. Browsers may cache it, because the URL contains the version."""
    if name not in _FILES or version != metadata.version("django-ninja"):
        raise Http404("There is no such file.")
    headers = {"Cache-Control": f"public, max-age={_YEAR_SECONDS}, immutable"}
    return HttpResponse(_read_file(name), content_type=_FILES[name], headers=headers)


@cache
def _read_file(name: str) -> bytes:
    return (Path(ninja.__file__).parent / "static" / "ninja" / name).read_bytes()


def _content_security_policy() -> str:
    """Build the policy: no inline scripts or styles; images also from data URLs, for Swagger UI."""
    static = urlsplit(settings.STATIC_URL or "")
    files = f"'self' {static.scheme}://{static.netloc}" if static.netloc else "'self'"
    return (
        f"default-src 'none'; script-src {files}; style-src {files}; img-src {files} data:;"
        " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
