"""manage.py psqlmessages run: a process that handles messages until a signal ends it."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest
from daphne.cli import CommandLineInterface
from django.contrib.auth.models import Group
from django.core.management import CommandError, ManagementUtility, call_command

from psqlmessages import Node
from psqlmessages.exceptions import CalleeGone, CallTimeout, NotConnected
from tests.client.proxy import Proxy
from tests.conftest import installed
from tests.django.processes import ROOT, manage, run_python, start
from tests.django.shop import WORK
from tests.django.waiting import answer_to, wait_until
from tests.reliability.counts import report, size
from tests.sql.conftest import Program, World

# Python's own clean-up takes longer than STOP_SECONDS.
SLOW_EXIT = """
import atexit, signal, time
from psqlmessages.shutdown import stop_on_signals
atexit.register(time.sleep, 2)
with stop_on_signals(lambda: None, "batch", 1):
    signal.raise_signal(signal.SIGTERM)
"""
IMAGES = ("compose.yaml", "Dockerfile")
BLOCKED = "SELECT count(*) = %s FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def test_the_units_are_valid_and_all_deployed_commands_exist(tmp_path: Path):
    bins, units = str(Path(sys.executable).parent), (ROOT / "deploy/systemd").iterdir()
    for unit in units:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/srv/shop/.venv/bin", bins))
    copies = list(tmp_path.iterdir())
    files = (*copies, *(ROOT / "deploy/kubernetes").iterdir(), *map(ROOT.joinpath, IMAGES))
    text = "\n".join(file.read_text() for file in files)
    commands = [*map(shlex.split, re.findall(r"^ExecStart=(.*)", text, re.MULTILINE))]
    commands += map(json.loads, re.findall(r"(?:args:|command:|CMD) (\[.*\])", text))
    for program, first, *words in commands:
        if first == "manage.py":
            command = ManagementUtility().fetch_command(words[0])
            command.create_parser(first, words[0]).parse_args(words[1:])
        elif program.endswith("daphne"):
            CommandLineInterface().parser.parse_args([first, *words])
    assert len(commands) == 12
    verify = [installed("systemd-analyze"), "verify", *copies]
    assert subprocess.check_output(verify, stderr=subprocess.STDOUT, timeout=60) == b""


def test_deployed_settings_read_the_secret_of_kubernetes(monkeypatch):
    settings: dict[str, Any] = {"DATABASES": {"default": {}}}
    secret = (ROOT / "docs/how-to/kubernetes.md").read_text()
    for name in re.findall(r"--from-literal=(\w+)=", secret):
        monkeypatch.setenv(name, f"<{name}>")
    code = (ROOT / "docs/how-to/systemd.md").read_text().split("```")[1].removeprefix("python\n")
    exec(code, settings)  # noqa: S102 - the page is ours
    assert settings["DATABASES"]["default"]["PASSWORD"] == "<DATABASE_PASSWORD>"


def test_an_orderly_stop_is_a_success_however_long_python_takes_to_exit():
    done = run_python("-c", SLOW_EXIT)
    assert done.returncode == 0
    assert done.stderr == "Stopping after the current batch. Press Ctrl-C again to stop now.\n"


@pytest.fixture
def work(shop: World) -> Program:
    """A program whose lock lets the handlers wait."""
    holder = shop.superuser()
    holder.query("SELECT pg_advisory_lock(%s)", WORK)
    return holder


@contextmanager
def started(shop: World, *options: str, **given: Any) -> Iterator[subprocess.Popen[str]]:
    process = start(shop.server, "psqlmessages", "run", "worker", *options, **given)
    try:
        said = process.stderr.readline()
        assert said == "worker has 2 handlers, listens to ORDERS; press Ctrl-C to stop\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal, and wait until the process has taken it."""
    process.send_signal(number)
    assert "Stopping after the current messages" in process.stderr.readline()


