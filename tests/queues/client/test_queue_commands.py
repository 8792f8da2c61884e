"""`queue …`: what the commands print, how they end."""

import io
import json
import signal
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from psqlmessages.cli.main import main
from tests.client.programs import PROMPTLY, started
from tests.conftest import TestedServer
from tests.queues.client.conftest import left, listened
from tests.sql.conftest import World

Run = Callable[..., CompletedProcess[str]]
PUSH = ("queue", "push", "WRITER", "Q")
POP = ("queue", "pop", "READER", "Q")
RESERVE = ("queue", "reserve", "READER", "Q")


@pytest.fixture
def run(server: TestedServer, queues: World, capsys, monkeypatch) -> Run:
    """Run a command in this process as a role; return its exit code and its output."""

    def run(*arguments: str, role: str = "user2", typed: str = "") -> CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        try:
            code = main(["--dsn", server.url(role), *arguments])
        except SystemExit as usage:
            code = int(str(usage.code))
        return CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def test_a_line_each_is_pushed_and_its_id_printed(run: Run, queues: World):
    printed: list[str] = []
    for batch in ("1", "3"):
        done = run(*PUSH, "--batch", batch, role="user1", typed="one\n\nthree\nfour")
        assert done.returncode == 0
        assert done.stderr.startswith("pushed 4 in ")
        printed += done.stdout.split()
    rows = queues.program("user2").elements("pop", "READER", "Q", 9)
    assert [row.body for row in rows] == ["one", "", "three", "four"] * 2
    assert [str(row.id) for row in rows] == printed


def test_an_element_can_be_given_all_its_options(run: Run):
    options = ("--headers", '{"a":1}', "--tries", "3", "--key", "k")
    for body in ('{"n":1}', '{"n":2}'):
        assert run(*PUSH, body, "--json", *options, role="user1").returncode == 0
    late = ("--mature", "2100-01-01T00:00:00+00:00")
    assert run(*PUSH, "late", *late, role="user1").returncode == 0
    assert run(*PUSH, "later", "--delay", "3600", role="user1").returncode == 0
    done = run(*POP, "--json", "--count", "9")
    (element,) = map(json.loads, done.stdout.splitlines())
    assert (element["body"], element["headers"], element["tries"]) == ({"n": 1}, {"a": 1}, 3)
    assert "lease" not in element
    done = run("queue", "sizes", "READER", "Q", "--json")
    sizes = json.loads(done.stdout)
    assert (sizes["total"], sizes["scheduled"], sizes["is_paused"]) == (2, 2, False)
    assert sizes["next"][:2] == "20"


def test_invalid_arguments_are_usage_errors(run: Run, queues: World):
    for wrong in ("--headers=[]", "--mature=soon", "--delay=-1", "--tries=-1", "--batch=0"):
        assert run(*PUSH, "x", wrong).returncode == 2, wrong
    done = run(*PUSH, "{", "--json", role="user1")
    assert "psqlmessages: the body is not JSON: " in done.stderr
    done = run(*PUSH, "--key", "k", role="user1", typed="a\nb")
    assert (done.returncode, left(queues)) == (1, (0, 0))
    assert "--key needs a BODY argument" in done.stderr


def test_reserved_elements_are_committed_or_rolled_back(run: Run, queues: World):
    queues.program("user1").ok("push_many", "WRITER", "Q", ["a\x1b[2J", "b"])
    done = run(*RESERVE, "--count", "2", "--duration", "600")
    first, second = done.stdout.splitlines()
    assert first.endswith(r": a\x1b[2J")
    leases = [line.split()[1].rstrip(":") for line in (first, second)]
    commit = ("queue", "commit", "READER", leases[0])
    assert run(*commit).returncode == 0
    again = run(*commit, leases[1])
    assert (again.returncode, again.stderr) == (
        1, f"psqlmessages: {leases[0]} is no longer valid\n",
    )  # fmt: skip
    queues.program("user1").ok("push", "WRITER", "Q", "c")
    done = run(*RESERVE, "--json")
    lease = json.loads(done.stdout)["lease"]
    assert run("queue", "rollback", "READER", lease, "--delay", "3600").returncode == 0
    assert run(*POP).returncode == 1
    assert left(queues) == (1, 0)
    wrong = run("queue", "commit", "READER", "no lease")
    said, address = wrong.stderr.splitlines()
    assert (wrong.returncode, said) == (1, "psqlmessages: 63: malformed lease: no lease")
    assert address.endswith("/reference/errors/#error-63")


