"""A site under test: Daphne as a process of its own on the test database, and its users."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.hashers import MD5PasswordHasher
from django.contrib.auth.models import Group, Permission, User
from django.contrib.sessions.backends.base import SessionBase

from psqlmessages.models import WebIdentity
from tests.conftest import TestedServer

ROOT = Path(__file__).parents[2]
PASSWORD = "a password of the tests"
# Django logs one of these if a browser disconnects while a request ends.
DISCONNECTED = re.compile(
    r"Task exception was never retrieved\nfuture: .*listen_for_disconnect"
    r".*\n(.*\n)+?.*RequestAborted"
    r"|CurrentThreadExecutor already quit or is broken\nTraceback"
    r".*\n(.*\n)+?.*request_finished\.asend.*\n(.*\n)+?RuntimeError: CurrentThreadExecutor"
)
FAULTS = (
    "Traceback (most recent call last)", "Unhandled", "was never awaited", "never retrieved",
    "was destroyed",
)  # fmt: skip
SERVERS = {
    "daphne": ("daphne", "--websocket_connect_timeout=60", "--fd={}"),
    "uvicorn": ("uvicorn", "--fd={}"),
    "gunicorn": ("gunicorn", "--worker-class=uvicorn_worker.UvicornWorker", "--bind=fd://{}"),
}


class Site:
    """A server process; `given` are Django settings, and SERVER, one of `SERVERS`."""

    def __init__(self, server: TestedServer, folder: Path, given: Mapping[str, Any]) -> None:
        self._server = server
        self._given = given
        self._log = folder / f"daphne-{len(list(folder.iterdir()))}.log"
        self._log_read = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the site was not started"
        return self.process.pid

    def start(self) -> None:
        # The socket listens before the process runs, so no port is guessed.
        with socket.create_server(("127.0.0.1", self.port), backlog=2048) as listening:
            self.port = listening.getsockname()[1]
            with self._log.open("ab") as log:
                command = SERVERS[self._given.get("SERVER", "daphne")]
                options = [part.format(listening.fileno()) for part in command]
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *options, "project.asgi:application"],
                    env=self._environment(), cwd=ROOT, stdout=log, stderr=log,
                    pass_fds=[listening.fileno()],
                )  # fmt: skip
        try:
            self.get("/there-is-nothing/")
        except OSError as error:
            raise AssertionError(f"the site did not start: {error}\n{self.log()}") from error

    def ask_to_stop(self) -> None:
        """Send SIGTERM; `ended` waits for the end."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        self.ask_to_stop()
        self.ended()

    def ended(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the site did not stop:\n{self.log()}") from None

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DATABASE_URL": self._server.url(),
            "DJANGO_SETTINGS_MODULE": "tests.web.site_settings",
            "SITE_SETTINGS": json.dumps(self._given),
            # The cookies that tests make are signed by the tests.
            "SECRET_KEY": settings.SECRET_KEY,
            "PYTHONUNBUFFERED": "1",
        }

    def log(self) -> str:
        return self._log.read_text()[self._log_read :]

    def forget_log(self) -> None:
        """Ignore the log of earlier tests."""
        if self._log.exists():
            self._log_read = len(self._log.read_text())

    def faults(self) -> list[str]:
        log = DISCONNECTED.sub("", self.log())
        return [line for line in log.splitlines() if any(fault in line for fault in FAULTS)]

    def get(self, path: str, *, cookie: str = "") -> tuple[int, str]:
        headers = {"Cookie": f"{settings.SESSION_COOKIE_NAME}={cookie}"} if cookie else {}
        request = urllib.request.Request(self.url + path, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=100) as response:  # noqa: S310
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    # Its users

    def user(
        self, username: str, *, idents: Iterable[str] = (), groups: Iterable[str] = (),
        permissions: Iterable[str] = (), **fields: Any,
    ) -> User:  # fmt: skip
        """Make a user, or find the one of that name; the password is `PASSWORD`.

        `idents`: the nodes the user may be. `permissions`: "psqlmessages.view_monitor".
        """
        user = User.objects.filter(username=username).first()
        if user is None:
            # With the one hasher that the site knows: it could not check another's. A log-in would
            # hash anew with a shorter salt, which ends the user's other sessions.
            password = MD5PasswordHasher().encode(PASSWORD, "saltsaltsaltsaltsaltsalt")
            user = User.objects.create(username=username, password=password, **fields)
        for ident in idents:
            WebIdentity.objects.get_or_create(user=user, ident=ident)
        for name in groups:
            user.groups.add(Group.objects.get_or_create(name=name)[0])
        for permission in permissions:
            app, _, name = permission.partition(".")
            found = Permission.objects.get(content_type__app_label=app, codename=name)
            user.user_permissions.add(found)
        return user

    def login(self, username: str) -> str:
        """Log a user in; return the value of the session's cookie."""
        user = self.user(username)
        session = new_session()
        session[SESSION_KEY] = str(user.pk)
        backends = self._given.get("AUTHENTICATION_BACKENDS", settings.AUTHENTICATION_BACKENDS)
        session[BACKEND_SESSION_KEY] = backends[0]
        session[HASH_SESSION_KEY] = user.get_session_auth_hash()
        session.save()
        assert session.session_key
        return session.session_key

    def logout(self, cookie: str) -> None:
        new_session(cookie).flush()

    def forget_users(self) -> None:
        with contextlib.suppress(NotImplementedError):
            new_session().clear_expired()
        for model in (User, Group):
            model.objects.all().delete()


def new_session(cookie: str | None = None) -> SessionBase:
    return import_module(settings.SESSION_ENGINE).SessionStore(cookie)