def test_a_signal_ends_the_worker_after_its_message(shop: World, sender: Program, work: Program):
    with started(shop) as worker:
        # Meanwhile an RPC is answered, and another message waits.
        sender.ok("rpc", "worker", "ticket", "hello")
        assert answer_to(sender)["Body"] == "you said hello"
        sender.ok("topic_send", "ORDERS", "current")
        shop.wait_for(BLOCKED, 1)
        sender.ok("topic_send", "ORDERS", "too late")
        interrupt(worker, signal.SIGTERM)
        work.query("SELECT pg_advisory_unlock(%s)", WORK)
        _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0, said
    assert [group.name for group in Group.objects.all()] == ["current"]
    assert "handled 2 in" in said
    assert shop.owner.query("SELECT count(*) FROM psqlmessages_client WHERE ident = 'worker'") == 0


@pytest.mark.parametrize(
    ("options", "given"), [(("--concurrency", "2"), {}), ((), {"HANDLER_CONCURRENCY": 2})]
)
def test_two_messages_are_handled_at_once_and_a_second_signal_ends_both(
    shop: World, sender: Program, work: Program, options: tuple[str, ...], given: dict
):
    with started(shop, *options, **given) as worker:
        sender.ok("topic_send", "ORDERS", "one")
        sender.ok("topic_send", "ORDERS", "two")
        shop.wait_for(BLOCKED, 2)
        interrupt(worker, signal.SIGINT)
        worker.send_signal(signal.SIGINT)
        _, said = worker.communicate(timeout=60)
    assert worker.returncode == 130, said
    assert "Traceback" not in said
    assert Group.objects.count() == 0


def test_a_worker_survives_a_firewall(shop: World, sender: Program, work: Program, proxy: Proxy):
    """A firewall drops the packets of existing connections; new ones work."""
    quick = {} if size(0, 1) else {"ANSWER_SECONDS": 1}
    with started(shop, port=proxy.port, **quick):
        sender.ok("topic_send", "ORDERS", "cut")
        shop.wait_for(BLOCKED, 1)
        proxy.stall(new=True)
        cut_at = monotonic()
        Event().wait(size(1, 15))
        proxy.forget()
        work.query("SELECT pg_advisory_unlock(%s)", WORK)
        # The handler's lost session got the lock: it must end first.
        wait_until(lambda: Group.objects.filter(name="cut").count() == 1)
        took = {"handled_after_seconds": monotonic() - cut_at}
        if size(0, 1):
            sender.ok("deinit", "ASKER")
            with Node("ASKER", shop.server.url("user2")) as asker:
                answer = None
                while answer is None:
                    # Until the node has returned it looks alive.
                    with suppress(CallTimeout, CalleeGone, NotConnected):
                        answer = asker.call("worker", "again", timeout=timedelta(seconds=1))
            assert answer == "you said again"
            took["answered_after_seconds"] = monotonic() - cut_at
    report("a firewall drops connections", "`run`, during a query of a handler", **took)
    assert max(took.values()) < 60


def test_a_signal_ends_it_in_time_with_a_busy_handler(shop: World, sender: Program, work: Program):
    with started(shop, STOP_SECONDS=size(2, 8)) as worker:
        sender.ok("topic_send", "ORDERS", "for ever")
        shop.wait_for(BLOCKED, 1)
        interrupt(worker, signal.SIGTERM)
        began = monotonic()
        _, said = worker.communicate(timeout=60)
        seconds = monotonic() - began
    report(
        "a firewall drops connections",
        "`run`: time to end after SIGTERM, during a query of a handler", seconds=seconds,
    )  # fmt: skip
    assert seconds < 10
    assert worker.returncode == 1
    assert "message_handlers.py" in said


def test_errors_are_reported_in_one_line(shop: World, capsys):
    with pytest.raises(SystemExit, match="1"):
        call_command("psqlmessages", "run", "nobody")
    said = capsys.readouterr()
    assert said.out == ""
    assert "message_handlers.py" in said.err
    shop.owner.query("DELETE FROM messages.auth WHERE ident = 'worker*' RETURNING 1")
    done = manage(shop.server, "psqlmessages", "run", "worker")
    assert done.returncode == 1
    assert done.stderr.startswith("psqlmessages: 5: there are no permissions for ident worker")
    with pytest.raises(CommandError, match="--concurrency: must be at least 1"):
        call_command("psqlmessages", "run", "worker", "--concurrency", "0")
