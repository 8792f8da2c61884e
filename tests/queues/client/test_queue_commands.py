"""`queue …` as programs: what they print, how they end."""

import json
import signal

import pytest

from tests.client.programs import PROMPTLY, finished, started
from tests.conftest import TestedServer
from tests.queues.client.conftest import left, listened
from tests.sql.conftest import World

# Each starts programs one after the other.
pytestmark = pytest.mark.timeout(600)

PUSH = ("queue", "push", "WRITER", "Q")
POP = ("queue", "pop", "READER", "Q")
RESERVE = ("queue", "reserve", "READER", "Q")


def test_a_line_each_is_pushed_and_its_id_printed(server: TestedServer, queues: World):
    printed: list[str] = []
    for batch in ("1", "3"):
        done = finished(
            *PUSH, "--batch", batch, dsn=server.url("user1"), typed="one\n\nthree\nfour"
        )
        assert done.returncode == 0
        assert done.stderr.startswith("pushed 4 in ")
        printed += done.stdout.split()
    rows = queues.program("user2").elements("pop", "READER", "Q", 9)
    assert [row.body for row in rows] == ["one", "", "three", "four"] * 2
    assert [str(row.id) for row in rows] == printed


def test_an_element_can_be_given_all_its_options(server: TestedServer, queues: World):
    options = ("--headers", '{"a":1}', "--tries", "3", "--key", "k")
    for body in ('{"n":1}', '{"n":2}'):
        assert finished(*PUSH, body, "--json", *options, dsn=server.url("user1")).returncode == 0
    late = ("--mature", "2100-01-01T00:00:00+00:00")
    assert finished(*PUSH, "late", *late, dsn=server.url("user1")).returncode == 0
    assert finished(*PUSH, "later", "--delay", "3600", dsn=server.url("user1")).returncode == 0
    done = finished(*POP, "--json", "--count", "9", dsn=server.url("user2"))
    (element,) = map(json.loads, done.stdout.splitlines())
    assert (element["body"], element["headers"], element["tries"]) == ({"n": 1}, {"a": 1}, 3)
    assert "lease" not in element
    done = finished("queue", "sizes", "READER", "Q", "--json", dsn=server.url("user2"))
    sizes = json.loads(done.stdout)
    assert (sizes["total"], sizes["scheduled"], sizes["is_paused"]) == (2, 2, False)
    assert sizes["next"][:2] == "20"


def test_what_cannot_be_meant_is_wrong_usage(server: TestedServer, queues: World):
    for wrong in (
        ("--headers", "[]"), ("--mature", "soon"), ("--delay", "-1"), ("--tries", "-1"),
        ("--batch", "0"),
    ):  # fmt: skip
        assert finished(*PUSH, "x", *wrong, dsn="").returncode == 2, wrong
    done = finished(*PUSH, "--key", "k", dsn=server.url("user1"), typed="a\nb")
    assert (done.returncode, left(queues)) == (1, (0, 0))
    assert "--key needs a BODY argument" in done.stderr


def test_what_is_reserved_is_committed_or_rolled_back(server: TestedServer, queues: World):
    queues.program("user1").ok("push_many", "WRITER", "Q", ["a\x1b[2J", "b"])
    done = finished(*RESERVE, "--count", "2", "--duration", "600", dsn=server.url("user2"))
    first, second = done.stdout.splitlines()
    assert first.endswith(r": a\x1b[2J")
    leases = [line.split()[1].rstrip(":") for line in (first, second)]
    commit = ("queue", "commit", "READER", leases[0])
    assert finished(*commit, dsn=server.url("user2")).returncode == 0
    again = finished(*commit, leases[1], dsn=server.url("user2"))
    assert (again.returncode, again.stderr) == (
        1, f"psqlmessages: {leases[0]} is no longer valid\n",
    )  # fmt: skip
    queues.program("user1").ok("push", "WRITER", "Q", "c")
    done = finished(*RESERVE, "--json", dsn=server.url("user2"))
    lease = json.loads(done.stdout)["lease"]
    rollback = ("queue", "rollback", "READER", lease, "--delay", "3600")
    assert finished(*rollback, dsn=server.url("user2")).returncode == 0
    assert finished(*POP, dsn=server.url("user2")).returncode == 1
    assert left(queues) == (1, 0)
    wrong = finished("queue", "commit", "READER", "no lease", dsn=server.url("user2"))
    assert (wrong.returncode, wrong.stderr) == (1, "psqlmessages: 63: malformed lease: no lease\n")


