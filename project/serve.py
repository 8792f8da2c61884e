"""`make run`: PostgreSQL, migrations, the demo, the exchanges and the web server, until Ctrl-C.

PORT    the port of the web server; without it 8000, or another port if 8000 is in use
"""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command

from project.postgres import embedded
from project.postgres.home import Home

ROOT = Path(__file__).resolve().parent.parent
HOST, DEFAULT_PORT = "127.0.0.1", 8000
# Child processes that run for longer than this after SIGINT are killed.
STOP_SECONDS = 30
POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_SECONDS = 60


class ServeError(Exception):
    """`make run` cannot start or continue; the text is the reason."""


def main() -> int:
    """Serve until Ctrl-C; return the exit code: 0 after Ctrl-C, 1 after an error."""
    # A shell that starts this process in the background may let it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, lambda number, _: sys.exit(128 + number))
    try:
        with take_terminal():
            _run()
    except KeyboardInterrupt:
        print("\nStopped. PostgreSQL is still running: make stop stops it.")
    except (ServeError, ImproperlyConfigured) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@contextmanager
def take_terminal() -> Iterator[None]:
    """Make this process the terminal's foreground process group, if it runs in a terminal.

    Ctrl-C then sends SIGINT to this process only. Otherwise make would get SIGINT too, and fail.
    """
    terminal = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
    original_group = os.getpgrp()
    try:
        foreground_group = os.tcgetpgrp(terminal)
    except OSError:  # no terminal, or the terminal of another session, as in `su -c`
        foreground_group = -1
    if foreground_group != original_group:
        yield
        return
    # SIGTTOU would stop this process when it gives the terminal back. If Ctrl-Z stopped it, the
    # shell would not notice, because make continues to run.
    for signal_number in (signal.SIGTTOU, signal.SIGTSTP):
        signal.signal(signal_number, signal.SIG_IGN)
    if os.getpid() != original_group:
        os.setpgid(0, 0)
        os.tcsetpgrp(terminal, os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(terminal, original_group)


def _run() -> None:
    print("Starting PostgreSQL ...", flush=True)
    started_at = datetime.now().astimezone()
    password = prepare_database()
    if not os.environ.get("DATABASE_URL"):
        print(describe_data(embedded().home, started_at))
    with ChildProcesses() as children:
        server, address = _start_server(children)
        traffic = _start_demo(children)
        _wait_until_answering(server, address)
        exchanges = _start_exchanges(children)
        _print_login(address, password)
        _watch(server, {"The live traffic": traffic, **exchanges})


def prepare_database() -> str | None:
    """Migrate the database and create the example's data; without DEBUG, collect static files.

    Return the administrator's password; None if it was changed or the user is not active.
    """
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    from django.conf import settings

    from project.example import create_example_data

    call_command("migrate", verbosity=0)
    if not settings.DEBUG:
        call_command("collectstatic", verbosity=0, interactive=False)
    return create_example_data(ROOT / ".admin_password")


def describe_data(home: Home, started_at: datetime) -> str:
    """Return a line with the data folder. It says whether an earlier run created the data.

    The data folder may be outside this project. It then stays if the project's folder is deleted.
    """
    if home.created_at > started_at:
        return f"Data: new, in {home.data}"
    return (
        f"Data: of an earlier run, created {home.created_at:%Y-%m-%d %H:%M %Z}, in {home.data};"
        " to delete them: make clean"
    )


def _listening_socket() -> socket.socket:
    """Listen on PORT. If PORT is not set, listen on the default port, or else on any free port."""
    if port := os.environ.get("PORT", ""):
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ServeError(f"Cannot serve on PORT={port}: use a number from 1 to 65535")
        try:
            return socket.create_server((HOST, int(port)))
        except OSError as error:
            raise ServeError(f"Cannot serve on PORT={port}: {error}") from error
    try:
        return socket.create_server((HOST, DEFAULT_PORT))
    except OSError:
        print(f"Port {DEFAULT_PORT} is in use. Using another port: see the address below.")
        return socket.create_server((HOST, 0))


class ChildProcesses:
    """Child processes: the end of the context stops them. The terminal's Ctrl-C does not."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "ChildProcesses":
        return self

    def start(
        self, module: str, *arguments: str, environment: Mapping[str, str] = {}, **options: Any
    ) -> subprocess.Popen[str]:
        """Run a Python module in a new process group; add ``environment`` to the variables."""
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment}, cwd=ROOT, stdin=subprocess.DEVNULL,
            text=True, process_group=0, **options,
        )  # fmt: skip
        self._running.append(child)
        return child

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C would end this process before all children have stopped.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        deadline = monotonic() + STOP_SECONDS
        for child in self._running:
            child.send_signal(signal.SIGINT)
        for child in self._running:
            try:
                child.wait(max(0, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                print(f"Process {child.pid} did not stop, and is killed.", file=sys.stderr)
                child.kill()
                child.wait()


def _start_server(children: ChildProcesses) -> tuple[subprocess.Popen[str], str]:
    """Start Daphne with a listening socket of this process; return Daphne's process and URL."""
    with _listening_socket() as listening:
        descriptor, port = listening.fileno(), listening.getsockname()[1]
        server = children.start(
            *("daphne", "-v", "0", "--fd", str(descriptor), "project.asgi:application"),
            pass_fds=[descriptor],
        )
    return server, f"http://{HOST}:{port}/"


def _start_demo(children: ChildProcesses) -> subprocess.Popen[str]:
    """Start the demo, and print its conversation; return its process when its traffic begins."""
    from psqlmessages.cli.demo_traffic import STARTED_TEXT
    from psqlmessages.orm import database_dsn

    print("A conversation of two nodes (in full: .venv/bin/python manage.py psqlmessages demo):")
    demo = children.start(
        *("psqlmessages.cli", "demo", "--brief", "--traffic"),
        stdout=subprocess.PIPE,
        environment={"PSQLMESSAGES_DSN": database_dsn()},
    )
    assert demo.stdout is not None  # noqa: S101 - stdout is a pipe
    for line in demo.stdout:
        if line.startswith(STARTED_TEXT):
            break
        print(f"  {line}" if line.strip() else "", end="", flush=True)
    return demo


def _start_exchanges(children: ChildProcesses) -> dict[str, subprocess.Popen[str]]:
    """Start the exchange worker and the shop; return the processes by their descriptions."""
    from psqlmessages.orm import database_dsn

    # Discard the output: it has rates, and a traceback if Ctrl-C interrupts an import.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    worker = children.start("django", "psqlmessages", "exchange", "run", **quiet)
    shop = children.start(
        "project.orders", environment={"PSQLMESSAGES_DSN": database_dsn()}, **quiet
    )
    return {"The exchange worker": worker, "The shop, which pushes orders,": shop}


def _wait_until_answering(server: subprocess.Popen[str], address: str) -> None:
    """Wait until the server answers with any status; raise ServeError if there is no answer."""
    try:
        with urllib.request.urlopen(f"{address}healthz", timeout=START_SECONDS):  # noqa: S310
            pass
    except urllib.error.HTTPError as answer:
        answer.close()
    except OSError as error:
        code = server.poll()
        raise ServeError(f"The web server does not answer: {error}; exit code {code}.") from error


def _print_login(address: str, password: str | None) -> None:
    shown = password or (
        "set earlier, and not stored here; to set a new one: .venv/bin/python manage.py"
        " changepassword admin"
    )
    print(f"\n  address   {address}\n  user      admin\n  password  {shown}\n")
    print("Press Ctrl-C to stop.", flush=True)


def _watch(server: subprocess.Popen[str], others: dict[str, subprocess.Popen[str]]) -> NoReturn:
    """Wait until the server ends, then raise ServeError; report other processes that end."""
    running = dict(others)
    while True:
        # An exception of a signal's handler in poll() could leave a lock of subprocess locked, so
        # that wait() never returns.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if server.poll() is not None:
            raise ServeError(f"The web server has ended with exit code {server.returncode}.")
        for name, child in list(running.items()):
            if child.poll() is not None:
                del running[name]
                text = f"{name} has ended with exit code {child.returncode}; the pages still work."
                print(text, file=sys.stderr, flush=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
