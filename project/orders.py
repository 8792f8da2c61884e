"""Orders of the example: the shop pushes orders for the exchanges, the desk pops the copies.

PSQLMESSAGES_DSN    the database; connect as the role for which example.py creates rules
"""

import json
import os
import random
import signal
import sys
from threading import Event
from typing import Final, NoReturn

import psycopg

SHOP, DESK = "demo.shop", "demo.desk"
ORDERS: Final = "demo.orders"
# The queues of the desk, and the number of pushed orders between two pops of each queue.
ORDERS_PER_POP_BY_QUEUE: Final = {"demo.eu": 7, "demo.audit": 25}
ARTICLES: Final = ("apple", "pear", "plum", "quince")
COUNTRIES: Final = ("it", "de", "fr", "us", "jp")
# The mean pause between two orders.
PAUSE_SECONDS: Final = 0.3
RECONNECT_SECONDS: Final = 2.0

PUSH: Final = "SELECT messages.push(%s, %s, %s, 'json', %s)"
POP: Final = "SELECT count(*) FROM messages.pop(%s, %s, 100)"


def main() -> NoReturn:
    """Push and pop until SIGINT or SIGTERM; reconnect if the connection is lost."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: sys.exit(0))
    pause = Event()
    while True:
        try:
            with psycopg.connect(os.environ["PSQLMESSAGES_DSN"], autocommit=True) as connection:
                _push_and_pop(connection, pause)
        except psycopg.OperationalError:
            pause.wait(RECONNECT_SECONDS)


def _push_and_pop(connection: psycopg.Connection, pause: Event) -> NoReturn:
    chance = random.SystemRandom()
    number = 0
    while True:
        number += 1
        article, amount = chance.choice(ARTICLES), chance.randint(1, 100)
        order = {"number": number, "article": article, "amount": amount}
        headers = {"country": chance.choice(COUNTRIES)}
        connection.execute(PUSH, (SHOP, ORDERS, json.dumps(order), json.dumps(headers)))
        for queue, interval in ORDERS_PER_POP_BY_QUEUE.items():
            if number % interval == 0:
                connection.execute(POP, (DESK, queue))
        pause.wait(PAUSE_SECONDS * chance.uniform(0.5, 1.5))


if __name__ == "__main__":
    main()
