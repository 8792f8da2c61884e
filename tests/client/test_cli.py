"""What the commands print, and their exit codes."""

import json
import re
import signal
from io import StringIO
from typing import Any

import psycopg
import pytest

from psqlmessages import Node, __version__
from psqlmessages.cli.main import main
from psqlmessages.shutdown import signal_handler
from tests.client.nodes import next_message
from tests.client.programs import PROMPTLY, Program, started
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.sql.conftest import INSERT_RULE, World

BOARD = "role = 'psqlmessages_demo2' AND ident = 'DEMO.BOARD'"
PRICES = f"{BOARD} AND dest = 'DEMO.PRICES'"


def test_send_sends_and_prints_the_rate(server: TestedServer, node2: Node, capsys, monkeypatch):
    node2.topic_listen("ORDERS")
    sending = ["--dsn", server.url("user1"), "send", "NODE1", "ORDERS"]
    assert main([*sending, "--count", "3", "--size", "5"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err[:10]) == ("", "sent 3 in ")
    assert [next_message(node2).body for _ in range(3)] == ["xxxxx"] * 3
    for batch in ("1", "3"):
        monkeypatch.setattr("sys.stdin", StringIO("one\ntwo\n\nfour"))
        assert main([*sending, "-", "--batch", batch]) == 0
        assert [next_message(node2).body for _ in range(4)] == ["one", "two", "", "four"]


def test_receive_prints_json_or_text_without_controls(server: TestedServer, node1: Node):
    node1.topic_notify("ORDERS")
    receiving = ("receive", "NODE2", "ORDERS", "--count")
    with started(*receiving, "3", "--json", dsn=server.url("user2")) as program:
        program.until("NODE2 listens to ORDERS")
        for body in ("text\x1b[2J", {"id": 1}, b"\0"):
            node1.topic_send("ORDERS", body)
        assert program.end() == 0
        received = [json.loads(line) for line in program.printed.splitlines() if line[0] == "{"]
    assert {(m["sender"], m["topic"]) for m in received} == {("NODE1", "ORDERS")}
    assert [m["body"] for m in received] == ["text\x1b[2J", {"id": 1}, "AA=="]
    assert received[2]["enc"] == "b64"
    with started(*receiving, "1", dsn=server.url("user2")) as program:
        program.until("listens to")
        node1.topic_send("ORDERS", "Überweisung\x1b[2J\n")
        assert program.end() == 0
    assert r"NODE1: Überweisung\x1b[2J\n" in program.printed


@pytest.mark.parametrize("timeout", ["0.1", "0"])
def test_receive_ends_at_timeout(server: TestedServer, conversation: None, capsys, timeout: str):
    receiving = ["receive", "NODE2", "ORDERS", "--count", "1", "--timeout", timeout]
    assert main(["--dsn", server.url("user2"), *receiving]) == 1
    assert "received 0 in" in capsys.readouterr().err


def test_call_prints_the_answer_and_ctrl_c_ends_it(server: TestedServer, node2: Node):
    calling = ("call", "NODE1", "NODE2", '{"x": 1}', "--json", "--timeout", "60")
    with started(*calling, dsn=server.url("user1")) as program:
        question = next_message(node2, "Rpc")
        question.reply({"y": question.body["x"] + 1})
        assert program.end() == 0
    assert program.printed == '{"y": 2}\n'
    with started(*calling, dsn=server.url("user1")) as program:
        next_message(node2, "Rpc")
        ended(program, signal.SIGINT, 130)
        assert program.printed == ""


FAILURES = (
    (("call", "NODE1", "NODE2", "x"), "17: Client NODE2 is not connected"),
    (("send", "NODE1", "ORDERS"), "10: cannot listeners for Topic ORDERS"),
    (("receive", "OTHER", "A,B"), "('user1', 'OTHER', 'Topic', 'A,B', 'RW', 60)"),
    (("queue", "pop", "OTHER", "Q"), "('user1', 'OTHER', 'Queue', 'Q', 'R', 60)"),
    (("stream", "publish", "A", "T", "x"), "('user1', 'A', 'Topic', 'T', 'W', 60)"),
    (("status", "UNHEARD"), "there is no topic UNHEARD, or no rule lets"),
    (("call", "NODE1", "NODE2", "{", "--json"), "Expecting property name"), (("demo",), "cannot"),
    (("bench", "--quick"), "cannot prepare the benchmark"),
)  # fmt: skip
MISTAKES: tuple[tuple[str, ...], ...] = (
    (), ("unheard",), ("send", "NODE1"), ("send", "NODE1", "ORDERS", "--count", "-1"),
    ("receive", "NODE1", "ORDERS", "--timeout", "nan"), ("bench", "--rounds", "0"),
)  # fmt: skip


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"psqlmessages {__version__}\n"


def test_failures_name_the_cause(server: TestedServer, conversation: None, capsys):
    for arguments, text in FAILURES:
        assert main(["--dsn", server.url("user1"), *arguments]) == 1, arguments
        (line,) = re.findall(r"^psqlmessages: .*", capsys.readouterr().err, re.MULTILINE)
        assert text in line
    assert main(["--dsn", "host=127.0.0.1 port=1", "status"]) == 1
    assert "psqlmessages: connection failed" in capsys.readouterr().err
    for arguments in MISTAKES:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert "usage: psqlmessages" in capsys.readouterr().err


def test_status_shows_nodes(server: TestedServer, node1: Node, node2: Node, capsys):
    node1.topic_notify("ORDERS")
    node2.topic_listen("ORDERS")
    assert main(["--dsn", server.url("user1"), "status", "ORDERS"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["topic", "senders", "listeners"]
    assert shown[1].split() == ["ORDERS", "NODE1", "NODE2"]
    assert shown[3].startswith("notification queue: 0.")
    assert main(["--dsn", server.url("user1"), "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"topic": "ORDERS", "notifiers": ["NODE1"], "listeners": ["NODE2"]} in found["topics"]
    assert found["queue_usage"] < 0.5


def ended(program: Program, number: int, code: int) -> None:
    assert program.interrupt(number) < PROMPTLY
    assert program.end() == code
    assert "Traceback" not in program.printed


@pytest.mark.parametrize(
    ("number", "codes", "interval"),
    [(signal.SIGINT, (0, 130), "0"), (signal.SIGTERM, (143, 143), "20")],
)
def test_a_signal_ends_receive_and_send_promptly(
    server: TestedServer, node1: Node, number: int, codes: tuple[int, int], interval: str
):
    with started("receive", "NODE2", "ORDERS", dsn=server.url("user2")) as program:
        program.until("listens to")
        ended(program, number, codes[0])
    assert node1.topic_status("ORDERS").listeners == ()
    node1.topic_listen("ORDERS")
    sending = ("send", "NODE2", "ORDERS", "--count", "100000000", "--interval", interval)
    with started(*sending, dsn=server.url("user2")) as program:
        next_message(node1)
        ended(program, number, codes[1])
    assert node1.topic_status("ORDERS").notifiers == ()


def test_signal_handlers_are_restored(monkeypatch):
    for earlier in (print, signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGUSR1, earlier)
        with signal_handler(repr, signal.SIGUSR1):
            assert signal.getsignal(signal.SIGUSR1) is repr
        assert signal.getsignal(signal.SIGUSR1) is earlier
    # This one always finds a handler that is not Python's.
    calls: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *call: calls.append(call))
    with signal_handler(repr, signal.SIGUSR1):
        assert calls.pop() == (signal.SIGUSR1, repr)
    assert calls == [(signal.SIGUSR1, signal.SIG_DFL)]


def test_bench_shows_ratios(server: TestedServer, owner: psycopg.Connection, capsys):
    assert main(["--dsn", server.url(), "bench", "--quick", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["size", "topic_send/s", "ratio"]
    assert [line.split()[:2] for line in lines[1:4]] == [["10", "B"], ["1", "KB"], ["10", "KB"]]
    assert owner.execute("SELECT FROM messages.auth").fetchone() is None


def test_the_demo_works(server: TestedServer, owner: psycopg.Connection, capsys):
    for _ in range(2):
        assert main(["--dsn", server.url(), "demo"]) == 0
        said = capsys.readouterr().out
        assert "DEMO1=> SELECT messages.init('DEMO1');\n" in said
        assert "DIFFERENT" not in said
        assert said.endswith("steps went as expected.\n")
    owner.execute(INSERT_RULE, (owner.info.user, "DEMO1", "Topic", "DEMO.ORDERS", "R", 5))
    assert main(["--dsn", server.url(), "demo"]) == 1
    assert "DIFFERENT: expected {'Err': '0', 'Notifiers': ['DEMO1']" in capsys.readouterr().out


def test_live_traffic_resumes_after_a_revoked_right_returns(world: World):
    def listens(topic: str) -> bool:
        heard = "SELECT array_agg(topic) FROM messages.topics WHERE 'DEMO.BOARD' = ANY(listeners)"
        return topic in (world.owner.query(heard) or ())

    def change(what: str, which: str) -> None:
        world.owner.connection.execute(f"UPDATE messages.auth SET {what} WHERE {which}")

    with started("demo", "--traffic", "--brief", dsn=world.server.url()) as program:
        program.until("Live traffic follows")
        wait_until(lambda: listens("DEMO.PRICES"))
        lines = program.printed.splitlines()
        assert lines[0].startswith("1. The owner adds rules")
        assert [line[0] for line in lines[:7]] == list("1234567")
        assert lines[7].endswith("steps went as expected.")
        # A listener, and one without any rule.
        change("mode = 'W'", PRICES)
        assert not listens("DEMO.PRICES")
        change("mode = 'R'", PRICES)
        wait_until(lambda: listens("DEMO.PRICES"))
        change("ident = 'AWAY'", BOARD)
        assert not listens("DEMO.STOCK")
        change("ident = 'DEMO.BOARD'", "ident = 'AWAY'")
        for topic in ("DEMO.ORDERS", "DEMO.PRICES", "DEMO.STOCK"):
            wait_until(lambda topic=topic: listens(topic))
        ended(program, signal.SIGINT, 0)
    assert "The demo has ended." in program.printed
    assert world.owner.connection.execute("SELECT FROM messages.auth").fetchone() is None
