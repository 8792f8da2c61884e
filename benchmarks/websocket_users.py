"""Creates users whose WebSockets may listen to one topic, and prints their tokens as JSON.

python -m benchmarks.websocket_users NUMBER

It writes the users and the rules to the database of DATABASE_URL.
"""

import json
import os
import sys
from datetime import timedelta

import django

TOPIC, SENDER = "CROWD", "sender"
# Django's mark of an unusable password: these users have only tokens.
UNUSABLE = "!"


def ident_of(number: int) -> str:
    """Return the node name of a user."""
    return f"crowd/{number}"


def create_users(users: int) -> list[str]:
    """Create users and rules; return the users' tokens."""
    from django.contrib.auth.models import User
    from django.db import connection

    from psqlmessages.models import Auth, WebIdentity
    from psqlmessages.relay.auth import token_for

    created = User.objects.bulk_create(
        User(username=ident_of(number), password=UNUSABLE) for number in range(users)
    )
    WebIdentity.objects.bulk_create(
        WebIdentity(user=user, ident=ident_of(number)) for number, user in enumerate(created)
    )
    role = connection.settings_dict["USER"]
    for ident, mode in ((ident_of(0)[:-1] + "*", "R"), (SENDER, "W")):
        Auth.objects.create(role=role, ident=ident, type="Topic", dest=TOPIC, mode=mode, timeout=60)
    return [token_for(user, timedelta(hours=1)) for user in created]


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    print(json.dumps(create_users(int(sys.argv[1]))))
