"""Users who may be the nodes of a crowd, each with a token.

python -m benchmarks.crowd_users NUMBER

They and the rules go into the database of DATABASE_URL; the tokens are printed as JSON.
"""

import json
import os
import sys
from datetime import timedelta

import django

TOPIC, SENDER = "CROWD", "sender"
# By their tokens alone these users come in.
UNUSABLE = "!"


def ident_of(number: int) -> str:
    """Name a node of the crowd."""
    return f"crowd/{number}"


def tokens(users: int) -> list[str]:
    """Make users and rules, and return the users' tokens."""
    from django.contrib.auth.models import User
    from django.db import connection

    from psqlmessages.models import Auth, WebIdentity
    from psqlmessages.relay.auth import token_for

    made = User.objects.bulk_create(
        User(username=ident_of(number), password=UNUSABLE) for number in range(users)
    )
    WebIdentity.objects.bulk_create(
        WebIdentity(user=user, ident=ident_of(number)) for number, user in enumerate(made)
    )
    role = connection.settings_dict["USER"]
    for ident, mode in ((ident_of(0)[:-1] + "*", "R"), (SENDER, "W")):
        Auth.objects.create(role=role, ident=ident, type="Topic", dest=TOPIC, mode=mode, timeout=60)
    return [token_for(user, timedelta(hours=1)) for user in made]


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    print(json.dumps(tokens(int(sys.argv[1]))))
