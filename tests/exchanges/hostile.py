"""What hostile selectors cost: each case in a process of its own, which may crash.

Run as a program: reads [[expression, body], …] as JSON from its input, where a body is Python
with n, the number of units that the expression may look at; prints what became of each. Seconds are
those of the processor, as on a machine that adds numbers as fast as a common one.
"""

import json
import os
import resource
import sys
import time
from typing import Any

from psqlmessages.exchanges import Selector, SelectorError, SelectorFailed, SelectorInput
from psqlmessages.exchanges.selectors import ActivationCache, SelectorContext

KIB = 1024
NUMBERS, COMMON_SECONDS = 2_000_000, 0.025


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def slowness() -> float:
    """How many times as long as a common machine this one takes; 1 where it is faster."""
    started = time.process_time()
    sum(range(NUMBERS))
    return max(1.0, (time.process_time() - started) / COMMON_SECONDS)


def judged(expression: str, body: str) -> dict[str, Any]:
    """Compile and ask; say what it came to, with processor seconds and bytes of both together."""
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
        said |= {
            "outcome": "answered",
            "text": selector.evaluate(ActivationCache(SelectorContext(message))).why,
        }
    except SelectorFailed as failed:
        said |= {"outcome": "failed", "text": failed.text}
    seconds = compiled + time.process_time() - started
    return said | {"seconds": seconds, "bytes": peak() - before}


def in_a_process(expression: str, body: str) -> dict[str, Any]:
    """The same in a fork: where it is killed, the signal is the outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as out:
            said = judged(expression, body)
            json.dump(said | {"seconds": said["seconds"] / slowness()}, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    killed = {"expression": expression, "outcome": f"status {status}", "text": text}
    return json.loads(text) if status == 0 else killed


def main() -> None:
    Selector("true")  # loads the package
    for expression, body in json.load(sys.stdin):
        print(json.dumps(in_a_process(expression, body)), flush=True)


if __name__ == "__main__":
    main()
