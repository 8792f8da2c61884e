"""Steady streaming: does the job traffic keep up, and do its memory and checkpoint stay small?

python -m benchmarks.pipeline_steady [--minutes 30] [--rate 5000]

A process publishes messages of two senders to three topics, 100 in each call. Another process, the
job `pipeline traffic`, counts them. Each minute prints the published and uncounted messages, the
lag, the memory of Java, the driver and the workers, and the size of the checkpoint.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Event as Pause
from time import monotonic, perf_counter

import psycopg

from benchmarks.servers import ROOT, temporary_server

PAIRS = [(f"SENDER{sender}", f"TOPIC{topic}") for sender in range(2) for topic in range(3)]
BATCH = 100
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        ('psqlmessages', 'SENDER*', 'Topic', 'TOPIC*', 'W', 5),
        ('psqlmessages', 'pipeline.*', 'Topic', '*', 'R', 5),
        ('psqlmessages', 'pipeline.*', 'Topic', 'TOPIC0', 'R', 5),
        ('psqlmessages', 'pipeline.*', 'Topic', 'TOPIC1', 'R', 5),
        ('psqlmessages', 'pipeline.*', 'Topic', 'TOPIC2', 'R', 5)
"""
# A subscription that stores messages until the job reads for the first time.
SUBSCRIBE = "SELECT messages.subscribe('pipeline.keep', %s, 600)"
PUBLISH = """
    SELECT messages.publish_many(%s, %s, ARRAY(
        SELECT repeat('x', floor(random() * 400)::int) FROM generate_series(1, %s)
    ))
"""
COUNTED = """
    SELECT coalesce((
        SELECT sum(count) FROM psqlmessages_traffic WHERE window_seconds = 3600
    ), 0), (SELECT count(*) FROM psqlmessages_traffic),
        coalesce(max(j.state), 'not begun'), coalesce(max(j.lag_seconds), 0),
        coalesce(max(j.last_batch), -1)
    FROM psqlmessages_pipelinejob AS j WHERE j.name = 'traffic'
"""
MIB = 1024 * 1024


@dataclass(frozen=True)
class JobSize:
    """MiB of memory of Java, the driver, and all workers; MiB and files of the checkpoint."""

    java: float
    driver: float
    workers: float
    checkpoint: float
    files: int


def publish(url: str, rate: int, must_stop: Event, count: multiprocessing.Value) -> None:  # type: ignore[valid-type]
    """Publish at a rate until stopped; if it was late, publish faster."""
    begun, done = perf_counter(), 0
    with psycopg.connect(url, autocommit=True) as connection:
        while not must_stop.is_set():
            wait = begun + done / rate - perf_counter()
            if wait > 0:
                must_stop.wait(wait)
            connection.execute(PUBLISH, (*PAIRS[done // BATCH % len(PAIRS)], BATCH))
            done += BATCH
            count.value = done  # type: ignore[attr-defined]


@contextmanager
def job(url: str, checkpoint: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the job `traffic`."""
    with log.open("wb") as lines:
        process = subprocess.Popen(
            [
                *(sys.executable, "manage.py", "psqlmessages", "pipeline", "traffic"),
                *("--master", "local[2]", "--checkpoint", checkpoint),
            ],
            env={**os.environ, "DATABASE_URL": url},
            cwd=ROOT,
            stderr=lines,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def measure_job(driver: int, checkpoint: str) -> JobSize:
    """Measure the processes of a job and its checkpoint."""
    parents = {pid: parent for pid, (parent, _) in processes().items()}
    names = {pid: name for pid, (_, name) in processes().items()}

    def is_descendant(pid: int) -> bool:
        while pid in parents:
            if pid == driver:
                return True
            pid = parents[pid]
        return False

    children = [pid for pid in parents if is_descendant(pid) and pid != driver]
    java = [pid for pid in children if names.get(pid) == "java"]
    files = [entry.stat().st_size for entry in Path(checkpoint).rglob("*") if entry.is_file()]
    return JobSize(
        sum(map(memory, java)),
        memory(driver),
        sum(memory(pid) for pid in children if pid not in java),
        sum(files) / MIB,
        len(files),
    )


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the name of every process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(") ")
        except OSError:
            continue
        found[int(entry.name)] = (int(rest.split()[1]), name)
    return found


def memory(pid: int) -> float:
    """Return the MiB of a process in memory, with its share of shared pages; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    line = next(line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) / 1024


def print_progress(
    url: str, driver: subprocess.Popen[bytes], options: argparse.Namespace, count: object
) -> None:
    """Print a line each minute."""
    pause, begun = Pause(), monotonic()
    with psycopg.connect(url, autocommit=True) as connection:
        for minute in range(1, round(options.minutes) + 1):
            pause.wait(max(begun + minute * 60 - monotonic(), 0))
            if driver.poll() is not None:
                print(f"the job has ended with {driver.returncode}")
                return
            published = count.value  # type: ignore[attr-defined]
            counted, windows, state, lag, batch = connection.execute(COUNTED).fetchone()  # type: ignore[misc]
            now = measure_job(driver.pid, options.checkpoint)
            print(
                f"{minute:3} min {published:11,} published {published - counted:9,} behind"
                f" {state} lag {lag:5.1f} s batch {batch:6,} {windows:7,} windows"
                f" java {now.java:6.0f} driver {now.driver:5.0f} workers {now.workers:5.0f} MiB"
                f" checkpoint {now.checkpoint:6.2f} MiB {now.files:5} files",
                flush=True,
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=int, default=5000)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    must_stop, count = context.Event(), context.Value("q", 0)
    with temporary_server() as server, tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        options.checkpoint = str(Path(folder) / "checkpoint")
        with psycopg.connect(server.url(), autocommit=True) as owner:
            owner.execute(RULES)
            for topic in {topic for _, topic in PAIRS}:
                owner.execute(SUBSCRIBE, (topic,))
        publisher = context.Process(
            target=publish, args=(server.url(), options.rate, must_stop, count), daemon=True
        )
        publisher.start()
        log = Path(folder) / "job.log"
        with job(server.url(), options.checkpoint, log) as driver:
            print_progress(server.url(), driver, options, count)
            must_stop.set()
            publisher.join()
        print("\n".join(log.read_text().splitlines()[-5:]))


if __name__ == "__main__":
    main()
