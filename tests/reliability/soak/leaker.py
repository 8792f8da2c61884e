"""Actor: grows in every way, to show that the soak finds it."""

import os
import threading

import psycopg

from tests.reliability.soak.acting import Actor

MEGABYTE = 1024 * 1024
STORE = "INSERT INTO soak_leak SELECT repeat('x', 1000) FROM generate_series(1, 2000)"


def main() -> None:
    actor = Actor()
    actor.begin(lambda: leak(actor))
    actor.run()


def leak(actor: Actor) -> None:
    """Leak memory, descriptors, threads, connections, locks, LISTENs and rows, and lose one."""
    kept: list[object] = []
    for number in actor.every(0.3):
        connection = psycopg.connect(
            actor.places["owner"], autocommit=True, application_name="leaker"
        )
        kept += [connection, bytearray(os.urandom(MEGABYTE)), os.open(os.devnull, os.O_RDONLY)]
        threading.Thread(target=actor.drained.wait, daemon=True).start()
        connection.execute("CREATE TABLE IF NOT EXISTS soak_leak (text text)")
        connection.execute(STORE)
        connection.execute("SELECT pg_advisory_lock_shared(4711)")
        actor.counts["LISTENs"] = number
        actor.counts["lost"] = 1


if __name__ == "__main__":
    main()
