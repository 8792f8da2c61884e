"""What the example needs in its database: an administrator, rules, exchanges, who may chat."""

import secrets
from pathlib import Path
from typing import Any

from django.contrib.auth.models import User
from django.db import connection

from project import orders
from project.kept import kept
from psqlmessages.cli.demo import TRAFFIC_RULES
from psqlmessages.conf import get_settings
from psqlmessages.exchanges.store import definitions, permissions, repository
from psqlmessages.models import Auth, Exchange, WebIdentity

ADMINISTRATOR = "admin"
CHAT_TOPIC = "DEMO.CHAT"
EXCHANGES = Path(__file__).parent / "exchanges.yaml"
FIELDS = ("role", "ident", "type", "dest", "mode", "timeout")

# The rule of the live traffic that the index page invites to change.
BOARD_RULE: dict[str, Any] = next(
    named
    for named in (dict(zip(FIELDS, rule, strict=True)) for rule in TRAFFIC_RULES)
    if (named["ident"], named["dest"]) == ("DEMO.BOARD", "DEMO.PRICES")
)


def prepare(password_file: Path) -> str | None:
    """Make what is not there yet. Return the administrator's password; None if it was changed."""
    password = kept(password_file, lambda: secrets.token_urlsafe(12))
    user = User.objects.filter(username=ADMINISTRATOR).first()
    if user is None:
        user = User.objects.create_superuser(ADMINISTRATOR, password=password)
    _prepare_rules()
    _prepare_exchanges()
    WebIdentity.objects.get_or_create(user=user, ident=f"chat/{ADMINISTRATOR}/*")
    return password if user.is_active and user.check_password(password) else None


def _prepare_rules() -> None:
    """Let the monitor observe, the pipeline read, nodes chat and the shop trade: Django's role."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT session_user")
        (role,) = cursor.fetchone()
    for ident, kind, dest, mode in (
        (f"{get_settings().NODE}.monitor.*", "Topic", "*", "O"),
        ("pipeline.*", "Topic", "*", "R"),
        ("chat/*", "Topic", CHAT_TOPIC, "RW"),
        (orders.SHOP, "Queue", orders.ORDERS, "W"),
        *((orders.DESK, "Queue", queue, "R") for queue in orders.TAKEN),
    ):
        Auth.objects.get_or_create(
            role=role, ident=ident, type=kind, dest=dest, defaults={"mode": mode, "timeout": 60}
        )


def _prepare_exchanges() -> None:
    """Define the exchanges that are not there yet, with the rules that they need."""
    there = set(Exchange.objects.values_list("name", flat=True))
    for exchange in definitions.parse_text(EXCHANGES.read_text()):
        if exchange.name not in there:
            repository.store(exchange)
            permissions.add_missing_rules(exchange)
