"""Names of the monitor's nodes, and URLs of topics."""

from __future__ import annotations

import os
import secrets
from urllib.parse import quote, urlencode

from django.urls import reverse
from django.urls.converters import StringConverter

from psqlmessages.conf import get_settings


def ident_pattern() -> str:
    """Return the idents that the monitors of this project use: what their rule has to name."""
    return f"{get_settings().NODE or 'psqlmessages'}.monitor.*"


def new_ident() -> str:
    """Draw an ident for the monitor of this process."""
    return f"{ident_pattern()[:-1]}{os.getpid()}-{secrets.token_hex(4)}"


def topic_url(name: str) -> str:
    """Address the page of a topic; names that no path can hold go into the query."""
    base = reverse("psqlmessages:monitor_topics")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\n" in name:
        return f"{base}?{urlencode({'name': name})}"
    return f"{base}{quote(name)}/"


class TopicConverter(StringConverter):
    """A topic in a path: its name may hold slashes and line ends."""

    regex = r"[\s\S]+"
