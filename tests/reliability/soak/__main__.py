"""Let everything run at once for a while, and tell what grew, what was lost and what was doubled.

python -m tests.reliability.soak [--minutes 30 | --seconds 20] [--leak]
Exit code 1: something grew, was lost or doubled, or ended. --leak shows that this is found.
"""

import argparse
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from time import monotonic

import psycopg

from tests.own_server import own_server
from tests.reliability.soak.actors import ACTORS
from tests.reliability.soak.gauges import Gauges, changes
from tests.reliability.soak.stage import RULES, Stage, staged
from tests.servers import tested_binaries


def watch(stage: Stage, seconds: float) -> list[tuple[float, Gauges]]:
    """Read the gauges until the time is over, and tell some of them every thirtieth of it."""
    samples: list[tuple[float, Gauges]] = []
    pause, began = threading.Event(), monotonic()
    step, told = min(10.0, seconds / 40), 0
    with psycopg.connect(stage.tested.superuser_url, autocommit=True) as connection:
        while (passed := monotonic() - began) < seconds and not stage.dead():
            samples.append((passed, stage.read(connection)))
            if passed >= told * seconds / 30:
                told += 1
                tell(passed, samples[-1][1], stage)
            pause.wait(step)
    return samples


def tell(passed: float, found: Gauges, stage: Stage) -> None:
    """Print a line."""
    memory = {n.removeprefix("memory of "): v for n, v in found.items() if n.startswith("memory")}
    own = " ".join(f"{n} {v:.0f}" for n, v in memory.items() if "backend" not in n)
    backends = [v for n, v in memory.items() if "backend" in n]
    tables = sum(v for n, v in found.items() if n.startswith("table"))
    listens = sum(v for n, v in found.items() if n.startswith("LISTENs"))
    total = sum(stage.counts.values(), Counter())
    print(
        f"{passed:6.0f} s  MB: {own}, largest backend {max(backends):.0f}, tables {tables:.0f};"
        f" connections {found['connections']:.0f}, advisory locks {found['advisory locks']:.0f},"
        f" LISTENs {listens:.0f}, notification queue {found['notification queue']:.2g};"
        f" came {total['came']}, lost {total['lost']}, doubled {total['doubled']}",
        flush=True,
    )


def faults(stage: Stage) -> list[str]:
    """Say what was lost, doubled, or not told."""
    found = stage.dead()
    for name, counts in stage.counts.items():
        found += [f"{name}: {what} {counts[what]}" for what in ("lost", "doubled") if counts[what]]
    published = stage.counts["streams"]["published"]
    _, last, lost, doubled = stage.booked(published)
    if lost or doubled:
        found.append(f"the killed reader: lost {lost}, doubled {doubled}")
    if last != published:
        found.append(f"the killed reader is at {last}, not at the end")
    if not_heard := stage.crashes_not_heard():
        found.append(f"crashes that were not heard: {not_heard}")
    return found


def soak(stage: Stage, seconds: float, actors: list[str]) -> int:
    """Run it; the exit code."""
    stage.begin(actors)
    samples = watch(stage, seconds)
    if ended := stage.dead():
        print("WRONG", *ended, sep="\n")
        return 1
    stage.end()
    found = changes(samples, seconds / 6)
    for name, counts in stage.counts.items():
        print(f"{name}: {', '.join(f'{n} {what}' for what, n in counts.items())}")
    print(f"killed: {dict(stage.kills)}")
    for change in found:
        # Most tables are small, and stay as they are.
        if change.last != change.first or not change.name.startswith("table"):
            print(f"{'GREW' if change.has_grown else 'flat'} {change}")
    wrong = [f"grew: {change}" for change in found if change.has_grown] + faults(stage)
    print("\n".join(["WRONG", *wrong]) if wrong else "flat, and nothing lost or doubled")
    return 1 if wrong else 0


def main() -> int:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--leak", action="store_true")
    given = parser.parse_args()
    # What was started is stopped then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seconds = given.seconds or given.minutes * 60
    actors = [*ACTORS, *["leaker"] * given.leak]
    with (
        tempfile.TemporaryDirectory(prefix="soak") as folder,
        own_server(Path(folder), tested_binaries(), rules=RULES) as tested,
        staged(tested, Path(folder)) as stage,
    ):
        return soak(stage, seconds, actors)


if __name__ == "__main__":
    sys.exit(main())
