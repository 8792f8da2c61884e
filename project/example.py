"""What the example needs in its database: an administrator, two rules, and who may chat."""

import secrets
from pathlib import Path
from typing import Any

from django.contrib.auth.models import User
from django.db import connection

from project.kept import kept
from psqlmessages.commands.demo_roles import TRAFFIC_RULES
from psqlmessages.conf import get_settings
from psqlmessages.models import Auth, WebIdentity

ADMINISTRATOR = "admin"
CHAT_TOPIC = "DEMO.CHAT"
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
    WebIdentity.objects.get_or_create(user=user, ident=f"chat/{ADMINISTRATOR}/*")
    return password if user.is_active and user.check_password(password) else None


def _prepare_rules() -> None:
    """Let the monitor observe, and the chat's nodes talk, as the role that Django connects as."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT session_user")
        (role,) = cursor.fetchone()
    for ident, dest, mode in (
        (f"{get_settings().NODE}.monitor.*", "*", "O"),
        ("chat/*", CHAT_TOPIC, "RW"),
    ):
        Auth.objects.get_or_create(
            role=role, ident=ident, type="Topic", dest=dest, defaults={"mode": mode, "timeout": 60}
        )
