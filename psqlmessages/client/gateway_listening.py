"""GatewayListening: what a gateway knows of its nodes, and how they return. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors

from psqlmessages.client import calls, gateway_calls
from psqlmessages.client.calls import Call, Opened
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.client.listening import Arrival, Listening
from psqlmessages.client.messages import CONNECTION_LOST, SYS
from psqlmessages.client.options import Options
from psqlmessages.client.patience import Patience
from psqlmessages.client.registration import Registration
from psqlmessages.exceptions import IdentTaken, MessagesError

T = TypeVar("T")
Script = Generator[Call[Any], Any, T]
Join = tuple[str, str, str]

# So many share a transaction, which holds up changes of rules: a fraction of a second.
_CHUNK: Final = 50
_CLOSING_SECONDS: Final = 5.0
# Where PostgreSQL has restarted, others return at the same time, and the first of them buries all
# the dead: to be held by these for seconds is no reason to let go of a node.
_RETURNING_SECONDS: Final = 5.0
_OVERRUN: Final = 4
_BACKENDS: Final = 10
_IDENT_TAKEN: Final = "8"
_ENDED_BY: Final = {
    "topic_listen": "topic_unlisten",
    "topic_notify": "topic_unnotify",
    "topic_observe": "topic_unobserve",
}


class GatewayListening(Listening):
    """The state of a gateway between its connection and its caller.

    What was registered and cannot be again is told by arrivals that follow the local event
    ``reconnected``: of the form of an event, with the node it was done to in ``Nodes``, and why in
    ``Err``: 56 where it may be possible a moment later.
    """

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        self.registration = Registration()
        self.patience = Patience()
        self._returning = Patience()
        self.on_ran: Callable[[str, str, str], None] | None = None
        self._overrun_at = _OVERRUN * options.inbox_limit
        self._ended: list[Arrival] = []
        # Those of our connections that the server may still hold to be alive.
        self._backends: list[Opened] = []

    @property
    def pid(self) -> int:
        """The process of the server behind the newest connection; 0 before the first."""
        return self._backends[-1].pid if self._backends else 0

    @property
    def is_overrun(self) -> bool:
        """Whether so much waits to be taken that the connection has to be given up."""
        return len(self.inbox) > self._overrun_at

    def ran(self, call: Call[Any], result: Any = None) -> None:
        """Take note of a call that succeeded."""
        super().ran(call, result.get("Channel", "") if isinstance(result, dict) else "")
        if call.registers is not None and self.on_ran is not None:
            self.on_ran(call.ident, *call.registers)

    def lost(self, reason: object, now: float) -> None:
        """Take note of a lost connection, and tell."""
        was_connected = self.pulse.is_connected
        super().lost(reason, now)
        if was_connected:
            self.inbox.append(Arrival({"Type": SYS, "Evt": CONNECTION_LOST}, None, ""))

    def opened(self, now: float) -> None:
        """Take note of a connection on which all is registered; tell, also what could not be."""
        super().opened(now)
        self.inbox.extend(self._ended)
        self._ended.clear()

    def closing(self) -> Iterator[Call[Any]]:
        """Yield the calls that end what is registered."""
        for chunk in _chunks(self.registration.idents):
            yield gateway_calls.register_many("deinit", chunk, _CLOSING_SECONDS)

    def _heard_event(self, header: dict[str, Any]) -> None:
        """Leave it to the caller: an event may tell of an earlier registration of the name."""

    # Returning

    def opening(self) -> Script[None]:
        """Yield the calls that bring a new connection to the state of the last; take answers."""
        self._backends.append((yield calls.opened(synchronous_commit=self._synchronous_commit)))
        del self._backends[:-_BACKENDS]
        self._returning = Patience(most=_RETURNING_SECONDS, burst=_RETURNING_SECONDS)
        if self.registration.idents:
            yield from self._bury()
        for chunk in _chunks(self.registration.idents):
            answers = yield from self._each(_init_many, chunk, str)
            for ident, answer in zip(chunk, answers, strict=True):
                yield from self._returned(ident, answer)
        yield from self._join_again()
        del self._backends[:-1]

    def _bury(self) -> Script[None]:
        """Have the earlier session ended while none of its nodes is back to hear of it."""
        try:
            yield calls.evaluate()
        except (MessagesError, psycopg.Error) as error:
            if isinstance(error, MessagesError) and error.number is None:
                raise
            self.log.warning("%s: could not evaluate: %s", self.ident, error)

    def _returned(self, ident: str, answer: Answer) -> Script[None]:
        if answer["Err"] == "0":
            self.channel = answer["Channel"]
            return
        if answer["Err"] == _IDENT_TAKEN and (yield from self._end_earlier_backends()):
            raise IdentTaken(answer["Errstr"])
        if ident in self.registration:
            self._end(ident, "init", ident, answer)

    def _end_earlier_backends(self) -> Script[bool]:
        """End those of our earlier connections that are still there; whether any was."""
        were_there = False
        for backend in self._backends[:-1]:
            were_there = (yield calls.end_backend(backend)) or were_there
        return were_there

    def _join_again(self) -> Script[None]:
        joins = self.registration.joins()
        # Each topic_observe is alone with the rules until its commit, so none shares one.
        observed = [join for join in joins if join[1] == "topic_observe"]
        others = [join for join in joins if join[1] != "topic_observe"]
        for chunk in (*_chunks(others), *([join] for join in observed)):
            answers = yield from self._each(gateway_calls.join_many, chunk, _topic_of)
            for (ident, function, topic), answer in zip(chunk, answers, strict=True):
                if answer["Err"] != "0" and self.registration.has(ident, function, topic):
                    self._end(ident, function, topic, answer)

    def _each(
        self,
        make: Callable[[Sequence[T], float], Call[list[Answer]]],
        values: Sequence[T],
        subject_of: Callable[[T], str],
    ) -> Script[list[Answer]]:
        """Run one call for many; where the server aborts that transaction, one for each."""
        subjects = [subject_of(value) for value in values]
        seconds = self._returning.seconds(subjects)
        is_alone = len(values) == 1
        try:
            answers: list[Answer] = yield make(values, seconds)
        except (MessagesError, psycopg.Error) as error:
            if isinstance(error, MessagesError) and error.number is None:
                raise
            if isinstance(error, errors.LockNotAvailable):
                self._returning.waited(seconds, subjects[0] if is_alone else None)
            if is_alone:
                self.log.warning("%s: a registration failed: %s", self.ident, error)
                return [{"Err": "56", "Errstr": str(error)}]
            answers = []
            for value in values:
                answers += yield from self._each(make, [value], subject_of)
            return answers
        self._returning.found_free(*subjects)
        return answers

    def _end(self, ident: str, function: str, subject: str, answer: Answer) -> None:
        self.registration.drop(ident, function, subject)
        self.log.warning(
            "%s: %s(%r) of %s no longer works: %s",
            *(self.ident, function, subject, ident, answer.get("Errstr")),
        )
        header = {"Type": SYS, "Evt": _ENDED_BY.get(function, "disconnect"), "Ident": ident}
        if function != "init":
            header["Topic"] = subject
        header["Err"] = answer["Err"]
        self._ended.append(Arrival({**header, "Nodes": [ident]}, None, ""))


def _init_many(idents: Sequence[str], seconds: float) -> Call[list[Answer]]:
    return gateway_calls.register_many("init", idents, seconds)


def _topic_of(join: Join) -> str:
    return join[2]


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