def test_it_waits_for_what_comes(server: TestedServer, queues: World):
    with started(*RESERVE, "--timeout", "100", dsn=server.url("user2")) as program:
        listened(queues)
        queues.program("user1").ok("push", "WRITER", "Q", "x")
        program.until(": x")
        assert program.end() == 0
    done = finished(*RESERVE, "--timeout", "0.1", dsn=server.url("user2"))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_wait(server: TestedServer, queues: World, signal_number: int):
    with started(*POP, "--timeout", "1000", dsn=server.url("user2")) as program:
        listened(queues)
        assert program.interrupt(signal_number) < PROMPTLY
        assert program.end() == (130 if signal_number == signal.SIGINT else 143)
        assert "Traceback" not in program.printed


def test_a_queue_is_paused_resumed_and_drained(server: TestedServer, queues: World):
    queues.program("user1").ok("push_many", "WRITER", "Q", ["a", "b"])
    pause, resume = ("queue", "pause", "READER", "Q"), ("queue", "resume", "READER", "Q")
    dsn = server.url("user2")
    assert finished(*pause, dsn=dsn).stderr == ""
    assert finished(*pause, dsn=dsn).stderr == "Q was paused already\n"
    assert finished(*POP, dsn=dsn).returncode == 1
    done = finished("queue", "sizes", "READER", "Q", dsn=dsn)
    assert done.stdout == (
        "total      2\navailable  2\nscheduled  0\nreserved   0\nnext       -\npaused\n"
    )
    assert finished(*resume, dsn=dsn).returncode == 0
    assert finished(*resume, dsn=dsn).stderr == "Q was not paused\n"
    assert finished(*POP, dsn=dsn).stdout.endswith(": a\n")
    assert finished("queue", "drain", "READER", "Q", dsn=dsn).stdout == "1\n"
    assert left(queues) == (0, 0)


def test_the_queues_that_one_may_use_are_listed(server: TestedServer, queues: World):
    assert finished("queue", "list", dsn=server.url("user3")).stdout == "no queues\n"
    queues.program("user1").ok("push_many", "WRITER", "Q", ["a", "b"])
    queues.program("user2").elements("pop", "READER", "Q")
    done = finished("queue", "list", "--json", dsn=server.url("user1"))
    assert json.loads(done.stdout) == {
        "queue": "Q", "is_paused": False, "puts": 2, "gets": 1, "reserves": 0, "commits": 0,
        "rollbacks": 0, "dead_letters": 0, "removes": 0,
    }  # fmt: skip
    head, row = finished("queue", "list", dsn=server.url("user2")).stdout.splitlines()
    assert head.split() == [
        "queue", "puts", "gets", "reserves", "commits", "rollbacks", "dead", "letters",
        "removes",
    ]  # fmt: skip
    assert row.split() == ["Q", "2", "1", "0", "0", "0", "0", "0"]


def test_a_queue_is_configured_and_removed(server: TestedServer, queues: World):
    queues.rules("user2 ADMIN Queue Q A 1")
    dsn = server.url("user2")
    configure = ("queue", "configure", "ADMIN", "Q", "--max-tries", "1")
    assert finished(*configure, dsn=dsn).stdout.splitlines() == [
        "max tries          1", "dead-letter queue  __deadletter__", "key timeout        86400 s",
    ]  # fmt: skip
    queues.program("user1").ok("push", "WRITER", "Q", "a")
    remove = ("queue", "remove-queue", "ADMIN", "Q")
    refused = finished(*remove, dsn=dsn)
    assert (refused.returncode, "66: Queue Q has elements" in refused.stderr) == (1, True)
    lease = finished(*RESERVE, dsn=dsn).stdout.split()[1].rstrip(":")
    done = finished("queue", "rollback", "READER", lease, dsn=dsn)
    assert (done.returncode, done.stderr) == (0, f"{lease}: the element has become a dead letter\n")
    assert finished(*remove, dsn=dsn).returncode == 0
    assert "62: Queue Q is not existent" in finished(*remove, dsn=dsn).stderr


def test_a_refusal_is_said_in_one_line(server: TestedServer, queues: World):
    for command in (PUSH, POP, ("queue", "sizes", "READER", "Q.1")):
        done = finished(*command, dsn=server.url("user3"), typed="x")
        assert done.returncode == 1
        assert "psqlmessages: 2: cannot use Queue to Q" in done.stderr
        assert "Traceback" not in done.stderr
