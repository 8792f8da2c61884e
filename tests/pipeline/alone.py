"""A driver for itself, as the tests start it: prints what it finds as one line of JSON.

python -m tests.pipeline.alone work      runs a small job where Django cannot be imported
python -m tests.pipeline.alone killed    starts Spark, and waits to be killed
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from psqlmessages.pipeline import register, session
from psqlmessages.pipeline.private import driver_folder
from psqlmessages.pipeline.spark import SparkContext, stop

CONFIGURATION: dict[str, Any] = {
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": '-Dof.the.caller="two words"',
    "spark.sql.session.timeZone": "Europe/Rome",
    "spark.ui.enabled": True,
}


def java_process() -> int:
    """The process id of this driver's Java."""
    return int(SparkContext._gateway.proc.pid)


def addresses_listened_on(pids: Iterable[int]) -> set[str]:
    """The addresses, in the hexadecimal of /proc, where a process or its children listen."""
    sockets = {link for pid in _families(set(pids)) for link in _open_sockets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def _families(pids: set[int]) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def _open_sockets(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            yield str(link.readlink())
        except FileNotFoundError:
            continue


def is_importable(name: str) -> bool:
    """Whether a module can be imported here."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def work(topic: str) -> dict[str, Any]:
    """Write to a topic and read from it; what was found on the way."""
    spark = register(session("alone", "local[1]", **CONFIGURATION))
    to_topic = {"topic": topic, "client": "pipeline"}
    spark.range(3).selectExpr("CAST(id AS string) AS body").write.format("psqlmessages").options(
        **to_topic
    ).mode("append").save()
    read = spark.read.format("psqlmessages").options(**to_topic).load()
    workers = spark.sparkContext.parallelize([0], 1).map(
        lambda _: {
            "django": is_importable("django"), "client": is_importable("psqlmessages.client"),
            "python": sys.executable, "pyspark": importlib.import_module("pyspark").__file__,
        }
    )  # fmt: skip
    system = spark._jvm.java.lang.System
    process, folder = java_process(), driver_folder()
    found: dict[str, Any] = {
        "SPARK_HOME": os.environ.get("SPARK_HOME"),
        "bodies": sorted(row.body for row in read.collect()),
        "on the driver": {"django": is_importable("django")},
        "on an executor": workers.collect()[0],
        "java": system.getProperty("java.home"),
        "of the caller": system.getProperty("of.the.caller"),
        "time zone": spark.conf.get("spark.sql.session.timeZone"),
        "addresses": sorted(addresses_listened_on({os.getpid(), process})),
        "temporary": sorted({path.name.partition("-")[0] for path in folder.iterdir()}),
    }
    stop()
    return {
        **found,
        "java goes on": Path(f"/proc/{process}").exists(),
        "folder is there": folder.exists(),
    }


def killed() -> dict[str, Any]:
    """Start Spark; who shall be killed, and what it leaves."""
    session("killed", "local[1]", **{"spark.driver.memory": "512m"})
    return {"java": java_process(), "folder": str(driver_folder())}


if __name__ == "__main__":
    if sys.argv[1] == "work":
        print(json.dumps(work(sys.argv[2])))
    else:
        print(json.dumps(killed()), flush=True)
        sys.stdin.read()
