"""Processes in /proc: the Java of a driver, and the addresses on which processes listen."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event

# A short-lived Java is faster without its optimizing compiler.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Settings of a small session.
SMALL = {
    "spark.driver.memory": "1g", "spark.driver.extraJavaOptions": QUICK_JAVA,
    "spark.sql.shuffle.partitions": 1, "spark.sql.codegen.wholeStage": False,
}  # fmt: skip
FAULT = "an exchange, worker or Spark job is killed"


def until(is_so: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    for _ in range(12000):
        if is_so():
            return
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        Event().wait(0.05)
    raise AssertionError("never so")


def until_more(process: subprocess.Popen[str], done: Callable[[], int]) -> None:
    """Wait until a process does more. A killed one may have, until this one has its Java."""
    until(lambda: java_of(process.pid), process)
    before = done()
    until(lambda: done() > before, process)


def kill(process: subprocess.Popen[str], *, python: bool = True, java: bool = True) -> None:
    its_java = java_of(process.pid)
    assert its_java, "it has no Java"
    for pid, is_meant in ((its_java, java), (process.pid, python)):
        if is_meant:
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=600)
    until(lambda: not is_alive(its_java))


def java_of(parent: int) -> int:
    return next((pid for pid in _pids() if status_of(pid)[::2] == ("java", parent)), 0)


def is_alive(pid: int) -> bool:
    return status_of(pid)[1] not in ("", "Z", "X")


def status_of(pid: int) -> tuple[str, str, int]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", "", 0
    name, _, rest = text.partition("(")[2].rpartition(") ")
    state, parent = rest.split()[:2]
    return name, state, int(parent)


def addresses_listened_on(pids: Iterable[int]) -> set[str]:
    """The addresses, in the hexadecimal of /proc, where a process or its children listen."""
    family = set(pids)
    parents = {pid: status_of(pid)[2] for pid in _pids()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    sockets = {link for pid in family for link in _open_files(pid)}
    tables = (Path("/proc/self/net", table).read_text() for table in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [fields for fields in lines if fields[3] == "0A"]
    ours = [fields for fields in listening if f"socket:[{fields[9]}]" in sockets]
    return {fields[1].partition(":")[0] for fields in ours}


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _open_files(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            yield str(link.readlink())
        except FileNotFoundError:
            continue
