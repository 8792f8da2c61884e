"""Exceptions: one class per error number of the SQL core.

The number is the protocol, the text is for people: classes are found by number, never by text.

    MessagesError
    ├── InvalidArgument                  an argument is not valid
    │   ├── DestinationMissing       1
    │   ├── IdentMissing             4   (init)
    │   ├── TokenEmpty              14
    │   ├── IdentEmpty              15
    │   ├── TokenMalformed          18
    │   ├── BodyTooLarge            51
    │   ├── MalformedMessage        52
    │   ├── NameTooLong             54
    │   ├── UnknownEncoding         55
    │   ├── NotPositive             60   (subscribe, queues)
    │   └── MalformedArgument       63   (queues)
    ├── NotAuthorized                    no rule allows it
    │   ├── DestinationNotAuthorized 2
    │   ├── ModeNotAuthorized        3
    │   ├── IdentNotAuthorized       5
    │   ├── NotListening            11
    │   └── ReturnNotAuthorized     20
    ├── IdentInUse                       another session has the name
    │   ├── AlreadyRegistered        6   (a warning: never raised by a node)
    │   ├── IdentTakenByOtherRole    7
    │   └── IdentTaken               8
    ├── NotExistent                      nothing has this name
    │   ├── TopicNotExistent         9
    │   ├── MessageNotExistent      13
    │   ├── IdentNotExistent        16
    │   ├── AskerNotExistent        19
    │   ├── NotSubscribed           61
    │   └── QueueNotExistent        62
    ├── MessageExpired              12
    ├── Unreachable                      the receiver is not connected now
    │   ├── NoListeners             10
    │   └── NotConnected            17
    ├── OutOfOrder                       another call must come first
    │   ├── NotNotifying            21
    │   ├── NotInitialized          50
    │   ├── NotOfThisSession        53
    │   ├── RowsNotStaged           64
    │   └── BatchOutOfOrder         65
    ├── MalformedFrame              57   (57 and 59: of the WebSocket relay)
    ├── LimitReached                58   (of the relay, and of queues)
    ├── RelayAway                   59
    ├── CallFailed                  56   the called node answered with an error
    ├── CallTimeout                      (also a TimeoutError) no answer in time
    │   └── CalleeGone                   the called node disconnected before its answer
    ├── ServerUnreachable                (also a ConnectionError) cannot connect
    │   ├── ConnectionLost               the running call may or may not have been executed
    │   └── ConnectionShared             a pooler shares it, so it cannot LISTEN
    ├── NotificationQueueFull            of the server: the call had no effect
    ├── NotInstalled                     the database has no schema "messages"
    └── NodeClosed                       the node was closed or stopped
"""

from __future__ import annotations

from typing import ClassVar

registry: dict[int, type[MessagesError]] = {}


class MessagesError(Exception):
    """Base of all errors of this package; used directly for unknown error numbers."""

    number: int | None = None
    hint: ClassVar[str] = ""

    def __init__(self, text: str, *, number: int | None = None) -> None:
        super().__init__(text)
        self.text = text
        if number is not None:
            self.number = number

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "number" in cls.__dict__ and cls.number is not None:
            registry[cls.number] = cls

    def __str__(self) -> str:
        numbered = f"{self.number}: {self.text}" if self.number is not None else self.text
        return f"{numbered} ({self.hint})" if self.hint else numbered


def error_for(number: int, text: str) -> MessagesError:
    """Build the error of a number; an unknown number gives a plain :class:`MessagesError`."""
    error_class = registry.get(number)
    return error_class(text) if error_class else MessagesError(text, number=number)


class InvalidArgument(MessagesError):
    """An argument is not valid."""


class DestinationMissing(InvalidArgument):
    """The topic or node name is empty."""

    number = 1


class IdentMissing(InvalidArgument):
    """A node cannot register without a name."""

    number = 4


class TokenEmpty(InvalidArgument):
    """An RPC and its answer need a token."""

    number = 14


class IdentEmpty(InvalidArgument):
    """The name of the other node is empty."""

    number = 15


class TokenMalformed(InvalidArgument):
    """The token does not have the form of a received token."""

    number = 18
    hint = "answer with the token exactly as it was received"


class BodyTooLarge(InvalidArgument):
    """The body exceeds the limit of the database (MAX_BODY_BYTES)."""

    number = 51


class MalformedMessage(InvalidArgument):
    """The payload passed to get_data was not delivered by PostgreSQL."""

    number = 52


class NameTooLong(InvalidArgument):
    """A name exceeds 100 characters, or a token 1,000 bytes."""

    number = 54


