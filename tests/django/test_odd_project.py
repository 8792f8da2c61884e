"""A project whose settings differ from most: its own tests run by `manage.py test`."""

import subprocess
import sys

from tests.conftest import TestedServer
from tests.django.processes import ROOT, environment


def test_the_tests_of_an_unusual_project_pass(server: TestedServer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "django", "test", "tests.django.odd", "--noinput"],
        env=environment(server) | {"DJANGO_SETTINGS_MODULE": "tests.django.odd.settings"},
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
