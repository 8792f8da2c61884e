"""Names of the monitor's nodes, and URLs of pages."""

from __future__ import annotations

import os
import secrets
from urllib.parse import quote, urlencode

from django.urls import NoReverseMatch, reverse

from psqlmessages.conf import get_settings


def ident_pattern() -> str:
    """Return the pattern that the idents of this project's monitors match, for use in a rule."""
    return f"{get_settings().NODE or 'psqlmessages'}.monitor.*"


def new_ident() -> str:
    """Generate a new ident that matches ``ident_pattern()``."""
    return f"{ident_pattern()[:-1]}{os.getpid()}-{secrets.token_hex(4)}"


def object_url(kind: str, name: str) -> str:
    """Return the URL of the page of a topic, queue, stream or node.

    A name that cannot be a path goes into the query string.
    """
    base = reverse(f"psqlmessages:monitor_{kind}s")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\n" in name:
        return f"{base}?{urlencode({'name': name})}"
    return f"{base}{quote(name)}/"


def find_url(name: str, *arguments: str) -> str:
    """Return the URL of a view, or "" if the project has no such view."""
    try:
        return reverse(name, args=arguments)
    except NoReverseMatch:
        return ""
