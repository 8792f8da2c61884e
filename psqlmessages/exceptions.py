"""Exceptions: one class per error number of the SQL core.

Programs use only the number. The text is for people: it may change.
Numbers 57 to 59 come from the WebSocket relay.
"""

from __future__ import annotations

import re
from typing import ClassVar

DOCS_URL = "https://psqlmessages.readthedocs.io/en/stable/"

registry: dict[int, type[MessagesError]] = {}


class MessagesError(Exception):
    """Base of all errors of this package; used directly for unknown error numbers."""

    number: int | None = None
    #: What to do; the names that ``_names`` finds in the text replace {ident}, {type} and {dest}.
    hint: ClassVar[str] = ""
    _names: ClassVar[str] = ""

    def __init__(self, text: str, *, number: int | None = None) -> None:
        super().__init__(text)
        self.text = text
        if number is not None:
            self.number = number
        # Shown below the error in a traceback, and not a part of its text.
        self.add_note(f"See {self.url}")

    @property
    def url(self) -> str:
        """The address of the documentation of this error."""
        anchor = f"#error-{self.number}" if self.number is not None else ""
        return f"{DOCS_URL}reference/errors/{anchor}"

    def __init_subclass__(cls, *, number: int | None = None) -> None:
        super().__init_subclass__()
        if number is not None:
            cls.number = number
            registry[number] = cls

    def __str__(self) -> str:
        numbered = f"{self.number}: {self.text}" if self.number is not None else self.text
        if not self._names:
            return f"{numbered} ({self.hint})" if self.hint else numbered
        found = re.fullmatch(self._names, self.text, re.DOTALL)
        names = {
            "ident": "NODE",
            "type": "Topic",
            "dest": "TOPIC",
            **(found.groupdict() if found else {}),
        }
        quoted = {key: name.replace("'", "''") for key, name in names.items()}
        return f"{numbered} ({self.hint.format(**quoted)})"


def error_for(number: int, text: str) -> MessagesError:
    """Build the error of a number; an unknown number gives a plain :class:`MessagesError`."""
    error_class = registry.get(number)
    return error_class(text) if error_class else MessagesError(text, number=number)


def _allowed_by(ident: str, type_: str, dest: str, mode: str) -> str:
    columns = "(role, ident, type, dest, mode, timeout)"
    values = f"('ROLE', '{ident}', '{type_}', '{dest}', '{mode}', 60)"
    return f"an administrator allows it: INSERT INTO messages.auth {columns} VALUES {values}"  # noqa: S608


class InvalidArgument(MessagesError):
    """An argument is not valid."""


class DestinationMissing(InvalidArgument, number=1):
    """The topic or node name is empty."""


class IdentMissing(InvalidArgument, number=4):
    """A node cannot register without a name."""


class TokenEmpty(InvalidArgument, number=14):
    """An RPC and its answer need a token."""


class IdentEmpty(InvalidArgument, number=15):
    """The name of the other node is empty."""


class TokenMalformed(InvalidArgument, number=18):
    """The token does not have the form of a received token."""

    hint = "answer with the token exactly as it was received"


class BodyTooLarge(InvalidArgument, number=51):
    """The body exceeds the limit of the database (MAX_BODY_BYTES)."""


class MalformedMessage(InvalidArgument, number=52):
    """The payload passed to get_data was not delivered by PostgreSQL."""


class NameTooLong(InvalidArgument, number=54):
    """A name exceeds 100 characters, or a token 1,000 bytes."""


class UnknownEncoding(InvalidArgument, number=55):
    """The encoding of a body is unknown; b64 and json are supported."""


class NotPositive(InvalidArgument, number=60):
    """A time in seconds, or a number of rows or elements, is not greater than zero."""


class MalformedArgument(InvalidArgument, number=63):
    """A lease, headers or a similar argument does not have the required form."""


class NotAuthorized(MessagesError):
    """No rule of messages.auth allows this role and node to do it."""


class DestinationNotAuthorized(NotAuthorized, number=2):
    """No rule lets this node use this destination with this type."""

    hint = _allowed_by("NODE", "{type}", "{dest}", "W")
    _names = "cannot use (?P<type>.*) to (?P<dest>.*)"


class ModeNotAuthorized(NotAuthorized, number=3):
    """A rule for this destination exists, but not for this mode (W, R, O or A)."""

    hint = "an administrator can add this mode to the rule in messages.auth"


class IdentNotAuthorized(NotAuthorized, number=5):
    """No rule lets this PostgreSQL role use this ident."""

    hint = "no rule names this node for this role; " + _allowed_by(
        "{ident}", "Topic", "TOPIC", "RW"
    )
    _names = "there are no permissions for ident (?P<ident>.*)"


class NotListening(NotAuthorized, number=11):
    """The large body belongs to a topic that this node does not listen to."""


class ReturnNotAuthorized(NotAuthorized, number=20):
    """The token does not permit this node to answer that asker."""


