"""Messages: what a node receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from psqlmessages.exceptions import MessagesError

RPC = "Rpc"
TOPIC = "Topic"
RETURN = "Return"
SYS = "Sys"
TYPES = frozenset({RPC, TOPIC, RETURN, SYS})

CONNECTION_LOST = "connection_lost"
RECONNECTED = "reconnected"


class Replier(Protocol):
    """The node that received a message, and can answer it."""

    def reply(self, message: Message, body: Any) -> Any:
        """Answer."""

    def reply_error(self, message: Message, reason: str) -> Any:
        """Answer that the request failed."""


@dataclass(slots=True)
class Message:
    """One message, or one system event (type "Sys": ``event`` and ``ident`` say what happened).

    ``to`` is a node for "Rpc" and "Return", a topic for "Topic"; ``size`` counts the bytes of the
    body as it travelled; ``away`` is set in the local event "reconnected" only.
    """

    type: str
    sender: str = ""
    to: str = ""
    content: Any = None
    topic: str = ""
    event: str = ""
    ident: str = ""
    token: str | None = None
    id: int | None = None
    size: int = 0
    away: timedelta | None = None
    error: MessagesError | None = None
    replier: Replier | None = field(default=None, repr=False, compare=False)
    is_answered: bool = field(default=False, compare=False)

    @property
    def body(self) -> Any:
        """The whole body; raises what prevented its fetching (a large body that has expired)."""
        if self.error is not None:
            raise self.error
        return self.content

    @property
    def wants_answer(self) -> bool:
        """Whether the sender gave a token, and so waits for an answer."""
        return self.token is not None and self.type in (RPC, TOPIC)

    def reply(self, body: Any) -> Any:
        """Answer the sender; on a message of an AsyncNode, await the result."""
        return self._answerer().reply(self, body)

    def reply_error(self, reason: str) -> Any:
        """Answer that the request failed: the call raises CallFailed; await it as ``reply``."""
        return self._answerer().reply_error(self, reason)

    def _answerer(self) -> Replier:
        if self.replier is None or not self.wants_answer:
            raise ValueError("the sender of this message gave no token: it waits for no answer")
        self.is_answered = True
        return self.replier
