"""The example project's settings: safe where DEBUG is off, static files served either way."""

import os
import runpy
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from django.conf import global_settings
from django.core.management import call_command
from pytest_django import Settings

from tests.conftest import TestedServer
from tests.django.processes import ROOT, run_python
from tests.web.conftest import new_site, sites, world
from tests.web.site import Site

__all__ = ["new_site", "sites", "world"]

PRODUCTION = {
    "DEBUG": "0",
    "ALLOWED_HOSTS": "example.org",
    "SECRET_KEY": "only-a-test-but-long-enough-0123456789-abcdefghijklmnopqrstuvwxyz",
}


def test_the_checks_for_deployment_find_nothing(server: TestedServer):
    arguments = ("check", "--deploy", "--fail-level", "DEBUG", "--database", "default")
    env = {**os.environ, "DATABASE_URL": server.url(), **PRODUCTION}
    done = run_python("-W", "error", "manage.py", *arguments, env=env)
    assert "no issues" in done.stdout, done.stdout + done.stderr


NOTHING = {"PROXY": "", "PLAIN_HTTP": "", "DEBUG": "0"}
SECURE = (
    ({}, (True, True, 31536000, None)),
    ({"PROXY": "1"}, (True, True, 31536000, ("HTTP_X_FORWARDED_PROTO", "https"))),
    ({"PLAIN_HTTP": "1"}, (False, False, 0, None)),
    ({"DEBUG": "1"}, (False, False, 0, None)),
)
NAMES = (
    "SECURE_SSL_REDIRECT", "SESSION_COOKIE_SECURE", "SECURE_HSTS_SECONDS",
    "SECURE_PROXY_SSL_HEADER",
)  # fmt: skip


def test_without_debug_everything_is_https_unless_told_otherwise(server: TestedServer, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", server.url())
    for given, expected in SECURE:
        for name, value in {**PRODUCTION, **NOTHING, **given}.items():
            monkeypatch.setenv(name, value)
        found = vars(global_settings) | runpy.run_path(str(ROOT / "project/settings.py"))
        assert tuple(found[name] for name in NAMES) == expected, given


def fetch(site: Site, path: str, **headers: str) -> tuple[str | None, bytes]:
    request = urllib.request.Request(f"{site.url}{path}", headers=headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
        return response.headers["Content-Encoding"], response.read()


def test_files_are_compressed(new_site: Callable[..., Site], settings: Settings, tmp_path: Path):
    settings.STATIC_ROOT = str(tmp_path)
    call_command("collectstatic", verbosity=0, interactive=False, ignore_patterns=["admin"])
    usual = {"WHITENOISE_AUTOREFRESH": False, "WHITENOISE_USE_FINDERS": False}
    site = new_site(STATIC_ROOT=str(tmp_path), **usual)
    path = "/static/example/site.css"
    encoding, content = fetch(site, path, **{"Accept-Encoding": "gzip"})
    assert (encoding, content[:2]) == ("gzip", b"\x1f\x8b")
    assert fetch(site, path) == (None, (ROOT / "static/example/site.css").read_bytes())


def test_with_debug_static_files_are_served_from_their_folders_only(new_site: Callable[..., Site]):
    site = new_site()
    _, content = fetch(site, "/static/example/site.css")
    assert content == (ROOT / "static/example/site.css").read_bytes()
    for path in ("/static/../manage.py", "/static/%2e%2e/manage.py", "/static/", "/static/none"):
        assert site.get(path)[0] == 404
