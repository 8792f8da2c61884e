"""Bodies: a large one is fetched together with those that wait behind it. No I/O."""

from __future__ import annotations

from itertools import islice
from typing import Final

import psycopg

from psqlmessages.client import calls
from psqlmessages.client.listening import Arrival, Listening
from psqlmessages.client.steps import Steps
from psqlmessages.exceptions import ConnectionLost, MessagesError

_MOST_BODIES: Final = 32
# More would keep the first one waiting, and memory occupied.
_MOST_BYTES: Final = 64 * 1024


def text_of(arrival: Arrival, listening: Listening) -> Steps[str | None]:
    """Find the text of an arrival; raises MessagesError where it cannot be had any more."""
    if not arrival.is_kept:
        return arrival.text
    if arrival.fetched is None:
        yield from _fetch_some(_fetched_with(arrival, listening), listening)
    if arrival.fetched is None:
        yield from _fetch(arrival, listening)
    return arrival.fetched


def _fetch_some(together: list[Arrival], listening: Listening) -> Steps[None]:
    if len(together) == 1:
        return
    try:
        texts = yield calls.get_data_many([one.payload for one in together])
    except (MessagesError, psycopg.Error):
        # One of them may be at fault: each is fetched by itself when its turn comes.
        return
    for one, text in zip(together, texts, strict=True):
        one.fetched = text
        listening.counters.fetched += text is not None


def _fetch(arrival: Arrival, listening: Listening) -> Steps[None]:
    call = calls.get_data(arrival.payload)
    try:
        payload = yield call
    except ConnectionLost:
        # Fetching changes nothing: it may be tried again, on the connection that follows.
        payload = yield call
    arrival.fetched = payload.text
    listening.counters.fetched += 1


def _fetched_with(arrival: Arrival, listening: Listening) -> list[Arrival]:
    together, size = [arrival], arrival.header.get("Size", 0)
    for one in list(islice(listening.inbox, _MOST_BODIES - 1)):
        if one.is_kept and one.fetched is None:
            size += one.header.get("Size", 0)
            if size > _MOST_BYTES:
                break
            together.append(one)
    return together
