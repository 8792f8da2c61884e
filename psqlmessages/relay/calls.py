"""Calls of the hub: a gateway's, with every failure as an answer."""

from __future__ import annotations

import logging
from typing import Final

import psycopg

from psqlmessages.client.backoff import QuietLog
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.gateway_calls import Answer
from psqlmessages.exceptions import (
    MessagesError,
    NodeClosed,
    NotificationQueueFull,
    NotInstalled,
    ServerUnreachable,
)
from psqlmessages.relay import answers

logger: Final = logging.getLogger("psqlmessages")
log: Final = QuietLog(logger)

AWAY = (ServerUnreachable, NodeClosed, NotInstalled)
ABORTED = (MessagesError, psycopg.Error)


async def answered(
    gateway: Gateway, ident: str, function: str, *arguments: str | None, is_patient: bool = True
) -> Answer:
    """Call a function as a node; what fails is answered with 56, 57, 58 or 59."""
    try:
        return await gateway.run(ident, function, *arguments, is_patient=is_patient)
    except AWAY:
        return answers.away()
    except ABORTED as error:
        log.warning("%s: PostgreSQL aborted a call: %s", gateway.name, error)
        is_full = isinstance(error, NotificationQueueFull)
        return answers.queue_full() if is_full else answers.failed()
    except ValueError as error:
        return answers.malformed(error)
