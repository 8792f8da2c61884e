"""A project whose settings differ from most: its own tests run by `manage.py test`."""

from tests.conftest import TestedServer
from tests.django.processes import environment, run_python


def test_the_tests_of_an_unusual_project_pass(server: TestedServer) -> None:
    env = environment(server) | {"DJANGO_SETTINGS_MODULE": "tests.django.odd.settings"}
    done = run_python("-m", "django", "test", "tests.django.odd", "--noinput", env=env)
    assert done.returncode == 0, done.stderr
