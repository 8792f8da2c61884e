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
_MIN_BACKOFF, _MAX_BACKOFF = timedelta(seconds=0.5), timedelta(seconds=15)
# The keys are a queue and an idempotency key, which identify a copy. None: the copy was pushed.
PushErrors = dict[tuple[str, str], str | None]

# Limit for the bodies and headers of a transaction. A single copy may exceed this limit.
_MAX_CHARACTERS: Final = 8 * 1024 * 1024
# Numbers of errors that concern one copy (body, headers, key), not the queue or the exchange.
_COPY_ERRORS: Final = ("51", "54", "55", "63")
# SQLSTATE classes of errors that data causes: invalid data, constraints, program limits.
_DATA_ERRORS: Final = ("22", "23", "54")


def is_data_error(error: psycopg.Error) -> bool:
    """Return whether the data of a statement caused an error."""
    return (error.sqlstate or "")[:2] in _DATA_ERRORS or isinstance(error, psycopg.DataError)


class CircuitBreaker:
    """Blocks attempts to reach a database for a growing pause after each failure."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.backoff = Backoff(_MIN_BACKOFF, _MAX_BACKOFF)
        self._last_error = ""
        self._failed_at = 0.0

    def begin_attempt(self) -> str | None:
        """Return an error if no attempt is allowed now. After each pause, allow one attempt."""
        if self.backoff.failures:
            now = monotonic()
            if now < self.backoff.next_at:
                return f"{self.namespace} is unreachable: {self._last_error}"
            self.backoff.next_at = now + ANSWER_SECONDS
        return None

    def on_failure(self, error: Exception, started_at: float) -> None:
        """Record a failed attempt. Of concurrent failures, only the first one extends the pause."""
        self._last_error = error_line(error)
        if started_at > self._failed_at:
            self._failed_at = monotonic()
            self.backoff.record_failure(self._failed_at)


class RemotePusher:
    """Pushes the copies of one consumer to another database."""

    def __init__(self, ident: str, address: str, circuit: CircuitBreaker) -> None:
        self._ident = ident
        self._connection = ReconnectingConnection(address, ANSWER_SECONDS)
        self._circuit = circuit

    async def push(self, copies: Sequence[RemoteCopy]) -> list[str | None]:
        """Push copies; return None or an error for each copy, in order."""
        if (circuit_error := self._circuit.begin_attempt()) is not None:
            return [circuit_error] * len(copies)
        errors: PushErrors = {}
        started_at = monotonic()
        try:
            for groups in _split(copies):
                errors.update(await self._push_groups(groups))
        except psycopg.Error as error:
            self._circuit.on_failure(error, started_at)
            await self._connection.close()
            text = f"{self._circuit.namespace} is unreachable: {error_line(error)}"
            return [errors.get((copy.queue, copy.key), text) for copy in copies]
        self._circuit.backoff.reset()
        return [errors[copy.queue, copy.key] for copy in copies]

    async def _push_groups(self, groups: list[list[RemoteCopy]]) -> PushErrors:
        """Push the groups of one transaction, as yielded by `_split`.

        After an error that a single copy may cause, push each copy in its own transaction.
        """
        copies = [copy for group in groups for copy in group]
        if len(copies) == 1:
            return await self._push_singly(copies)
        try:
            answers = await self._execute(groups)
        except psycopg.Error as error:
            if not await self._recover(error):
                raise
            return await self._push_singly(copies)
        errors: PushErrors = {}
        for group, answer in zip(groups, answers, strict=True):
            if answer["Err"] in _COPY_ERRORS and len(group) > 1:
                errors.update(await self._push_singly(group))
            else:
                errors.update({(copy.queue, copy.key): _error_text(answer) for copy in group})
        return errors

    async def _push_singly(self, copies: list[RemoteCopy]) -> PushErrors:
        """Push each copy in its own transaction."""
        errors: PushErrors = {}
        for copy in copies:
            try:
                (answer,) = await self._execute([[copy]])
                errors[copy.queue, copy.key] = _error_text(answer)
            except psycopg.Error as error:
                if not await self._recover(error):
                    raise
                errors[copy.queue, copy.key] = error_line(error)
        return errors

    async def _execute(self, groups: list[list[RemoteCopy]]) -> list[Any]:
        """Push groups in one transaction; return one answer for each group."""
        pushes = [sql.push(self._ident, group) for group in groups]
        queries = (Query("BEGIN"), Query(_TIMEOUT), *pushes, Query("COMMIT"))
        return [rows[0][0] for rows in (await self._connection.execute(*queries))[2:-1]]

    async def _recover(self, error: psycopg.Error) -> bool:
        """Roll back. Return whether the connection is open and a copy may have caused the error."""
        await self._connection.reset()
        # SQL functions of this package raise errors with an SQLSTATE that begins with PM.
        is_own_error = (error.sqlstate or "").startswith("PM")
        return self._connection.is_open and (is_own_error or is_data_error(error))

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()


def _error_text(answer: Any) -> str | None:
    try:
        raise_for_error(answer)
    except MessagesError as error:
        return str(error)
    return None


def _split(copies: Sequence[RemoteCopy]) -> Iterator[list[list[RemoteCopy]]]:
    """Yield the copies of each transaction, as a list of groups. Each group is one statement."""
    groups: dict[tuple[object, ...], list[RemoteCopy]] = {}
    size = 0
    for copy in copies:
        copy_size = len(copy.body) + len(copy.headers)
        if size and size + copy_size > _MAX_CHARACTERS:
            yield list(groups.values())
            groups, size = {}, 0
        size += copy_size
        shared_arguments = (copy.queue, copy.enc, copy.delay, copy.mature, copy.tries)
        groups.setdefault(shared_arguments, []).append(copy)
    if groups:
        yield list(groups.values())
