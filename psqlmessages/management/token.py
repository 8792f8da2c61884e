"""Command token: print an API token for a user."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from datetime import timedelta

from django.contrib.auth import get_user_model

from psqlmessages.cli.output import fail

NAME = "token"
HELP = "print a token for calls of the API as a user"

_MOST_DAYS = 3650


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("user", metavar="USER", help="the name of the user")
    parser.add_argument(
        "--days", type=_days, default=30.0, help="how long it is valid (default: 30)"
    )


def run(arguments: Namespace) -> int:
    """Print a token; fail if the user does not exist or is not active."""
    try:
        from psqlmessages.rest.auth import token_for
    except ImportError:
        return fail("the REST API is not installed: pip install 'psqlmessages[web]'")
    users = get_user_model()
    try:
        user = users._default_manager.get_by_natural_key(arguments.user)
    except users.DoesNotExist:
        return fail(f"there is no user {arguments.user!r}")
    if not user.is_active:
        return fail(f"the user {arguments.user!r} is not active")
    print(token_for(user, timedelta(days=arguments.days)))
    return 0


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        raise ArgumentTypeError(f"not a number of days: {text!r}") from None
    if not 0 < days <= _MOST_DAYS:
        raise ArgumentTypeError(f"more than 0 and at most {_MOST_DAYS:,} days: {text!r}")
    return days
