"""Commands of the tests' project as processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from urllib.parse import urlsplit

from tests.conftest import TestedServer

ROOT = Path(__file__).parents[2]


def environment(server: TestedServer, port: int | None = None, **given: Any) -> dict[str, str]:
    """Return the environment of a process; `port` of the server, `given` keys of PSQLMESSAGES."""
    address = urlsplit(server.url())
    if port is not None:
        user, _, _ = address.netloc.rpartition("@")
        address = address._replace(netloc=f"{user}@127.0.0.1:{port}")
    return os.environ | {
        "DATABASE_URL": address.geturl(), "DJANGO_SETTINGS_MODULE": "tests.django.shop_settings",
        "SHOP_SETTINGS": json.dumps(given), "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def manage(server: TestedServer, *arguments: str, timeout: float = 110) -> CompletedProcess[str]:
    return run_python("-m", "django", *arguments, env=environment(server), timeout=timeout)


def run_python(*arguments: str, timeout: float = 110, **given: Any) -> CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT,
        capture_output=True, text=True, timeout=timeout, check=False, **given,
    )  # fmt: skip


def talking(*arguments: object, **given: Any) -> subprocess.Popen[str]:
    """Start Python; the test writes lines to it, and may read what it prints."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=ROOT, text=True, bufsize=1,
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | given,
    )  # fmt: skip


def start(
    server: TestedServer, *arguments: str, stderr: Any = subprocess.PIPE, **given: Any
) -> subprocess.Popen[str]:
    """Start a management command; `given` is for `environment`."""
    return subprocess.Popen(
        [sys.executable, "-m", "django", *arguments],
        env=environment(server, **given), cwd=ROOT, stderr=stderr, text=True,
    )  # fmt: skip
