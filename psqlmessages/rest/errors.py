"""Errors of the API, and the HTTP status of each error number."""

from __future__ import annotations

from typing import Final

import psycopg
from django import db

from psqlmessages.exceptions import MessagesError, NotificationQueueFull, NotInstalled

# The HTTP status of each error number in docs/reference/errors.md; 503 for all other numbers.
_STATUSES: Final = {
    **dict.fromkeys((1, 4, 14, 15, 18, 52, 54, 55, 57, 58, 60, 63), 400),  # invalid argument
    **dict.fromkeys((2, 3, 5, 11, 16, 20), 403),  # not authorized
    **dict.fromkeys((9, 12, 13, 19, 61, 62), 404),  # does not exist, or has expired
    **dict.fromkeys((6, 7, 8, 10, 17, 21, 50, 53, 66), 409),  # not possible in the present state
    51: 413,  # body too large
}
# Classes of SQLSTATE after which a retry may succeed.
_RETRY_CLASSES: Final = (
    "08",  # connection lost
    "40",  # deadlock, serialization failure
    "53",  # out of resources
    "55",  # lock not available
    "57",  # operator intervention
    "58",  # system error
)


class ApiError(Exception):
    """A failed call: its HTTP status, the reason, and the error number if it has one.

    ``errors``: one line per problem of an invalid exchange definition; None for other errors.
    """

    def __init__(
        self, status: int, detail: str, number: int | None = None, errors: list[str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.number = number
        self.errors = errors


class ServiceUnavailable(ApiError):
    """Status 503: a retry may succeed, because the database is unreachable, busy or slow."""

    def __init__(self, detail: str = "the database is unreachable") -> None:
        super().__init__(503, detail)


def to_api_error(
    error: MessagesError | psycopg.Error | db.Error | TimeoutError,
) -> ApiError | None:
    """Convert an error to an API error; None if the error is a bug of this server."""
    if isinstance(error, NotInstalled):
        return ApiError(404, "psqlmessages is missing or outdated in this namespace: run migrate")
    if isinstance(error, MessagesError) and (status := _STATUSES.get(error.number or 0)):
        return ApiError(status, error.text, error.number)
    if isinstance(error, MessagesError | db.Error | TimeoutError):
        is_full = isinstance(error, NotificationQueueFull)
        return ServiceUnavailable(error.text) if is_full else ServiceUnavailable()
    if isinstance(error, psycopg.OperationalError) or (error.sqlstate or "")[:2] in _RETRY_CLASSES:
        return ServiceUnavailable("the database is temporarily unavailable")
    if isinstance(error, psycopg.DataError):
        return ApiError(400, f"malformed: {str(error).partition(chr(10))[0]}")
    return None
