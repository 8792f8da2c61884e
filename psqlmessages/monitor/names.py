"""Names: those of topics, and the monitor's own."""

from __future__ import annotations

import os
import secrets
from typing import Final
from urllib.parse import quote, urlencode

from django.urls import reverse
from django.urls.converters import StringConverter

from psqlmessages.conf import get_settings

_CHARACTERS: Final = 100


def is_name(name: str) -> bool:
    """Tell whether PostgreSQL could hold a topic of this name."""
    if not 0 < len(name) <= _CHARACTERS or "\0" in name:
        return False
    # Lone surrogates, which JSON can write, are no text.
    return name.encode(errors="replace").decode() == name


def patterns(name: str) -> list[str]:
    """List the name and all patterns that mean it."""
    return [name, *(name[:length] + "*" for length in range(len(name) + 1))]


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
