"""Options of a node: intervals, timeouts, limits; and defaults of connection parameters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from psqlmessages.client.durations import as_timedelta

DEFAULT_CALL_TIMEOUT: Final = timedelta(seconds=5)

# Keepalives detect a dead idle connection within about 25 s. tcp_user_timeout detects a dead
# connection with unacknowledged data. Only the probe detects that a proxy has stopped forwarding.
CONNECTION_DEFAULTS: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a node. Durations are timedeltas; a number of seconds is converted.

    ``synchronous_commit``: each commit waits until its WAL is on disk; topics and RPC need no WAL.
    ``evaluate_interval``: how often the node runs housekeeping.
    ``probe_interval``: how often the node checks that its connection still listens.
    ``probe_timeout``: the time limit for a probe, and the shortest time limit for sending a call.
    ``answer_timeout``: a connection without an answer for this long is considered lost.
    ``reconnect_wait``: how long a call waits for the node to reconnect.
    ``backoff_min``, ``backoff_max``: limits of the growing pauses between attempts to reconnect.
    ``stream_poll_interval``: the longest pause between reads of a subscription without wake-ups.
    ``inbox_limit``: an AsyncNode stops reading while this many messages are in its inbox.
    ``concurrency``: how many messages ``run`` handles at the same time; 1: one after the other.
    ``stop_timeout``: how long ``run`` and ``close`` wait for running handlers after ``stop``.
    """

    synchronous_commit: bool = False
    evaluate_interval: timedelta = timedelta(seconds=1)
    probe_interval: timedelta = timedelta(seconds=15)
    probe_timeout: timedelta = timedelta(seconds=5)
    answer_timeout: timedelta = timedelta(seconds=60)
    reconnect_wait: timedelta = timedelta(seconds=5)
    backoff_min: timedelta = timedelta(milliseconds=100)
    backoff_max: timedelta = timedelta(seconds=4)
    stream_poll_interval: timedelta = timedelta(seconds=30)
    inbox_limit: int = 10_000
    concurrency: int = 100
    stop_timeout: timedelta = timedelta(seconds=5)

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(field.default, timedelta):
                value = as_timedelta(getattr(self, field.name), field.name)
                object.__setattr__(self, field.name, value)
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency!r:.100}")


def complete_conninfo(dsn: str, name: str) -> str:
    """Add default parameters to a connection string; ``name`` is for application_name."""
    settings: dict[str, Any] = conninfo_to_dict(dsn)
    defaults = CONNECTION_DEFAULTS | {"fallback_application_name": f"psqlmessages {name}"}
    # Payloads are decoded as UTF-8, so PGCLIENTENCODING must not apply.
    return make_conninfo(**(defaults | settings | {"client_encoding": "UTF8"}))
