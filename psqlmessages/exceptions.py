"""Exceptions: one class for each error number of the SQL functions, and classes without a number.

Programs should examine the class or the number. The text is for people: it may change.
"""

from __future__ import annotations

import re
from typing import ClassVar, NamedTuple

DOCS_URL = "https://psqlmessages.readthedocs.io/en/stable/"

classes_by_number: dict[int, type[MessagesError]] = {}


class Caller(NamedTuple):
    """Role and node of a call, type and name of its destination, and the mode of the needed rule.

    The default values, such as ROLE, mean that a value is unknown.
    """

    role: str = "ROLE"
    ident: str = "NODE"
    type: str = "Topic"
    dest: str = "TOPIC"
    mode: str = ""


# Role, ident, type, dest and mode of a rule.
Rule = tuple[str, str, str, str, str]


class MessagesError(Exception):
    """Base class of this package's errors, and the class of errors with an unknown number."""

    number: int | None = None
    #: What to do; ``{0}`` is the caller. The statement that adds missing rules follows.
    hint: ClassVar[str] = ""
    #: Set by the functions that know the caller.
    caller: Caller = Caller()
    # Finds ``values`` in the text. The protocol fixes the texts of the errors 1 to 21.
    _pattern: ClassVar[str] = ""

    def __init__(self, text: str, *, number: int | None = None) -> None:
        super().__init__(text)
        # A program may raise CallFailed with a lazy translation.
        self.text = str(text)
        if number is not None:
            self.number = number
        # A traceback shows this note below the error.
        self.add_note(f"See {self.url}")

    @property
    def url(self) -> str:
        """The address of the documentation of this error."""
        return error_url(self.number)

    def __init_subclass__(cls, *, number: int | None = None) -> None:
        super().__init_subclass__()
        if number is not None:
            cls.number = number
            classes_by_number[number] = cls

    @property
    def values(self) -> dict[str, str]:
        """Values in the text: some of ``ident``, ``type``, ``dest`` and ``mode``; often none."""
        match = re.fullmatch(self._pattern, self.text, re.DOTALL) if self._pattern else None
        return match.groupdict() if match else {}

    def missing_rules(self) -> list[Rule]:
        """Return the rules that would allow the call; an empty list for most errors."""
        return []

    def __str__(self) -> str:
        numbered = f"{self.number}: {self.text}" if self.number is not None else self.text
        rules = self.missing_rules()
        hint = self.hint.format(self.caller)
        if rules:
            hint += f": {insert_rules(*rules)}"
        return f"{numbered} ({hint})" if hint else numbered

    def _missing_rule(self, **values: str) -> Rule:
        """Return a rule for the caller, with these values in place of those of the call."""
        role, ident, type_, dest, mode = self.caller._replace(**values)
        mode = needed_mode(mode, self.caller.dest, type_, dest) or "RW"
        return role, ident, type_, dest, mode


def error_url(number: int | None) -> str:
    """Return the address of the documentation of an error number, or of all errors."""
    anchor = f"#error-{number}" if number is not None else ""
    return f"{DOCS_URL}reference/errors/{anchor}"


def error_for(number: int, text: str) -> MessagesError:
    """Create an error of the class with this number; of MessagesError if there is none."""
    error_class = classes_by_number.get(number)
    return error_class(text) if error_class else MessagesError(text, number=number)


def needed_mode(mode: str, called_dest: str, type_: str, dest: str) -> str:
    """Return the mode that a refused call needs for the destination in its error.

    ``mode`` is the mode that it needs for ``called_dest``, its own destination; "" if unknown.
    """
    # A call that needs mode A for its own queue would move elements to another one, which needs W.
    return "W" if type_ == "Rpc" or (mode == "A" and dest != called_dest) else mode


def insert_rules(*rules: Rule) -> str:
    """Return the SQL statement that adds rules."""
    rows = ", ".join(f"({', '.join(map(_literal, rule))}, 60)" for rule in rules)
    columns = "(role, ident, type, dest, mode, timeout)"
    # If several rules are needed, some of them may exist.
    conflict = " ON CONFLICT DO NOTHING" if len(rules) > 1 else ""
    return f"INSERT INTO messages.auth {columns} VALUES {rows}{conflict}"  # noqa: S608


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


class InvalidArgument(MessagesError):
    """An argument is not valid."""


class DestinationMissing(InvalidArgument, number=1):
    """The name of the topic, queue or other destination is empty."""


