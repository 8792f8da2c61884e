"""Options of a node, and the connection parameters that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo

DEFAULT_CALL_TIMEOUT: Final = timedelta(seconds=5)

# Found dead within about 25 s: an idle connection by keepalives, one with unacknowledged data by
# tcp_user_timeout. What only looks alive (a proxy that stopped forwarding) is left to the probe.
CONNECTION_DEFAULTS: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


@dataclass(frozen=True, slots=True)
class Options:
    """How a node behaves.

    ``synchronous_commit``: wait for the WAL at each commit, which messages do not need.
    ``answer_timeout``: a server that answers nothing for so long is taken for gone.
    ``reconnect_wait``: how long a call made while the connection is away waits for it to return.
    ``stream_poll_interval``: how often at least a subscription is read, should no wake come.
    ``inbox_limit``: an AsyncNode stops reading while so many messages wait to be taken.
    """

    synchronous_commit: bool = False
    evaluate_interval: timedelta = timedelta(seconds=1)
    probe_interval: timedelta = timedelta(seconds=15)
    probe_timeout: timedelta = timedelta(seconds=5)
    answer_timeout: timedelta = timedelta(seconds=60)
    reconnect_wait: timedelta = timedelta(seconds=5)
    backoff_least: timedelta = timedelta(milliseconds=100)
    backoff_most: timedelta = timedelta(seconds=4)
    stream_poll_interval: timedelta = timedelta(seconds=30)
    inbox_limit: int = 10_000


def conninfo(dsn: str, ident: str) -> str:
    """Complete a connection string; whatever it sets itself stays."""
    given: dict[str, Any] = conninfo_to_dict(dsn)
    defaults = CONNECTION_DEFAULTS | {"fallback_application_name": f"psqlmessages {ident}"}
    # Payloads are decoded as UTF-8 here, whatever PGCLIENTENCODING says.
    return make_conninfo(**(defaults | given | {"client_encoding": "UTF8"}))
