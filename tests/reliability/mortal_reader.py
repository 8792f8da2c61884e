"""A process whose readers kill themselves: for each line it reads it forks one that dies at a step.

Lines: "stream 3": the reader of that kind kills itself with -9 at its third step, and what it had
fetched by then is answered. "stream 0" reads until nothing is left.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from typing import Any

import django
import psycopg

READER, TOPIC, QUEUE = "READER", "NEWS", "Q"
DSN = sys.argv[-1]
AT_ONCE = 3
FETCH = {
    "stream": f"SELECT payload FROM messages.subscribe('{READER}', '{TOPIC}', 600, {AT_ONCE})",
    "pop": f"SELECT body FROM messages.pop('{READER}', '{QUEUE}', {AT_ONCE})",
}
EFFECT = "INSERT INTO psqlmessages_effects VALUES (%s, %s)"
NAME = "mortal"
LEASE = timedelta(minutes=10)

Tell = Callable[[str, Iterable[Any]], None]
Step = Callable[[], None]


def main() -> None:
    django.setup()
    # What a reader needs is there before the first fork.
    import psqlmessages.django  # noqa: F401

    for line in sys.stdin:
        kind, steps = line.split()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            read(kind, int(steps), tell)
            os._exit(0)
        os.close(tell)
        with os.fdopen(told) as saying:
            said = [json.loads(each) for each in saying]
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), said]), flush=True)


def read(kind: str, last: int, pipe: int) -> None:
    """Read as a kind of reader does, and die at the last step."""
    steps = count(1)

    def step() -> None:
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(what: str, bodies: Iterable[Any]) -> None:
        # It is in the pipe, whatever becomes of this process.
        os.write(pipe, (json.dumps([what, list(bodies)]) + "\n").encode())

    {"stream": by_sql, "pop": by_sql, "django": by_django, "consume": by_node}[kind](
        kind, step, tell
    )


def by_sql(kind: str, step: Step, tell: Tell) -> None:
    """Fetch, write the effects and commit, in one transaction; die between any of them."""
    with psycopg.connect(DSN, application_name=NAME) as connection:
        while True:
            bodies = [body for (body,) in connection.execute(FETCH[kind])]
            tell("fetched", bodies)
            step()
            connection.cursor().executemany(EFFECT, [(kind, body) for body in bodies])
            step()
            if not bodies:
                connection.commit()
                return
            # Sent, and not waited for: whether it is done when this process dies, nobody knows.
            connection.pgconn.send_query(b"COMMIT")
            step()
            while connection.pgconn.get_result() is not None:
                pass
            tell("committed", bodies)
            step()


def by_django(kind: str, step: Step, tell: Tell) -> None:
    """Do the same with the ORM's transaction."""
    from django.db import connection, transaction

    from psqlmessages.django import read_stream

    connection.settings_dict["OPTIONS"] = {"application_name": NAME}
    bodies: list[Any] = [""]
    while bodies:
        with transaction.atomic(), connection.cursor() as cursor:
            bodies = [each.body for each in read_stream(READER, TOPIC, LEASE, AT_ONCE)]
            tell("fetched", bodies)
            step()
            cursor.executemany(EFFECT, [(kind, body) for body in bodies])
            step()
        tell("committed", bodies)
        step()


def by_node(kind: str, step: Step, tell: Tell) -> None:
    """Reserve, write the effect of each in a transaction of its own, and have it committed."""
    from psqlmessages import Node

    with (
        Node(READER, DSN) as node,
        psycopg.connect(DSN, application_name=NAME, autocommit=True) as connection,
    ):
        for element in node.consume(QUEUE, batch=AT_ONCE, duration=LEASE, idle=timedelta(0)):
            tell("fetched", [element.body])
            step()
            connection.execute(EFFECT, [kind, element.body])
            tell("committed", [element.body])
            step()


if __name__ == "__main__":
    main()