class IdentMissing(InvalidArgument, number=4):
    """The name that a node registers is empty."""


class TokenEmpty(InvalidArgument, number=14):
    """The token of an RPC, or of an answer, is empty."""


class IdentEmpty(InvalidArgument, number=15):
    """The name of the acting node, or of the other node of an RPC, is empty."""


class TokenMalformed(InvalidArgument, number=18):
    """The token of an answer does not have the form of a received token."""

    hint = "answer with the token exactly as it was received"


class BodyTooLarge(InvalidArgument, number=51):
    """The body exceeds the limit of the database (MAX_BODY_BYTES)."""


class MalformedMessage(InvalidArgument, number=52):
    """The argument of get_data or audience is not a payload that PostgreSQL delivered."""


class NameTooLong(InvalidArgument, number=54):
    """A name exceeds 100 characters, a token 1,000 bytes, or an element's key 200 characters."""


class UnknownEncoding(InvalidArgument, number=55):
    """The encoding of a body is unknown; b64 and json are supported."""


class NotPositive(InvalidArgument, number=60):
    """A duration, or a number of rows or elements, is null, zero or negative."""


class MalformedArgument(InvalidArgument, number=63):
    """An argument, such as a lease, headers or a number of tries, has an invalid value."""


class NotAuthorized(MessagesError):
    """No rule in messages.auth allows the call to this role and node."""


class DestinationNotAuthorized(NotAuthorized, number=2):
    """No rule lets this node use this topic, queue or node."""

    hint = "allow it with"
    _pattern = "cannot use (?P<type>.*) to (?P<dest>.*)"

    def missing_rules(self) -> list[Rule]:
        """Return the rule for the caller."""
        return [self._missing_rule(**self.values)]


class ModeNotAuthorized(NotAuthorized, number=3):
    """A rule for this topic or queue exists, but not for this mode (W, R, O or A)."""

    hint = "add the mode to the rule of role {0.role} and node {0.ident} in messages.auth"
    _pattern = "cannot auth (?P<mode>.*) with (?P<type>.*?) (?P<dest>.*)"


class IdentNotAuthorized(NotAuthorized, number=5):
    """No rule lets this PostgreSQL role register this node name."""

    hint = "no rule names this node for this role; allow it with"
    _pattern = "there are no permissions for ident (?P<ident>.*)"

    def missing_rules(self) -> list[Rule]:
        """Return the rule for the caller's node name or pattern, or for the name in the text."""
        is_named = self.caller.ident != Caller().ident
        return [self._missing_rule(**({} if is_named else self.values))]


class NotListening(NotAuthorized, number=11):
    """The large body belongs to a topic that this node does not listen to."""


class ReturnNotAuthorized(NotAuthorized, number=20):
    """The token does not allow this node to answer that caller."""


class IdentInUse(MessagesError):
    """A connected session has registered this node name."""


class AlreadyRegistered(IdentInUse, number=6):
    """This session has already registered the node. A warning of the server, never raised."""


class IdentTakenByOtherRole(IdentInUse, number=7):
    """A session of another role has registered this node name."""


class IdentTaken(IdentInUse, number=8):
    """Another session of the same role has registered this node name."""

    hint = "two programs use the same node name, or an earlier connection is still open"


class NotExistent(MessagesError):
    """There is no topic, queue, node, subscription or large body of this name."""


class TopicNotExistent(NotExistent, number=9):
    """No rule names exactly this topic, and no node has created it under a pattern rule."""

    hint = "no rule names this topic; allow it with"
    _pattern = "Topic (?P<dest>.*) is not existent"

    def missing_rules(self) -> list[Rule]:
        """Return the rule for the caller."""
        return [self._missing_rule(type="Topic", **self.values)]


class MessageNotExistent(NotExistent, number=13):
    """The large body is unknown, removed, or not for this node. These cases give the same error."""


class IdentNotExistent(NotExistent, number=16):
    """No rule names the receiving node, or the acting node itself."""

    hint = "no rule names this node; allow it with"
    _pattern = "Client (?P<ident>.*) don't exist"

    def missing_rules(self) -> list[Rule]:
        """Return a rule for the acting node, or rules for the receiving node and the caller."""
        receiver = Caller(self.caller.role, **self.values)
        if receiver.ident == self.caller.ident:
            return [self._missing_rule()]
        return [(*receiver[:4], "RW"), self._missing_rule(type="Rpc", dest=receiver.ident)]


