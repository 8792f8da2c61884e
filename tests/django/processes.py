"""Commands of the tests' project as processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.conftest import TestedServer

ROOT = Path(__file__).parents[2]


def environment(server: TestedServer, port: int | None = None, **given: Any) -> dict[str, str]:
    """What a process needs to use the test database with the tests' project.

    `port`: where the server is reached instead; `given`: keys of PSQLMESSAGES.
    """
    address = urlsplit(server.url())
    if port is not None:
        user, _, _ = address.netloc.rpartition("@")
        address = address._replace(netloc=f"{user}@127.0.0.1:{port}")
    return {
        **os.environ,
        "DATABASE_URL": address.geturl(),
        "SHOP_SETTINGS": json.dumps(given),
        "DJANGO_SETTINGS_MODULE": "tests.django.shop_settings",
        "PYTHONWARNINGS": "error",
        "PYTHONUNBUFFERED": "1",
    }


def manage(
    server: TestedServer, *arguments: str, timeout: float = 110
) -> subprocess.CompletedProcess[str]:
    """Run a management command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "django", *arguments], env=environment(server), cwd=ROOT,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def start(server: TestedServer, *arguments: str, **given: Any) -> subprocess.Popen[str]:
    """Start a management command; `given` is for `environment`."""
    return subprocess.Popen(
        [sys.executable, "-m", "django", *arguments],
        env=environment(server, **given), cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
