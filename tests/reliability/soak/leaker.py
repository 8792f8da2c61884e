"""A process that grows in every way, to show that the soak finds it."""

import os
import threading

import psycopg

STORE = "INSERT INTO soak_leak SELECT repeat('x', 1000) FROM generate_series(1, 2000)"


def main() -> None:
    kept: list[object] = []
    pause = threading.Event()
    while not pause.wait(0.3):
        connection = psycopg.connect(os.environ["LEAK"], autocommit=True, application_name="leaker")
        kept += [connection, bytearray(os.urandom(1024 * 1024)), os.open(os.devnull, os.O_RDONLY)]
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        connection.execute("CREATE TABLE IF NOT EXISTS soak_leak (text text)")
        connection.execute(STORE)
        connection.execute("SELECT pg_advisory_lock_shared(4711)")


if __name__ == "__main__":
    main()
