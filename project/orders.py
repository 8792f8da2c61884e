"""Orders of the example: pushed for its exchanges to sort, and taken where these put them.

PSQLMESSAGES_DSN    the database, as whoever the rules of example.py name
"""

import json
import os
import random
import signal
import sys
from threading import Event
from types import FrameType
from typing import Final, NoReturn

import psycopg

SHOP, DESK = "demo.shop", "demo.desk"
ORDERS: Final = "demo.orders"
# From where the desk takes, and every how many orders.
TAKEN: Final = {"demo.eu": 7, "demo.audit": 25}
ARTICLES: Final = ("apple", "pear", "plum", "quince")
COUNTRIES: Final = ("it", "de", "fr", "us", "jp")
# Between two orders, on average; and before another attempt where PostgreSQL is away.
PAUSE_SECONDS: Final = 0.3
AWAY_SECONDS: Final = 2.0

PUSH: Final = "SELECT messages.push(%s, %s, %s, 'json', %s)"
TAKE: Final = "SELECT count(*) FROM messages.pop(%s, %s, 100)"


def main() -> NoReturn:
    """Push and take until it is asked to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    pause = Event()
    while True:
        try:
            with psycopg.connect(os.environ["PSQLMESSAGES_DSN"], autocommit=True) as connection:
                _trade(connection, pause)
        except psycopg.OperationalError:
            pause.wait(AWAY_SECONDS)


def _trade(connection: psycopg.Connection, pause: Event) -> NoReturn:
    number = 0
    while True:
        number += 1
        order = {"number": number, "article": _any(ARTICLES), "amount": _number(1, 100)}
        headers = {"country": _any(COUNTRIES)}
        connection.execute(PUSH, (SHOP, ORDERS, json.dumps(order), json.dumps(headers)))
        for queue, interval in TAKEN.items():
            if number % interval == 0:
                connection.execute(TAKE, (DESK, queue))
        pause.wait(PAUSE_SECONDS * _number(50, 150) / 100)


def _any(choices: tuple[str, ...]) -> str:
    return random.choice(choices)  # noqa: S311 - no secret


def _number(least: int, most: int) -> int:
    return random.randint(least, most)  # noqa: S311


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    main()
