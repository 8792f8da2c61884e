"""Answers: those that the hub gives itself, of the form in which SQL answers."""

from typing import Final

from psqlmessages.client.gateway_calls import Answer

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
