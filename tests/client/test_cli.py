"""The commands as programs: what they print, how they end."""

import json
import os
import signal
import subprocess
import sys

import psycopg
import pytest

from psqlmessages import Node
from tests.client.programs import PROMPTLY, SECONDS, finished, started
from tests.client.test_node import next_message, poll_until
from tests.conftest import TestedServer

# Each starts programs one after the other.
pytestmark = pytest.mark.timeout(600)


def test_neither_client_nor_commands_import_django() -> None:
    program = (
        "import sys, psqlmessages, psqlmessages.client.node, psqlmessages.cli\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'django']"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=SECONDS)


def test_send_sends_so_many_and_prints_the_rate(server: TestedServer, node2: Node) -> None:
    node2.topic_listen("ORDERS")
    done = finished(
        *("send", "NODE1", "ORDERS", "--count", "3", "--size", "5"), dsn=server.url("user1")
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("sent 3 in ")
    assert [next_message(node2).body for _ in range(3)] == ["xxxxx"] * 3


def test_send_reads_bodies_from_the_standard_input(server: TestedServer, node2: Node) -> None:
    node2.topic_listen("ORDERS")
    lines = "one\ntwo\n\nfour"
    for batch in ("1", "3"):
        done = finished(
            *("send", "NODE1", "ORDERS", "-", "--batch", batch),
            dsn=server.url("user1"),
            typed=lines,
        )
        assert done.returncode == 0, done.stderr
        assert [next_message(node2).body for _ in range(4)] == ["one", "two", "", "four"]


def test_receive_prints_json_for_programs(server: TestedServer, node1: Node) -> None:
    node1.topic_notify("ORDERS")
    arguments = ("receive", "NODE2", "ORDERS", "--json", "--count", "3")
    with started(*arguments, dsn=server.url("user2")) as program:
        program.until("NODE2 listens to ORDERS")
        for body in ("text\x1b[2J", {"id": 1}, b"\0"):
            node1.topic_send("ORDERS", body)
        assert program.end() == 0
        received = [json.loads(line) for line in program.printed.splitlines() if line[0] == "{"]
    assert [(m["sender"], m["topic"], m["body"]) for m in received] == [
        ("NODE1", "ORDERS", "text\x1b[2J"),
        ("NODE1", "ORDERS", {"id": 1}),
        ("NODE1", "ORDERS", "AA=="),
    ]
    assert received[2]["enc"] == "b64"


def test_receive_shows_people_no_control_characters(server: TestedServer, node1: Node) -> None:
    node1.topic_notify("ORDERS")
    arguments = ("receive", "NODE2", "ORDERS", "--count", "1")
    with started(*arguments, dsn=server.url("user2")) as program:
        program.until("listens to")
        node1.topic_send("ORDERS", "Überweisung\x1b[2J\n")
        assert program.end() == 0
    assert r"NODE1: Überweisung\x1b[2J\n" in program.printed


def test_receive_ends_when_nothing_comes(server: TestedServer, conversation: None) -> None:
    arguments = ("receive", "NODE2", "ORDERS", "--count", "1", "--timeout", "0.1")
    done = finished(*arguments, dsn=server.url("user2"))
    assert done.returncode == 1
    assert "received 0 in" in done.stderr


def test_call_prints_the_answer(server: TestedServer, node2: Node) -> None:
    arguments = ("call", "NODE1", "NODE2", '{"x": 1}', "--json", "--timeout", "60")
    with started(*arguments, dsn=server.url("user1")) as program:
        question = next_message(node2, "Rpc")
        question.reply({"y": question.body["x"] + 1})
        assert program.end() == 0
    assert program.printed == '{"y": 2}\n'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("call", "NODE1", "NODE2", "x"), "17: Client NODE2 is not connected"),
        (("send", "NODE1", "ORDERS"), "10: cannot listeners for Topic ORDERS"),
        (("send", "NODE1", "UNHEARD"), "9: Topic UNHEARD is not existent"),
        (("receive", "OTHER", "ORDERS"), "5: there are no permissions for ident OTHER"),
        (("status", "UNHEARD"), "no rule gives you the topic UNHEARD"),
        (("call", "NODE1", "NODE2", "{", "--json"), "Expecting property name"),
        (("demo",), "cannot"),
        (("bench", "--quick"), "cannot prepare the benchmark"),
    ],
)
def test_what_fails_says_why_in_one_line_and_exits_with_1(
    server: TestedServer, conversation: None, arguments: tuple[str, ...], text: str
) -> None:
    done = finished(*arguments, dsn=server.url("user1"))
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("psqlmessages: "))
    assert text in line
    assert "Traceback" not in done.stderr


def test_a_server_that_is_not_there_exits_with_1() -> None:
    done = finished("status", dsn="host=127.0.0.1 port=1")
    assert done.returncode == 1
    assert "psqlmessages: connection failed" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("unheard",),
        ("send", "NODE1"),
        ("send", "NODE1", "ORDERS", "--count", "-1"),
        ("send", "NODE1", "ORDERS", "--interval", "soon"),
        ("receive", "NODE1", "ORDERS", "--timeout", "nan"),
        ("bench", "--rounds", "0"),
    ],
)
def test_what_cannot_be_understood_exits_with_2(arguments: tuple[str, ...]) -> None:
    done = finished(*arguments, dsn="")
    assert done.returncode == 2
    assert "usage: psqlmessages" in done.stderr


