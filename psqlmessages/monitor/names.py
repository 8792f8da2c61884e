"""Names of the monitor's nodes, and URLs of topics."""

from __future__ import annotations

import os
import secrets
from urllib.parse import quote, urlencode

from django.urls import reverse
from django.urls.converters import StringConverter

from psqlmessages.conf import get_settings


def ident_pattern() -> str:
    """Return the pattern of this project's monitor idents, for their rule."""
    return f"{get_settings().NODE or 'psqlmessages'}.monitor.*"


def new_ident() -> str:
    """Generate an ident for the monitor of this process."""
    return f"{ident_pattern()[:-1]}{os.getpid()}-{secrets.token_hex(4)}"


def topic_url(name: str) -> str:
    """Return the URL of a topic page; a name that cannot be a path goes into the query string."""
    base = reverse("psqlmessages:monitor_topics")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\n" in name:
        return f"{base}?{urlencode({'name': name})}"
    return f"{base}{quote(name)}/"


class TopicConverter(StringConverter):
    """A topic in a path: its name may contain slashes and newlines."""

    regex = r"[\s\S]+"
