"""`make run`: PostgreSQL, migrations, the demonstration, and the server, until Ctrl-C.

PORT    the port to serve on; without it 8000, or another where that is taken
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NoReturn

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command

ROOT = Path(__file__).resolve().parent.parent
HOST, USUAL_PORT = "127.0.0.1", 8000
# After this long, children that were asked to end are killed.
PATIENCE_SECONDS = 30
LOOK_SECONDS = 0.2
START_SECONDS = 60


class Unable(Exception):
    """Why it cannot go on, as a sentence."""


def main() -> int:
    """Serve until Ctrl-C; return the exit code: 0 after Ctrl-C, 1 where it could not go on."""
    # Whoever starts programs in the background may have left Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        with foreground():
            _run()
    except KeyboardInterrupt:
        print("\nEnded. PostgreSQL goes on; make stop ends it.")
    except (Unable, ImproperlyConfigured) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


@contextmanager
def foreground() -> Iterator[None]:
    """Take the terminal, if there is one: Ctrl-C then reaches us, and not make: it would fail."""
    terminal = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
    former = os.getpgrp()
    if terminal < 0 or os.tcgetpgrp(terminal) != former:
        yield
        return
    # Giving the terminal back happens from the background, which SIGTTOU would stop; and nobody
    # would notice that we were stopped by Ctrl-Z.
    for number in (signal.SIGTTOU, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    if os.getpid() != former:
        os.setpgid(0, 0)
        os.tcsetpgrp(terminal, os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(terminal, former)


def _run() -> None:
    print("Starting PostgreSQL ...", flush=True)
    password = bring_up()
    with Children() as children:
        server, address = _start_server(children)
        traffic = _start_demo(children)
        _wait_for_answer(server, address)
        exchanges = _start_exchanges(children)
        _invite(address, password)
        _watch(server, {"The live traffic": traffic, **exchanges})


def bring_up() -> str | None:
    """Bring the database up to date. Return the administrator's password, if we know it."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    from django.conf import settings

    from project.example import prepare

    call_command("migrate", verbosity=0)
    if not settings.DEBUG:
        call_command("collectstatic", verbosity=0, interactive=False)
    return prepare(ROOT / ".admin_password")


def _listening_socket() -> socket.socket:
    """Listen where PORT says; else on the usual port or, where that is taken, on a free one."""
    if given := os.environ.get("PORT", ""):
        if not given.isdecimal() or not 0 < int(given) < 2**16:
            raise Unable(f"Cannot serve on PORT={given}: that is no port")
        try:
            return socket.create_server((HOST, int(given)))
        except OSError as error:
            raise Unable(f"Cannot serve on PORT={given}: {error}") from error
    try:
        return socket.create_server((HOST, USUAL_PORT))
    except OSError:
        print(f"Port {USUAL_PORT} is taken, so this is another one: see below.")
        return socket.create_server((HOST, 0))


class Children:
    """Processes of ours that end with us. Ctrl-C reaches us alone, and we end them."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Children":
        return self

    def start(
        self,
        module: str,
        *arguments: str,
        pass_fds: list[int] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        variables: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a module of Python's."""
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **(variables or {})}, cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=stdout, stderr=stderr, text=True, pass_fds=pass_fds or [], process_group=0,
        )  # fmt: skip
        self._running.append(child)
        return child

    def __exit__(self, *_: object) -> None:
        # It ends soon; a second Ctrl-C would only leave something behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        deadline = monotonic() + PATIENCE_SECONDS
        for child in self._running:
            child.send_signal(signal.SIGINT)
        for child in self._running:
            try:
                child.wait(max(0, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                print(f"Process {child.pid} did not end, and is killed.", file=sys.stderr)
                child.kill()
                child.wait()


def _start_server(children: Children) -> tuple[subprocess.Popen[str], str]:
    """Start Daphne on a socket that listens already; return it and its address."""
    with _listening_socket() as listening:
        descriptor, port = listening.fileno(), listening.getsockname()[1]
        server = children.start(
            *("daphne", "-v", "0", "--fd", str(descriptor), "project.asgi:application"),
            pass_fds=[descriptor],
        )
    return server, f"http://{HOST}:{port}/"


def _start_demo(children: Children) -> subprocess.Popen[str]:
    """Start the demonstration; return once its conversation is over and its traffic begins."""
    from psqlmessages.cli.demo_traffic import FOLLOWS
    from psqlmessages.orm import dsn

    print("A conversation of two nodes (python manage.py psqlmessages demo shows every word):")
    demo = children.start(
        *("psqlmessages.cli", "demo", "--brief", "--traffic"),
        stdout=subprocess.PIPE,
        variables={"PSQLMESSAGES_DSN": dsn()},
    )
    assert demo.stdout is not None  # noqa: S101 - a pipe was asked for
    for line in demo.stdout:
        if line.startswith(FOLLOWS):
            break
        print(f"  {line}" if line.strip() else "", end="", flush=True)
    return demo


def _start_exchanges(children: Children) -> dict[str, subprocess.Popen[str]]:
    """Start the process that runs the exchanges, and the one that gives them something to do."""
    from psqlmessages.orm import dsn

    # The one tells how fast it is, the other that Ctrl-C came while it was starting.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    runner = children.start("django", "psqlmessages", "exchange", "run", **quiet)
    shop = children.start("project.orders", variables={"PSQLMESSAGES_DSN": dsn()}, **quiet)
    return {"What runs the exchanges": runner, "The shop that feeds them": shop}


def _wait_for_answer(server: subprocess.Popen[str], address: str) -> None:
    """Wait until the server answers, whatever it answers; raise Unable where it does not start."""
    try:
        with urllib.request.urlopen(f"{address}healthz", timeout=START_SECONDS):  # noqa: S310
            pass
    except urllib.error.HTTPError as answer:
        answer.close()
    except OSError as error:
        raise Unable(f"The server does not answer ({error}); code {server.poll()}.") from error


def _invite(address: str, password: str | None) -> None:
    shown = password or "the one you chose (python manage.py changepassword admin)"
    print(
        f"\n  address   {address}\n  user      admin\n  password  {shown}\n\nCtrl-C ends it.",
        flush=True,
    )


def _watch(server: subprocess.Popen[str], others: dict[str, subprocess.Popen[str]]) -> NoReturn:
    """Say so where another child ends by itself; raise Unable where the server does."""
    pause, running = threading.Event(), dict(others)
    while True:
        if server.poll() is not None:
            raise Unable(f"The server has ended by itself, with code {server.returncode}.")
        for name, child in list(running.items()):
            if child.poll() is not None:
                del running[name]
                text = f"{name} has ended, with code {child.returncode}; the pages go on."
                print(text, file=sys.stderr, flush=True)
        pause.wait(LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
