"""Data of the example: an administrator, rules, exchanges, a web identity for the chat."""

import secrets
from pathlib import Path
from typing import Any

from django.contrib.auth.models import User
from django.db import connection

from project import orders
from project.generated_secrets import read_or_generate
from psqlmessages.cli.demo import TRAFFIC_RULES
from psqlmessages.conf import get_settings
from psqlmessages.exchanges.store import definitions, permissions, repository
from psqlmessages.models import Auth, Exchange, WebIdentity

ADMINISTRATOR = "admin"
CHAT_TOPIC = "DEMO.CHAT"
EXCHANGES_FILE = Path(__file__).parent / "exchanges.yaml"
RULE_FIELDS = ("role", "ident", "type", "dest", "mode", "timeout")

# The rule that lets the demo's board receive prices. The index page suggests changing this rule.
BOARD_RULE: dict[str, Any] = next(
    rule
    for rule in (dict(zip(RULE_FIELDS, values, strict=True)) for values in TRAFFIC_RULES)
    if (rule["ident"], rule["dest"]) == ("DEMO.BOARD", "DEMO.PRICES")
)


def create_example_data(password_file: Path) -> str | None:
    """Create missing data. Return the administrator's password; None if unusable."""
    password = read_or_generate(password_file, lambda: secrets.token_urlsafe(12))
    user = User.objects.filter(username=ADMINISTRATOR).first()
    if user is None:
        user = User.objects.create_superuser(ADMINISTRATOR, password=password)
    _create_rules()
    _create_exchanges()
    WebIdentity.objects.get_or_create(user=user, ident=f"chat/{ADMINISTRATOR}/*")
    return password if user.is_active and user.check_password(password) else None


def _create_rules() -> None:
    """Create the missing rules of the monitor, the pipeline, the site, the shop and the desk."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT session_user")
        (role,) = cursor.fetchone()
    for ident, kind, dest, mode in (
        (f"{get_settings().NODE}.monitor.*", "Topic", "*", "O"),
        ("pipeline.*", "Topic", "*", "R"),
        ("chat/*", "Topic", CHAT_TOPIC, "RW"),
        (get_settings().NODE, "Queue", "*", "A"),
        (orders.SHOP, "Queue", orders.ORDERS, "W"),
        *((orders.DESK, "Queue", queue, "R") for queue in orders.ORDERS_PER_POP_BY_QUEUE),
    ):
        Auth.objects.get_or_create(
            role=role, ident=ident, type=kind, dest=dest, defaults={"mode": mode, "timeout": 60}
        )


def _create_exchanges() -> None:
    """Create missing exchanges, with the rules that these exchanges need."""
    existing = set(Exchange.objects.values_list("name", flat=True))
    for exchange in definitions.parse_text(EXCHANGES_FILE.read_text()):
        if exchange.name not in existing:
            repository.store(exchange)
            permissions.add_missing_rules(exchange)
