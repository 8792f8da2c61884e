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

# Answers: those that the hub gives itself, of the form in which SQL answers.

# Error numbers. PostgreSQL aborted the call, which did nothing; or it was not asked either.
ABORTED: Final = ("56", "58")
UNANSWERED: Final = (*ABORTED, "59")


def refusal(number: int, text: str) -> Answer:
    """Write a refused call's answer."""
    return {"Err": str(number), "Errstr": text}


def ident_taken(ident: str, pid: int) -> Answer:
    """Another receiver of this hub has the name, as SQL says it of another session."""
    return refusal(8, f"Client {ident} already exists with pid {pid}")


def not_of_this_session(ident: str) -> Answer:
    """Name an ident that is not the caller's."""
    return refusal(53, f"{ident} is not a node of this session")


def failed() -> Answer:
    """Say that PostgreSQL aborted the call; why is for the log alone."""
    return refusal(56, "the request failed")


def queue_full() -> Answer:
    """Say that nothing was done, as the server keeps no more notifications."""
    return refusal(58, "more than PostgreSQL's notification queue holds")


def malformed(reason: object) -> Answer:
    """Say what PostgreSQL could not hold."""
    return refusal(57, f"malformed frame: {reason}")


def away() -> Answer:
    """Say that there is no connection to PostgreSQL."""
    return refusal(59, "the relay has no connection to PostgreSQL")


logger: Final = logging.getLogger("psqlmessages")
log: Final = RateLimitedLogger(logger)

AWAY = (ServerUnreachable, NodeClosed, NotInstalled)
CALL_ERRORS = (MessagesError, psycopg.Error)


async def call_as_answer(
    gateway: Gateway, ident: str, function: str, *arguments: str | None, is_patient: bool = True
) -> Answer:
    """Call a function as a node; what fails is answered with 56, 57, 58 or 59."""
    try:
        return await gateway.run(ident, function, *arguments, is_patient=is_patient)
    except AWAY:
        return away()
    except CALL_ERRORS as error:
        log.warning("%s: PostgreSQL aborted a call: %s", gateway.name, error)
        is_full = isinstance(error, NotificationQueueFull)
        return queue_full() if is_full else failed()
    except ValueError as error:
        return malformed(error)
