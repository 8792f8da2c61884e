"""Calls of the hub, with each failure as an answer."""

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

# Error numbers. ABORTED: PostgreSQL aborted the call, which had no effect. UNANSWERED: also 59,
# if there was no connection.
ABORTED: Final = ("56", "58")
UNANSWERED: Final = (*ABORTED, "59")


def refusal(number: int, text: str) -> Answer:
    """Make the answer to a refused call."""
    return {"Err": str(number), "Errstr": text}


def failed() -> Answer:
    """Answer that PostgreSQL aborted the call; only the log has the reason."""
    return refusal(56, "the request failed")


def away() -> Answer:
    """Answer that there is no connection to PostgreSQL."""
    return refusal(59, "the relay has no connection to PostgreSQL")


logger: Final = logging.getLogger("psqlmessages")
log: Final = RateLimitedLogger(logger)

AWAY = (ServerUnreachable, NodeClosed, NotInstalled)
CALL_ERRORS = (MessagesError, psycopg.Error)


async def call_as_answer(
    gateway: Gateway, ident: str, function: str, *arguments: str | None, can_wait: bool = True
) -> Answer:
    """Call a function as a node; a failure gives an answer with error 56, 57, 58 or 59."""
    try:
        return await gateway.run(ident, function, *arguments, can_wait=can_wait)
    except AWAY:
        return away()
    except CALL_ERRORS as error:
        log.warning("%s: PostgreSQL aborted a call: %s", gateway.name, error)
        if isinstance(error, NotificationQueueFull):
            return refusal(58, "more than PostgreSQL's notification queue holds")
        return failed()
    except ValueError as error:
        # PostgreSQL cannot store a value.
        return refusal(57, f"malformed frame: {error}")