class AskerNotExistent(NotExistent, number=19):
    """No rule names the caller, to whom the answer would be sent."""


class NotSubscribed(NotExistent, number=61):
    """The node has no subscription to the topic."""

    hint = "the first call of subscribe creates one"


class QueueNotExistent(NotExistent, number=62):
    """The queue does not exist, or its name is a pattern."""

    hint = "the first push creates it, and so does the first wait for an element"


class QueueNotEmpty(MessagesError, number=66):
    """The queue cannot be removed, because it has elements."""

    hint = "drain it, and wait until consumers have finished reserved and scheduled elements"


class MessageExpired(MessagesError, number=12):
    """The large body has expired."""

    hint = "the rule's timeout is how long a large body is stored, in seconds"


class Unreachable(MessagesError):
    """No receiver of the message is connected now."""


class NoListeners(Unreachable, number=10):
    """No node listens to the topic."""

    hint = (
        "start a node that listens, or use a stream or a queue, which store messages; if no rule"
        " lets the node listen, allow it with"
    )
    _pattern = "cannot listeners for Topic (?P<dest>.*)"

    def missing_rules(self) -> list[Rule]:
        """Return the rule of the listening node, which may have another role than the caller."""
        return [(self.caller.role, Caller().ident, "Topic", self.values.get("dest", "TOPIC"), "R")]


class NotConnected(Unreachable, number=17):
    """The other node is not connected."""


class OutOfOrder(MessagesError):
    """The call is not valid now: another call must come first, or has come before."""


class NotNotifying(OutOfOrder, number=21):
    """The node has not registered as a sender of the topic."""

    hint = "call topic_notify first"


class NotInitialized(OutOfOrder, number=50):
    """No node is registered on this session."""

    hint = "use the node as a context manager, or call init first"


class NotOfThisSession(OutOfOrder, number=53):
    """This session has not registered the ident given to ``use``."""


class CallFailed(MessagesError, number=56):
    """The called node has no handler, its handler failed, or PostgreSQL aborted a relay's call."""


def failure_text(ident: str, error: BaseException) -> str:
    """Return the text that a caller gets if a handler failed. It names only the error's class."""
    return f"the handler of {ident} failed ({type(error).__name__})"


class RowsNotStaged(OutOfOrder, number=64):
    """Staged rows are missing: some were not copied, or they were removed after a day."""


class BatchOutOfOrder(OutOfOrder, number=65):
    """This batch cannot be repeated, because a later batch of the query is committed."""

    hint = "start with a new checkpoint at the position of the old one"


class MalformedFrame(MessagesError, number=57):
    """From the WebSocket relay: a frame does not follow the relay's protocol."""


class LimitReached(MessagesError, number=58):
    """A limit of queue functions or the relay is exceeded, or the notification queue is full."""


class RelayAway(MessagesError, number=59):
    """From the WebSocket relay: the relay is reconnecting to PostgreSQL."""

    hint = "wait for the event reconnected, and try again"


class CallTimeout(MessagesError, TimeoutError):
    """A call could not be sent or answered in time. A later answer is dropped and counted."""


class CalleeGone(CallTimeout):
    """The called node disconnected or crashed before it answered."""


class ServerUnreachable(MessagesError, ConnectionError):
    """There is no connection to PostgreSQL: it could not be opened, or was lost."""


class ConnectionLost(ServerUnreachable):
    """The connection is lost. The server may or may not have executed the call."""


class NotificationQueueFull(MessagesError):
    """PostgreSQL's notification queue is full. The call had no effect; a retry may succeed."""

    hint = "a session listens but does not read: find it with psqlmessages doctor"


class ConnectionShared(ServerUnreachable):
    """A pooler shares connections among clients, so notifications may not arrive."""

    hint = (
        "connect to PostgreSQL itself (in Django: by an alias 'direct' in DATABASES),"
        " or set pool_mode = session in pgbouncer.ini"
    )


class NotInstalled(MessagesError):
    """The schema "messages", one of its functions, or a table is missing in the database."""

    hint = "run the migrations of psqlmessages in this database"


class LeaseExpired(MessagesError):
    """The lease of a queue element has ended. Another consumer may have taken the element."""

    hint = "roll back your writes for this element; reserve for longer, or call renew()"


class NodeClosed(MessagesError):
    """The node or PubSub bus was closed or stopped, or the node was never opened."""
