"""Commands of the tests' project as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import TestedServer

ROOT = Path(__file__).parents[2]


def environment(server: TestedServer) -> dict[str, str]:
    """What a process needs to use the test database with the tests' project."""
    return {
        **os.environ,
        "DATABASE_URL": server.url(),
        "DJANGO_SETTINGS_MODULE": "tests.django.shop_settings",
        "PYTHONWARNINGS": "error",
        "PYTHONUNBUFFERED": "1",
    }


def manage(
    server: TestedServer, *arguments: str, timeout: float = 110
) -> subprocess.CompletedProcess[str]:
    """Run a management command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "django", *arguments],
        env=environment(server), cwd=ROOT,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def start(server: TestedServer, *arguments: str) -> subprocess.Popen[str]:
    """Start a management command."""
    return subprocess.Popen(
        [sys.executable, "-m", "django", *arguments],
        env=environment(server), cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
