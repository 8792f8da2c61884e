"""The machine of the benchmarks, and the versions of the programs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from project.postgres import binaries_of_wheel

PACKAGES = ("psqlmessages", "psycopg", "django", "channels", "daphne", "pyspark")


def machine() -> str:
    """Return processor, cores, memory and system in a line."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    kernel = platform.release().partition("-")[0]
    return f"{_processor()}, {os.cpu_count()} cores, {gib:.0f} GiB, {system}, kernel {kernel}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python, PostgreSQL and the main packages."""
    postgres = Path(os.environ.get("POSTGRES_BIN") or binaries_of_wheel(18)) / "postgres"
    done = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True)
    found = {"Python": platform.python_version(), "PostgreSQL": done.stdout.split()[2]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the current commit, with "+" if files were changed since; "" without git."""
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run(
        [git, "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()
