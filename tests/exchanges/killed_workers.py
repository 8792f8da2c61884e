"""Runs workers that are killed: a fork for each line of input; it prints the signal.

"execute 5" kills before the fifth statement, "asked 5" after the fifth round trip, and "after 0.3"
that many seconds after the first round trip.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import django


def main() -> None:
    django.setup()
    # Import everything before the first fork.
    from psqlmessages.exchanges.store import worker

    for line in sys.stdin:
        how, number = line.split()
        began, begin = os.pipe()
        child = os.fork()
        if child == 0:
            die(how, number, partial(os.write, begin, b"!"))
            asyncio.run(worker.ExchangeWorker().run())
            os._exit(0)
        os.close(begin)
        if how == "after":
            os.read(began, 1)
            threading.Event().wait(float(number))
            os.kill(child, signal.SIGKILL)
        os.close(began)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def die(how: str, number: str, tell: Callable[[], object]) -> None:
    """Let this process kill itself at a step, or notify its parent when it has begun."""
    from psqlmessages.exchanges.engine import sql

    steps = count(1)

    def step() -> None:
        if next(steps) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    owner, name = (sql, "_execute") if how == "execute" else (sql.ReconnectingConnection, "execute")
    act = getattr(owner, name)

    async def acting(*arguments: Any) -> Any:
        if how == "execute":
            step()
        answer = await act(*arguments)
        if how == "asked":
            step()
        elif how == "after":
            tell()
        return answer

    setattr(owner, name, acting)


if __name__ == "__main__":
    main()
