"""Python is killed while its Java starts: that Java does not stay."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import pytest

from tests.reliability.counts import counted

pytest.importorskip("pyspark")

MARK = "PSQLMESSAGES_ORPHAN_OF"
STARTING = "from psqlmessages.pipeline import session; session()"
SECONDS = 180


def children(mark: str) -> list[tuple[int, bytes]]:
    """The processes that have inherited a mark: pid and command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
        except OSError:
            continue
    return found


def is_java(command: bytes) -> bool:
    return b"org.apache.spark.deploy.SparkSubmit" in command


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_a_java_whose_python_was_killed_as_it_started_ends(tmp_path: Path) -> None:
    mark = f"{MARK}={tmp_path}"
    python = subprocess.Popen(
        [sys.executable, "-c", STARTING],
        env={**os.environ, MARK: str(tmp_path)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    pause, deadline = threading.Event(), monotonic() + SECONDS
    try:
        while not any(is_java(command) for _, command in children(mark)):
            assert monotonic() < deadline, "Java did not start"
            assert python.poll() is None, "Python has ended"
            pause.wait(0.01)
    finally:
        python.kill()
        python.wait()
    killed_at = monotonic()
    while (left := children(mark)) and monotonic() < killed_at + SECONDS:
        pause.wait(0.05)
    for pid, _ in left:
        os.kill(pid, 9)
    counted(
        "an exchange, worker or Spark job is killed", "Python, as its Java starts",
        kills=1, javas_left=len(left), ended_after_seconds=monotonic() - killed_at,
    )  # fmt: skip
    assert left == []
