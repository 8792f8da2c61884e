"""Spark session: finds Java, listens on 127.0.0.1 only, cleans up its temporary files."""

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

_SPARK_HOME: Final = "SPARK_HOME"


@contextmanager
def use_compiled_modules(folder: Path) -> Iterator[None]:
    """Set SPARK_HOME in the block, so that workers of a session started there start faster.

    By default, workers use Spark's archive of source files. Each worker compiles the files, which
    takes 1.4 s of the 2 s of its start. This SPARK_HOME has no archive, so workers import pyspark
    from site-packages, where Python stores compiled modules. Does nothing if SPARK_HOME is set, or
    if workers find pyspark only in the archive.
    """
    package = _find_package()
    if _SPARK_HOME in os.environ or package is None:
        yield
        return
    home = folder / "home"
    home.mkdir(exist_ok=True)
    # Link everything but the folder "python", which has the archive.
    for entry in package.iterdir():
        link = home / entry.name
        if entry.name != "python" and not link.is_symlink():
            link.symlink_to(entry)
    os.environ[_SPARK_HOME] = str(home)
    try:
        yield
    finally:
        del os.environ[_SPARK_HOME]


def _find_package() -> Path | None:
    """Return the pyspark folder if it and py4j are in the same site-packages folder."""
    package = Path(str(pyspark.__file__)).parent
    is_py4j_beside = Path(str(py4j.__file__)).parents[1] == package.parent
    site_folders = {Path(name) for name in (*site.getsitepackages(), site.getusersitepackages())}
    is_found = is_py4j_beside and package.parent in site_folders and (package / "jars").is_dir()
    return package if is_found else None


LOOPBACK: Final = "127.0.0.1"
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
# Spark gives the sockets of its Python workers such names.
SOCKET_NAME_LENGTH: Final = len("/.01234567-89ab-cdef-0123-456789abcdef.sock")
SOCKET_PATH_LIMIT: Final = 103  # The lowest limit of all platforms.

DEFAULT_SETTINGS: Final[dict[str, Any]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": True,
    # If true, Spark logs a warning if pandas is not installed.
    "spark.sql.execution.pythonUDF.arrow.enabled": False,
    # If false, Spark rejects readers that accept filters.
    "spark.sql.python.filterPushdown.enabled": True,
    # Workers cache their connections to PostgreSQL.
    "spark.python.worker.reuse": True,
    # The default class takes 75 ms more for each batch.
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
    """Return the Spark session of this process; create it if there is none.

    ``master`` is by default that of ``spark-submit``, or else ``local[*]``. ``configuration`` has
    settings of Spark: ``session(**{"spark.driver.memory": "4g"})``. Do not put secrets in it:
    everyone who can list the processes of this machine sees them. SQL settings also apply to an
    existing session. A local session listens on 127.0.0.1 only, and has no web UI unless
    ``spark.ui.enabled`` is set. Raises JavaMissing. Without pyspark, importing this function raises
    ExtraMissing.
    """
    builder = SparkSession.builder
    if SparkContext._active_spark_context is not None:
        return builder.config(map=configuration).getOrCreate()
    settings = _make_settings(master)
    if JAVA_OPTIONS in configuration and JAVA_OPTIONS in settings:
        settings[JAVA_OPTIONS] += f" {configuration.pop(JAVA_OPTIONS)}"
    settings |= configuration
    atexit.register(stop)
    # Only the workers of a local session use the Python of this environment.
    starts_local = not _is_submitted() and str(settings["spark.master"]).startswith("local")
    with use_compiled_modules(driver_folder()) if starts_local else nullcontext():
        return builder.appName(name).config(map=settings).getOrCreate()


def register(spark: SparkSession) -> SparkSession:
    """Register ``format("psqlmessages")`` for reading and writing; return the session."""
    with needs_extra():
        from psqlmessages.pipeline.data_source import MessagesSource
    spark.dataSource.register(MessagesSource)
    return spark


def stop() -> None:
    """Stop the session and its Java, if there are any, and delete their folder; called at exit."""
    atexit.unregister(stop)
    context, gateway = SparkContext._active_spark_context, SparkContext._gateway
    process = getattr(gateway, "proc", None)
    has_java_exited = process is not None and process.poll() is not None
    if context is not None and not has_java_exited:
        context.stop()
    if gateway is None or process is None:
        # There is no Java, or spark-submit stops it.
        return
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    # Java exits when its input ends.
    process.stdin.close()
    try:
        process.wait(20)
    except TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(driver_folder(), ignore_errors=True)
    driver_folder.cache_clear()


@contextmanager
def temporary_settings(spark: SparkSession, configuration: Mapping[str, str]) -> Iterator[None]:
    """Set SQL settings in the block; a query that starts in the block uses them until it ends."""
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


def _make_settings(master: str | None) -> dict[str, Any]:
    """Return the settings of a new session; set the environment variables that Spark reads."""
    if _is_submitted():
        # Connect to Java first: otherwise SparkConf() has no settings of spark-submit.
        SparkContext._ensure_initialized()
        submitted = SparkConf()
        defaults = {n: v for n, v in DEFAULT_SETTINGS.items() if not submitted.contains(n)}
        return defaults | ({"spark.master": master} if master else {})
    master = master or "local[*]"
    use_java()
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # The path on which the workers find this package.
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*paths, *site.getsitepackages(), site.getusersitepackages()):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    folder = driver_folder()
    log_file = Path(__file__).with_name("log4j2.properties")
    fits_socket = len(str(folder)) + SOCKET_NAME_LENGTH <= SOCKET_PATH_LIMIT
    settings = {
        **DEFAULT_SETTINGS,
        "spark.master": master,
        "spark.python.unix.domain.socket.enabled": fits_socket,
        # The temporary folder is also the default of spark.local.dir.
        JAVA_OPTIONS: f'"-Djava.io.tmpdir={folder}" "-Dlog4j2.configurationFile={log_file}"',
    }
    if master.startswith("local"):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        # No other setting limits the address on which Spark's web UI listens.
        os.environ["SPARK_LOCAL_IP"] = LOOPBACK
        threads = re.search(r"\[(\d+)", master)
        settings |= {
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.sql.warehouse.dir": folder / "warehouse",
            "spark.sql.shuffle.partitions": int(threads[1]) if threads else os.cpu_count() or 1,
            "spark.ui.enabled": False,
        }
    return settings
