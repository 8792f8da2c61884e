"""Actor: changes rules all the time: of a topic that is listened to, and of nobody's."""

import psycopg

from tests.reliability.soak.acting import Actor

ALLOW = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES ('user3', 'XRAY', 'Topic', 'CHANGING', 'R', 5)
"""
FORBID = "DELETE FROM messages.auth WHERE ident = 'XRAY' AND type = 'Topic'"
OTHERS = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT 'user3', 'NOBODY', 'Topic', 'NOTHING.' || n, 'RW', 5 FROM generate_series(1, 50) AS n
"""
NO_OTHERS = "DELETE FROM messages.auth WHERE ident = 'NOBODY'"


def main() -> None:
    actor = Actor()
    actor.begin(lambda: rule(actor))
    actor.run()


def rule(actor: Actor) -> None:
    """Add and remove, in transactions of their own."""
    with psycopg.connect(actor.places["owner"], autocommit=True) as connection:
        for number in actor.every(0.7):
            connection.execute((ALLOW, OTHERS, FORBID, NO_OTHERS)[number % 4])
            actor.counts["rules changed"] += 1


if __name__ == "__main__":
    main()
