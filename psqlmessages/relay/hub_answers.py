"""Calls of the hub: a call that fails returns an answer with an error number."""

from __future__ import annotations

import logging
from typing import Final

import psycopg

from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.exceptions import (
    MessagesError,
    NodeClosed,
    NotificationQueueFull,
    NotInstalled,
    ServerUnreachable,
)
from psqlmessages.retry import RateLimitedLogger

# Error numbers of calls that PostgreSQL aborted: they had no effect.
ABORTED: Final = ("56", "58")
# Error numbers of calls that were aborted, or had no connection.
UNANSWERED: Final = (*ABORTED, "59")


def error_answer(number: int, text: str) -> Answer:
    """Make the answer to a call that failed."""
    return {"Err": str(number), "Errstr": text}


UNREACHABLE_ANSWER: Final = error_answer(59, "the relay has no connection to PostgreSQL")
# Only the log has PostgreSQL's reason.
ABORTED_ANSWER: Final = error_answer(56, "the request failed")

logger: Final = logging.getLogger("psqlmessages")
log: Final = RateLimitedLogger(logger)

UNREACHABLE_ERRORS = (ServerUnreachable, NodeClosed, NotInstalled)
CALL_ERRORS = (MessagesError, psycopg.Error)


async def call_as_answer(
    gateway: Gateway, ident: str, function: str, *arguments: str | None, can_wait: bool = True
) -> Answer:
    """Call a function as a node; a failure gives an answer with error 56, 57, 58 or 59.

    Without ``can_wait`` the call waits at most 1 ms for locks of other sessions.
    """
    try:
        return await gateway.run(ident, function, *arguments, can_wait=can_wait)
    except UNREACHABLE_ERRORS:
        return UNREACHABLE_ANSWER
    except CALL_ERRORS as error:
        log.warning("%s: PostgreSQL aborted a call: %s", gateway.name, error)
        if isinstance(error, NotificationQueueFull):
            return error_answer(
                58, "more than PostgreSQL's notification queue can hold: try again later"
            )
        return ABORTED_ANSWER
    except ValueError as error:
        # PostgreSQL cannot store an argument.
        return error_answer(57, f"malformed frame: {error}")