def test_status_shows_who_sends_and_who_listens(
    server: TestedServer, node1: Node, node2: Node
) -> None:
    node1.topic_notify("ORDERS")
    node2.topic_listen("ORDERS")
    shown = finished("status", "ORDERS", dsn=server.url("user1")).stdout.splitlines()
    assert shown[0].split() == ["topic", "who", "sends", "who", "listens"]
    assert shown[1].split() == ["ORDERS", "NODE1", "NODE2"]
    assert shown[3].startswith("notification queue: 0.")
    found = json.loads(finished("status", "--json", dsn=server.url("user1")).stdout)
    orders = {"topic": "ORDERS", "notifiers": ["NODE1"], "listeners": ["NODE2"]}
    assert orders in found["topics"]
    assert found["queue_usage"] < 0.5


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_receive_promptly(
    server: TestedServer, node1: Node, signal_number: int
) -> None:
    with started("receive", "NODE2", "ORDERS", dsn=server.url("user2")) as program:
        program.until("listens to")
        assert program.interrupt(signal_number) < PROMPTLY
        assert program.end() == (0 if signal_number == signal.SIGINT else 143)
        assert "Traceback" not in program.printed
    assert node1.topic_status("ORDERS").listeners == ()


@pytest.mark.parametrize("interval", ["0", "20"])
def test_ctrl_c_ends_send_promptly(server: TestedServer, node2: Node, interval: str) -> None:
    node2.topic_listen("ORDERS")
    arguments = ("send", "NODE1", "ORDERS", "--count", "100000000", "--interval", interval)
    with started(*arguments, dsn=server.url("user1")) as program:
        next_message(node2)
        assert program.interrupt() < PROMPTLY
        assert program.end() == 130
        assert "Traceback" not in program.printed
    assert node2.topic_status("ORDERS").notifiers == ()


def test_ctrl_c_ends_call_promptly(server: TestedServer, node2: Node) -> None:
    arguments = ("call", "NODE1", "NODE2", "x", "--timeout", "60")
    with started(*arguments, dsn=server.url("user1")) as program:
        next_message(node2, "Rpc")
        assert program.interrupt() < PROMPTLY
        assert (program.end(), program.printed) == (130, "")


def test_ctrl_c_ends_the_live_traffic_promptly(
    server: TestedServer, owner: psycopg.Connection
) -> None:
    with started("demo", "--traffic", dsn=server.url()) as program:
        program.until("Live traffic follows")
        poll_until(lambda: board_listens(owner))
        assert program.interrupt() < PROMPTLY
        assert program.end() == 0
        assert "The demonstration has ended." in program.printed
        assert "Traceback" not in program.printed
    assert owner.execute("SELECT FROM messages.auth").fetchone() is None


def board_listens(owner: psycopg.Connection) -> object:
    return owner.execute(
        "SELECT 1 FROM messages.topics"
        " WHERE topic = 'DEMO.PRICES' AND 'DEMO.BOARD' = ANY(listeners)"
    ).fetchone()


def test_ctrl_c_ends_the_benchmark_promptly(
    server: TestedServer, owner: psycopg.Connection
) -> None:
    with started("bench", "--quick", dsn=server.url()) as program:
        program.until("measuring 10 B")
        assert program.interrupt() < PROMPTLY
        assert program.end() == 130
        assert "Traceback" not in program.printed
    assert owner.execute("SELECT FROM messages.auth").fetchone() is None


def test_the_demonstration_goes_as_expected_again_and_again(server: TestedServer) -> None:
    for _ in range(2):
        done = finished("demo", dsn=server.url())
        assert done.returncode == 0, done.stdout + done.stderr
        assert "DEMO1=> SELECT messages.init('DEMO1');\n" in done.stdout
        assert "DIFFERENT" not in done.stdout
        assert done.stdout.endswith("steps went as expected.\n")


def test_the_demonstration_fails_where_an_answer_differs(
    server: TestedServer, owner: psycopg.Connection
) -> None:
    owner.execute(
        "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)"
        " VALUES (%s, 'DEMO1', 'Topic', 'DEMO.ORDERS', 'R', 5)",
        (owner.info.user,),
    )
    try:
        done = finished("demo", dsn=server.url())
    finally:
        owner.execute("DELETE FROM messages.auth")
    assert done.returncode == 1
    assert "DIFFERENT: expected {'Err': '0', 'Notifiers': ['DEMO1']" in done.stdout
    assert "steps differ" in done.stderr


def test_the_benchmark_prints_a_table_of_ratios(server: TestedServer) -> None:
    done = finished("bench", "--quick", "--rounds", "1", dsn=server.url())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["size", "topic_send/s", "ratio"]
    assert [line.split()[:2] for line in lines[1:4]] == [["10", "B"], ["1", "KB"], ["10", "KB"]]


def test_manage_py_offers_the_same_on_a_configured_database(server: TestedServer) -> None:
    def manage(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", "psqlmessages", *arguments],
            env={**os.environ, "DATABASE_URL": server.url()},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    assert "notification queue" in manage("status").stdout
    assert manage("status", "UNHEARD").returncode == 1
    assert manage("unheard").returncode == 2
    assert manage("--database", "unheard", "status").returncode == 2


def test_a_terminal_has_one_refreshed_line(server: TestedServer, node2: Node) -> None:
    node2.topic_listen("ORDERS")
    command = ["-m", "psqlmessages.cli", "send", "NODE1", "ORDERS", "--count", "2"]
    main_end, terminal_end = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, *command, "--interval", "0.3"],
            env={**os.environ, "PSQLMESSAGES_DSN": server.url("user1")},
            stdout=terminal_end,
            stderr=terminal_end,
        )
        assert process.wait(timeout=SECONDS) == 0
        shown = os.read(main_end, 10_000).decode()
    finally:
        os.close(main_end)
        os.close(terminal_end)
    assert shown.startswith("\r\x1b[Ksent ")
    assert shown.count("\n") == 1