class UnknownEncoding(InvalidArgument):
    """The encoding of a body is unknown; b64 and json are supported."""

    number = 55


class NotPositive(InvalidArgument):
    """A time in seconds, or a number of rows or elements, is not greater than zero."""

    number = 60


class MalformedArgument(InvalidArgument):
    """A lease, headers or a similar argument does not have the required form."""

    number = 63


class NotAuthorized(MessagesError):
    """No rule of messages.auth allows this role and node to do it."""


class DestinationNotAuthorized(NotAuthorized):
    """No rule lets this node use this destination with this type."""

    number = 2
    hint = "an administrator can add a rule to messages.auth"


class ModeNotAuthorized(NotAuthorized):
    """A rule for this destination exists, but not for this mode (W, R or O)."""

    number = 3
    hint = "an administrator can widen the rule's mode in messages.auth"


class IdentNotAuthorized(NotAuthorized):
    """No rule lets this PostgreSQL role use this ident."""

    number = 5
    hint = "an administrator can add a rule for this role and ident to messages.auth"


class NotListening(NotAuthorized):
    """The large body belongs to a topic that this node does not listen to."""

    number = 11


class ReturnNotAuthorized(NotAuthorized):
    """The token does not permit this node to answer that asker."""

    number = 20


class IdentInUse(MessagesError):
    """A live session has registered this ident."""


class AlreadyRegistered(IdentInUse):
    """This session has already registered the ident: a warning in the server's log."""

    number = 6


class IdentTakenByOtherRole(IdentInUse):
    """A session of another role has registered this ident."""

    number = 7


class IdentTaken(IdentInUse):
    """Another session of the same role has registered this ident."""

    number = 8
    hint = "two programs use the same ident, or an earlier connection is still open"


class NotExistent(MessagesError):
    """Nothing has this name."""


class TopicNotExistent(NotExistent):
    """No rule and no topic row names this topic."""

    number = 9


class MessageNotExistent(NotExistent):
    """The large body is unknown, removed, or not for this node (all answer the same)."""

    number = 13


class IdentNotExistent(NotExistent):
    """No rule names the recipient."""

    number = 16


class AskerNotExistent(NotExistent):
    """No rule names the node that asked."""

    number = 19


class NotSubscribed(NotExistent):
    """The node has no subscription to the topic."""

    number = 61
    hint = "the first call of subscribe creates one"


class QueueNotExistent(NotExistent):
    """The queue has never been used."""

    number = 62
    hint = "push, pop and reserve create it"


class MessageExpired(MessagesError):
    """The large body has expired."""

    number = 12
    hint = "the rule's timeout is how long a large body is stored, in seconds"


class Unreachable(MessagesError):
    """The receiver is not connected now."""


class NoListeners(Unreachable):
    """The topic has no listener."""

    number = 10


class NotConnected(Unreachable):
    """The other node has no live session."""

    number = 17


class OutOfOrder(MessagesError):
    """Another call must come first."""


class NotNotifying(OutOfOrder):
    """A node must register as a topic's sender before it sends."""

    number = 21
    hint = "call topic_notify first"


class NotInitialized(OutOfOrder):
    """The session has no node."""

    number = 50
    hint = "use the node as a context manager, or call init first"


class NotOfThisSession(OutOfOrder):
    """This session has not registered the ident given to ``use``."""

    number = 53


class CallFailed(MessagesError):
    """The called node answered that the request failed; the text is its reason."""

    number = 56


class RowsNotStaged(OutOfOrder):
    """Staged rows are missing: they were not all copied, or were removed after a day."""

    number = 64


class BatchOutOfOrder(OutOfOrder):
    """A later batch of the query is already committed: this one may have different rows."""

    number = 65
    hint = "start with a new checkpoint at the position of the old one"


class MalformedFrame(MessagesError):
    """A WebSocket frame does not follow the relay's protocol."""

    number = 57


class LimitReached(MessagesError):
    """A limit of the relay's settings or of the queue functions is exceeded."""

    number = 58


class RelayAway(MessagesError):
    """The relay has lost its connection to PostgreSQL, and is reconnecting."""

    number = 59
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

    hint = "a session listens without reading: psqlmessages doctor finds it"


class ConnectionShared(ServerUnreachable):
    """A pooler shares the connection, so notifications would not arrive."""

    hint = "connect to PostgreSQL itself, or set pool_mode = session in pgbouncer.ini"


class NotInstalled(MessagesError):
    """The database has no schema "messages", or an older one."""

    hint = "run the migrations of psqlmessages in this database"


class NodeClosed(MessagesError):
    """The node was closed or stopped, or was never opened."""