def test_it_waits_for_later_messages(server: TestedServer, queues: World, run: Run):
    with started(*RESERVE, "--timeout", "100", dsn=server.url("user2")) as program:
        listened(queues)
        queues.program("user1").ok("push", "WRITER", "Q", "x")
        program.until(": x")
        assert program.end() == 0
    done = run(*RESERVE, "--timeout", "0.1")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_wait(server: TestedServer, queues: World, signal_number: int):
    with started(*POP, "--timeout", "1000", dsn=server.url("user2")) as program:
        listened(queues)
        assert program.interrupt(signal_number) < PROMPTLY
        assert program.end() == (130 if signal_number == signal.SIGINT else 143)
        assert "Traceback" not in program.printed


def test_a_queue_is_paused_resumed_and_drained(run: Run, queues: World):
    queues.program("user1").ok("push_many", "WRITER", "Q", ["a", "b"])
    pause, resume = ("queue", "pause", "READER", "Q"), ("queue", "resume", "READER", "Q")
    assert run(*pause).stderr == ""
    assert run(*pause).stderr == "Q was paused already\n"
    assert run(*POP).returncode == 1
    sizes = "total      2\navailable  2\nscheduled  0\nreserved   0\nnext       -\npaused\n"
    assert run("queue", "sizes", "READER", "Q").stdout == sizes
    assert run(*resume).returncode == 0
    assert run(*resume).stderr == "Q was not paused\n"
    assert run(*POP).stdout.endswith(": a\n")
    assert run("queue", "drain", "READER", "Q").stdout == "1\n"
    assert left(queues) == (0, 0)


def test_the_queues_that_one_may_use_are_listed(run: Run, queues: World):
    assert run("queue", "list", role="user3").stdout == "no queues\n"
    queues.program("user1").ok("push_many", "WRITER", "Q", ["a", "b"])
    queues.program("user2").elements("pop", "READER", "Q")
    assert json.loads(run("queue", "list", "--json", role="user1").stdout) == {
        "queue": "Q", "is_paused": False, "puts": 2, "gets": 1, "reserves": 0, "commits": 0,
        "rollbacks": 0, "dead_letters": 0, "removes": 0,
    }  # fmt: skip
    head, row = run("queue", "list").stdout.splitlines()
    assert head.split() == [
        "queue", "puts", "gets", "reserves", "commits", "rollbacks", "dead", "letters", "removes",
    ]  # fmt: skip
    assert row.split() == ["Q", "2", "1", "0", "0", "0", "0", "0"]


def test_a_queue_is_configured_and_removed(run: Run, queues: World):
    queues.rules("user2 ADMIN Queue Q A 1")
    assert run("queue", "configure", "ADMIN", "Q", "--max-tries", "1").stdout.splitlines() == [
        "max tries          1", "dead-letter queue  __deadletter__", "key timeout        86400 s",
    ]  # fmt: skip
    queues.program("user1").ok("push", "WRITER", "Q", "a")
    remove = ("queue", "remove-queue", "ADMIN", "Q")
    refused = run(*remove)
    assert (refused.returncode, "66: Queue Q has elements" in refused.stderr) == (1, True)
    lease = run(*RESERVE).stdout.split()[1].rstrip(":")
    done = run("queue", "rollback", "READER", lease)
    assert (done.returncode, done.stderr) == (0, f"{lease}: the element has become a dead letter\n")
    assert run(*remove).returncode == 0
    assert "62: Queue Q is not existent" in run(*remove).stderr
