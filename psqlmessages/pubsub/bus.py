"""Bus: what PubSub and AsyncPubSub have in common: their handlers, and what was published."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Final

from psqlmessages.client.options import Options
from psqlmessages.pubsub import segments
from psqlmessages.pubsub.assembly import Assembly
from psqlmessages.pubsub.events import Counters, Handler
from psqlmessages.pubsub.intake import Intake
from psqlmessages.pubsub.statements import Script
from psqlmessages.pubsub.subscriptions import Subscriptions

MAX_UNFINISHED: Final = 1_000
MAX_UNFINISHED_BYTES: Final = 64 * 1024 * 1024


class Bus:
    """The handlers of a bus and the state behind it; see :class:`PubSub`."""

    _awaits_handlers: ClassVar[bool] = False

    def __init__(
        self,
        options: Options,
        interval: float,
        max_unfinished: int,
        max_unfinished_bytes: int,
        *,
        skip_self: bool,
    ) -> None:
        for name, value in (
            ("interval", interval),
            ("max_unfinished", max_unfinished),
            ("max_unfinished_bytes", max_unfinished_bytes),
        ):
            if not value > 0:
                raise ValueError(f"{name} is more than 0, not {value!r}")
        assembly = Assembly(max_unfinished, max_unfinished_bytes)
        self._subscriptions = Subscriptions(interval, assembly, options, skip_self=skip_self)

    def on(self, channel: str, handler: Handler) -> None:
        """Call a function with each :class:`Event` of a channel that is subscribed to.

        What it raises is logged and counted, and the bus goes on.
        """
        if not callable(handler):
            raise TypeError(f"a handler can be called, unlike {handler!r:.100}")
        if not self._awaits_handlers and inspect.iscoroutinefunction(handler):
            raise TypeError("a coroutine function can be a handler of AsyncPubSub only")
        self._subscriptions.on(segments.channel_name(channel), handler)

    def off(self, channel: str, handler: Handler) -> bool:
        """Undo ``on``; False where there was no such handler."""
        return self._subscriptions.off(channel, handler)

    @property
    def is_healthy(self) -> bool:
        """Whether the bus is connected, as far as its last keep-alive and calls showed."""
        return self._subscriptions.is_connected

    @property
    def counters(self) -> Counters:
        """What the bus has seen since it was made."""
        return self._subscriptions.counters


class Publishing:
    """A message about to be published: checked, and cut as the connection's state wants it."""

    def __init__(self, subscriptions: Subscriptions, channel: str, payload: Any) -> None:
        self._subscriptions = subscriptions
        self._channel = segments.channel_name(channel)
        self._text = segments.flagged(payload)

    def __call__(self, intake: Intake) -> Script[None]:
        """Give the script that sends it; it looks at the connection when it is begun."""
        yield from self._subscriptions.publishing(
            self._channel, self._text, is_in_transaction=intake.is_in_transaction
        )