class IdentInUse(MessagesError):
    """A live session has registered this ident."""


class AlreadyRegistered(IdentInUse, number=6):
    """This session has already registered the ident: a warning in the server's log."""


class IdentTakenByOtherRole(IdentInUse, number=7):
    """A session of another role has registered this ident."""


class IdentTaken(IdentInUse, number=8):
    """Another session of the same role has registered this ident."""

    hint = "two programs use the same ident, or an earlier connection is still open"


class NotExistent(MessagesError):
    """Nothing has this name."""


class TopicNotExistent(NotExistent, number=9):
    """No rule and no topic row names this topic."""

    hint = "no rule names this topic; " + _allowed_by("NODE", "Topic", "{dest}", "RW")
    _names = "Topic (?P<dest>.*) is not existent"


class MessageNotExistent(NotExistent, number=13):
    """The large body is unknown, removed, or not for this node (all answer the same)."""


class IdentNotExistent(NotExistent, number=16):
    """No rule names the recipient."""

    hint = "no rule names this node; " + _allowed_by("{ident}", "Topic", "TOPIC", "RW")
    _names = "Client (?P<ident>.*) don't exist"


class AskerNotExistent(NotExistent, number=19):
    """No rule names the node that asked."""


class NotSubscribed(NotExistent, number=61):
    """The node has no subscription to the topic."""

    hint = "the first call of subscribe creates one"


class QueueNotExistent(NotExistent, number=62):
    """There is no such queue."""

    hint = "the first push creates it, and so does the first wait for an element"


class QueueNotEmpty(MessagesError, number=66):
    """A queue with elements cannot be removed."""

    hint = "drain it, and wait until reserved and scheduled elements have gone"


class MessageExpired(MessagesError, number=12):
    """The large body has expired."""

    hint = "the rule's timeout is how long a large body is stored, in seconds"


class Unreachable(MessagesError):
    """The receiver is not connected now."""


class NoListeners(Unreachable, number=10):
    """The topic has no listener."""

    hint = (
        "start a node that listens, or use a stream or a queue, which store messages; "
        + _allowed_by("NODE", "Topic", "{dest}", "R")
    )
    _names = "cannot listeners for Topic (?P<dest>.*)"


class NotConnected(Unreachable, number=17):
    """The other node has no live session."""


class OutOfOrder(MessagesError):
    """Another call must come first."""


class NotNotifying(OutOfOrder, number=21):
    """A node must register as a topic's sender before it sends."""

    hint = "call topic_notify first"


class NotInitialized(OutOfOrder, number=50):
    """The session has no node."""

    hint = "use the node as a context manager, or call init first"


class NotOfThisSession(OutOfOrder, number=53):
    """This session has not registered the ident given to ``use``."""


class CallFailed(MessagesError, number=56):
    """The called node answered that the request failed; the text is its reason."""


def failure_text(ident: str, error: BaseException) -> str:
    """Return what the caller reads if a handler failed, without the error's own text."""
    return f"the handler of {ident} failed ({type(error).__name__})"


class RowsNotStaged(OutOfOrder, number=64):
    """Staged rows are missing: they were not all copied, or were removed after a day."""


class BatchOutOfOrder(OutOfOrder, number=65):
    """A later batch of the query is already committed: this one may have different rows."""

    hint = "start with a new checkpoint at the position of the old one"


class MalformedFrame(MessagesError, number=57):
    """A WebSocket frame does not follow the relay's protocol."""


class LimitReached(MessagesError, number=58):
    """A limit of the relay's settings or of the queue functions is exceeded."""


class RelayAway(MessagesError, number=59):
    """The relay has lost its connection to PostgreSQL, and is reconnecting."""

    hint = "wait for the event reconnected, and try again"


class CallTimeout(MessagesError, TimeoutError):
    """No answer to a call arrived in time; a later one is counted and dropped."""


class CalleeGone(CallTimeout):
    """The called node disconnected or crashed before it answered."""


class ServerUnreachable(MessagesError, ConnectionError):
    """No connection to PostgreSQL can be made."""


class ConnectionLost(ServerUnreachable):
    """The connection broke; the running call may or may not have been executed."""


class NotificationQueueFull(MessagesError):
    """The server's notification queue is full. The call had no effect; a retry may succeed."""

    hint = "a session listens but does not read: find it with psqlmessages doctor"


class ConnectionShared(ServerUnreachable):
    """A pooler shares the connection, so notifications would not arrive."""

    hint = "connect to PostgreSQL itself, or set pool_mode = session in pgbouncer.ini"


class NotInstalled(MessagesError):
    """The database has no schema "messages", or an older one."""

    hint = "run the migrations of psqlmessages in this database"


class LeaseExpired(MessagesError):
    """The lease of a queue element is no longer valid; another consumer may have the element."""

    hint = "roll back the writes for this element; use a longer duration, or renew()"


class NodeClosed(MessagesError):
    """The node was closed or stopped, or was never opened."""
