"""Tokens: with which programs call the API. They open no WebSocket, nor do a WebSocket's these."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from psqlmessages.relay import tokens
from psqlmessages.relay.tokens import Claim

PURPOSE: Final = "psqlmessages.rest"


def token_for(user: Any, lifetime: timedelta) -> str:
    """Issue a token, with which a program calls the API as a user: ``Authorization: Bearer …``.

    It ends with its lifetime, with the user's password, and with the user. Whoever has it is that
    user.
    """
    return tokens.token_for(user, lifetime, purpose=PURPOSE)


def read(token: str) -> Claim | None:
    """Read a token; None where it is altered or expired, or the user is inactive or gone."""
    return tokens.read(token, purpose=PURPOSE)
