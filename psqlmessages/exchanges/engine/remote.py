"""Pushes to other databases, with a circuit breaker for each database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import psycopg

from psqlmessages.client.calls import raise_for_error
from psqlmessages.exceptions import MessagesError
from psqlmessages.exchanges.engine import sql
from psqlmessages.exchanges.engine.batch import RemoteCopy
from psqlmessages.exchanges.engine.sql import Query, ReconnectingConnection
from psqlmessages.retry import Backoff, error_line

ANSWER_SECONDS: Final = 5
_TIMEOUT: Final = f"SET LOCAL statement_timeout = '{ANSWER_SECONDS}s'"
_LEAST, _MOST = timedelta(seconds=0.5), timedelta(seconds=15)
# By queue and key: None, or why a copy could not be pushed. A key is unique within a queue.
Errors = dict[tuple[str, str], str | None]

# Per transaction. A single copy may be larger.
_CHARACTERS: Final = 8 * 1024 * 1024
# Errors of one copy (body, headers, key), not of the queue or the exchange.
_OF_ONE_COPY: Final = ("51", "54", "55", "63")
# SQLSTATE classes of errors in the data sent: data, constraints, program limits.
REFUSALS: Final = ("22", "23", "54")


class CircuitBreaker:
    """Blocks attempts to reach a database for a growing pause after each failure."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.backoff = Backoff(_LEAST, _MOST)
        self._why = ""
        self._failed_at = 0.0

    def refusal(self) -> str | None:
        """Return why no attempt is allowed now, or None. After a pause, one caller may try."""
        now = monotonic()
        if not self.backoff.attempts:
            return None
        if now < self.backoff.next_at:
            return f"{self.namespace} is unreachable: {self._why}"
        self.backoff.next_at = now + ANSWER_SECONDS
        return None

    def failed(self, error: Exception, began: float) -> None:
        """Record a failed attempt. Attempts that ran at the time of a failure count with it."""
        self._why = error_line(error)
        if began > self._failed_at:
            self._failed_at = monotonic()
            self.backoff.failed(self._failed_at)


class RemotePusher:
    """Pushes the copies of one consumer to another database."""

    def __init__(self, ident: str, address: str, circuit: CircuitBreaker) -> None:
        self._ident = ident
        self._connection = ReconnectingConnection(address, ANSWER_SECONDS)
        self._circuit = circuit

    async def push(self, copies: Sequence[RemoteCopy]) -> list[str | None]:
        """Push copies; return None or an error for each of them."""
        if (refusal := self._circuit.refusal()) is not None:
            return [refusal] * len(copies)
        errors: Errors = {}
        began = monotonic()
        try:
            for part in _parts(copies):
                errors.update(await self._push_part(part))
        except psycopg.Error as error:
            self._circuit.failed(error, began)
            await self._connection.close()
            why = f"{self._circuit.namespace} is unreachable: {error_line(error)}"
            return [errors.get((copy.queue, copy.key), why) for copy in copies]
        self._circuit.backoff.succeeded()
        return [errors[copy.queue, copy.key] for copy in copies]

    async def _push_part(self, part: list[list[RemoteCopy]]) -> Errors:
        """Push groups in one transaction; if a copy causes an error, push the copies one by one."""
        if len(part) == 1 and len(part[0]) == 1:
            (copy,) = part[0]
            return {(copy.queue, copy.key): await self._push_error(part[0])}
        try:
            answers = await self._connection.transact(self._statements(part))
        except psycopg.Error as error:
            if not await self._is_usable(error):
                raise
            copies = (copy for group in part for copy in group)
            return {(copy.queue, copy.key): await self._push_error([copy]) for copy in copies}
        errors: Errors = {}
        for group, ((answer,), *_) in zip(part, answers[1:], strict=True):
            for copy in group:
                if answer["Err"] in _OF_ONE_COPY and len(group) > 1:
                    errors[copy.queue, copy.key] = await self._push_error([copy])
                else:
                    errors[copy.queue, copy.key] = _error_text(answer)
        return errors

    async def _push_error(self, group: list[RemoteCopy]) -> str | None:
        try:
            answers = await self._connection.transact(self._statements([group]))
        except psycopg.Error as error:
            if not await self._is_usable(error):
                raise
            return error_line(error)
        return _error_text(answers[1][0][0])

    def _statements(self, part: list[list[RemoteCopy]]) -> list[Query]:
        return [Query(_TIMEOUT), *(sql.push(self._ident, group) for group in part)]

    async def _is_usable(self, error: psycopg.Error) -> bool:
        """Whether the connection still works, and the error concerns this transaction only."""
        await self._connection.reset()
        state = error.sqlstate or ""
        is_refusal = state[:2] in REFUSALS or state.startswith("PM")
        return self._connection.is_open and (is_refusal or isinstance(error, psycopg.DataError))

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()


def _error_text(answer: Any) -> str | None:
    try:
        raise_for_error(answer)
    except MessagesError as error:
        return str(error)
    return None


def _parts(copies: Sequence[RemoteCopy]) -> Iterator[list[list[RemoteCopy]]]:
    """Yield the copies of one transaction at a time, in groups that share a statement."""
    groups: dict[tuple[object, ...], list[RemoteCopy]] = {}
    size = 0
    for copy in copies:
        weight = len(copy.body) + len(copy.headers)
        if size and size + weight > _CHARACTERS:
            yield list(groups.values())
            groups, size = {}, 0
        size += weight
        like = (copy.queue, copy.enc, copy.delay, copy.mature, copy.tries)
        groups.setdefault(like, []).append(copy)
    if groups:
        yield list(groups.values())
