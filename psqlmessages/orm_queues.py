"""Queues on Django's own connection; import from psqlmessages.django."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import transaction

from psqlmessages.client import queue_calls
from psqlmessages.client.queue_calls import (
    DEFAULT_DURATION,
    AckResult,
    Element,
    Headers,
)
from psqlmessages.orm import fetch, own_ident, postgresql, run


def push(  # noqa: PLR0913 - one option per property of the element
    queue: str,
    body: Any,
    *,
    headers: Headers | None = None,
    mature: datetime | None = None,
    delay: timedelta | None = None,
    tries: int = 0,
    key: str | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> int:
    """Add an element to a queue, within the ORM's transaction; return its id.

    It is available at ``mature``, else after ``delay``, else after the commit. A second push with
    the same ``key`` adds nothing and returns the id of the first. ``ident`` is by default
    PSQLMESSAGES["NODE"]. An error does not break the transaction.
    """
    call = queue_calls.push(
        _own(ident),
        queue,
        body,
        headers=headers,
        mature=mature,
        delay=delay,
        tries=tries,
        key=key,
    )
    return run(call, using)


def push_many(  # noqa: PLR0913
    queue: str,
    bodies: Iterable[Any],
    *,
    headers: Iterable[Headers | None] | None = None,
    mature: datetime | None = None,
    delay: timedelta | None = None,
    tries: int = 0,
    keys: Iterable[str | None] | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> list[int]:
    """Add many elements in one call, in order, all or none; return their ids.

    ``headers`` and ``keys`` have one entry per body; see :func:`push`. Bytes cannot be mixed with
    other values.
    """
    call = queue_calls.push_many(
        _own(ident),
        queue,
        bodies,
        headers=headers,
        mature=mature,
        delay=delay,
        tries=tries,
        keys=keys,
    )
    return run(call, using)


async def apush(  # noqa: PLR0913
    queue: str,
    body: Any,
    *,
    headers: Headers | None = None,
    mature: datetime | None = None,
    delay: timedelta | None = None,
    tries: int = 0,
    key: str | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> int:
    """See :func:`push`; uses the connection of the asynchronous ORM."""
    return await sync_to_async(push)(
        queue,
        body,
        headers=headers,
        mature=mature,
        delay=delay,
        tries=tries,
        key=key,
        ident=ident,
        using=using,
    )


def pop(
    queue: str, count: int = 1, *, ident: str | None = None, using: str | None = None
) -> list[Element]:
    """Take and remove up to ``count`` elements within ``transaction.atomic()``; does not wait.

    The commit removes them together with your other writes, so each element takes effect exactly
    once. If you roll back, they return with the same number of tries; until then other consumers do
    not get them. Raises TransactionManagementError outside of ``atomic``. An error from the server
    breaks the transaction.
    """
    if not postgresql(using).in_atomic_block:
        raise transaction.TransactionManagementError(
            "pop removes elements when the transaction commits: call it within"
            " transaction.atomic(), and handle the elements there."
        )
    return _taken(queue, queue_calls.pop(_own(ident), queue, count), using)


def reserve(
    queue: str,
    count: int = 1,
    duration: timedelta = DEFAULT_DURATION,
    *,
    ident: str | None = None,
    using: str | None = None,
) -> list[Element]:
    """Lease up to ``count`` elements; they return after ``duration`` unless committed.

    Call it outside of ``atomic``, and :func:`commit` within the transaction of your writes.
    """
    return _taken(queue, queue_calls.reserve(_own(ident), queue, count, duration), using)


def commit(
    *elements: Element | str, ident: str | None = None, using: str | None = None
) -> AckResult:
    """Remove reserved elements permanently, within the ORM's transaction.

    The result is False if a lease expired and another consumer has taken its element: roll back the
    writes for it. The result has the state of each element.
    """
    return run(queue_calls.commit(_own(ident), *elements), using)


def rollback(
    *elements: Element | str,
    delay: timedelta | None = None,
    ident: str | None = None,
    using: str | None = None,
) -> AckResult:
    """Return reserved elements with one more try: to the end of the queue, or after ``delay``."""
    return run(queue_calls.rollback(_own(ident), *elements, delay=delay), using)


def _own(ident: str | None) -> str:
    return ident if ident is not None else own_ident()


def _taken(queue: str, statement: queue_calls.SqlStatement, using: str | None) -> list[Element]:
    return queue_calls.elements(queue, fetch(*statement, using))
