"""Measures hostile selectors, each in a process of its own, which may crash.

The input is a JSON list of pairs: a selector, and a Python expression for the body. In the latter,
n is the number of units that the selector may read. Seconds are of CPU, corrected for a slow
machine.
"""

import json
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from psqlmessages.exchanges import Selector, SelectorError, SelectorFailed, SelectorInput
from psqlmessages.exchanges.selectors import ActivationCache, SelectorContext

NUMBERS, COMMON_SECONDS = 2_000_000, 0.025


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def slowness() -> float:
    """Return the ratio of this machine's run time to that of a common one, at least 1."""
    started = time.process_time()
    sum(range(NUMBERS))
    return max(1.0, (time.process_time() - started) / COMMON_SECONDS)


def judged(expression: str, body: str) -> dict[str, Any]:
    """Compile and evaluate; return the outcome with CPU seconds and bytes."""
    said: dict[str, Any] = {"expression": expression}
    before, started = peak(), time.process_time()
    try:
        selector = Selector(expression)
    except SelectorError as refused:
        said |= {"outcome": "refused", "text": refused.text}
        return said | {"seconds": time.process_time() - started, "bytes": peak() - before}
    compiled = time.process_time() - started
    value = eval(body, {"n": selector.fields.max_units})  # noqa: S307
    message = SelectorInput(value, {"name": "x", "country": "it"})
    before, started = peak(), time.process_time()
    try:
        answer = selector.evaluate(ActivationCache(SelectorContext(message)))
        said |= {"outcome": "answered", "text": answer.why}
    except SelectorFailed as failed:
        said |= {"outcome": "failed", "text": failed.text}
    seconds = compiled + time.process_time() - started
    return said | {"seconds": seconds, "bytes": peak() - before}


def corrected(expression: str, body: str) -> dict[str, Any]:
    said = judged(expression, body)
    return said | {"seconds": said["seconds"] / slowness()}


def main() -> None:
    Selector("true")  # loads the package
    for case in json.load(sys.stdin):
        # A process for each, as it may crash.
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            try:
                said = pool.submit(corrected, *case).result()
            except BrokenProcessPool as error:
                said = {"expression": case[0], "outcome": "crashed", "text": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
