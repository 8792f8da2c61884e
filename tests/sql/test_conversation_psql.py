"""The conversation of the documentation's nodes, typed into plain psql."""

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.conftest import TestedServer
from tests.sql.conftest import World, event_words, parse

NOTIFICATION = re.compile(
    r'Asynchronous notification "([^"\n]+)" with payload "(.*?)"'
    r" received from server process with PID \d+\.\n",
    re.DOTALL,
)
FENCE = count(1)
OK, ALREADY = '{"Err":"0"}', '{"Err":"0","Already":1}'

# The same five rules as in the documentation, their columns in any order.
RULES = """
INSERT INTO messages.auth (role, ident, dest, type, mode, timeout)
VALUES ('user1', 'NODE1', 'NODE2', 'Rpc', 'W', 5);
INSERT INTO messages.auth (timeout, mode, type, dest, ident, role)
VALUES (5, 'W', 'Rpc', 'NODE1', 'NODE2', 'user2');
INSERT INTO messages.auth (ident, type, dest, mode, role, timeout)
VALUES ('NODE1', 'Topic', 'MYTOPIC', 'W', 'user1', 10),
       ('NODE2', 'Topic', 'MYTOPIC', 'RW', 'user2', 10);
INSERT INTO messages.auth (mode, timeout, role, type, dest, ident)
VALUES ('R', 10, 'user3', 'Topic', 'MYTOPIC', 'NODE3');
"""
LOOK = "SELECT role, ident, type, dest, mode, timeout FROM messages.auth ORDER BY type, ident;"


class Psql:
    """A psql kept open: it gets what is typed, and gives back what it prints."""

    def __init__(self, program: Path, url: str) -> None:
        self.arrived: list[tuple[str, str]] = []
        self.process = subprocess.Popen(
            [program, "--no-psqlrc", "--no-align", "--tuples-only", "--quiet", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )

    def type(self, sql: str) -> str:
        """Type; what is printed until a notification of our own, typed after it, is there."""
        fence = f"fence_{next(FENCE)}"
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{sql}\nLISTEN {fence}; NOTIFY {fence};\n")
        self.process.stdin.flush()
        text = ""
        while f'notification "{fence}"' not in text:
            line = self.process.stdout.readline()
            assert line, f"psql ended after: {text}"
            text += line
        text = text[: text.index(f'Asynchronous notification "{fence}"')]
        self.arrived += NOTIFICATION.findall(text)
        return NOTIFICATION.sub("", text).strip()

    def call(self, call: str) -> str:
        """Call a function of ours."""
        return self.type(f"SELECT messages.{call};")

    def heard(self) -> list[tuple[str, str]]:
        """The notifications that arrived, as channel and payload."""
        self.type("")
        arrived, self.arrived = self.arrived, []
        return arrived

    def events(self) -> list[str]:
        """The events that arrived."""
        return [event_words(json.loads(payload)) for _, payload in self.heard()]

    def close(self) -> None:
        """Close the window: psql gets no chance to say good-bye."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def nodes(world: World, server: TestedServer) -> Iterator[list[Psql]]:
    """Three psqls of three ordinary roles, each registered as its node."""
    world.execute(RULES)
    psqls = [Psql(server.psql, server.url(f"user{number}")) for number in (1, 2, 3)]
    for number, psql in enumerate(psqls, 1):
        psql.call(f"init('NODE{number}')")
    for psql in psqls:
        psql.heard()
    yield psqls
    for psql in psqls:
        psql.close()


def test_nodes_talk_over_a_topic(world: World, nodes: list[Psql]) -> None:
    one, two, three = nodes
    assert ["|".join(map(str, row)) for row in world.execute(LOOK)] == [
        "user1|NODE1|Rpc|NODE2|W|5", "user2|NODE2|Rpc|NODE1|W|5",
        "user1|NODE1|Topic|MYTOPIC|W|10", "user2|NODE2|Topic|MYTOPIC|RW|10",
        "user3|NODE3|Topic|MYTOPIC|R|10",
    ]  # fmt: skip
    warning, answer = one.call("init('NODE1')").splitlines()
    pid = one.type("SELECT pg_backend_pid();")
    assert warning == "WARNING:  Messages err:6 Client NODE1 exists with same pid"
    found = re.fullmatch(
        rf'\{{"Err":"0","Channel":"(user1_{pid}[0-9a-z]{{20,}})","Already":1\}}', answer
    )
    assert found is not None
    # Who is authorized, and who is active.
    people = '{{"Err":"0","Notifiers":[{}],"Listeners":[{}]}}'
    both = '"NODE2","NODE3"'
    assert one.call("topic_auth('MYTOPIC')") == people.format('"NODE1","NODE2"', both)
    texts = [one.call(f"topic_{undo}notify('MYTOPIC')") for undo in ("", "", "un", "un", "")]
    assert texts == [OK, ALREADY, OK, ALREADY, OK]
    one.heard()
    three.call("topic_listen('MYTOPIC')")
    [(channel, payload)] = one.heard()
    assert channel == found[1]
    assert re.fullmatch(
        r'\{"Type":"Sys","Evt":"topic_listen","Ident":"NODE3","Topic":"MYTOPIC","Id":\d+\}', payload
    )
    two.call("topic_listen('MYTOPIC')")
    assert three.call("topic_status('MYTOPIC')") == people.format('"NODE1"', both)
    # A short message, one that is rolled back, and a long one.
    two.heard(), three.heard()
    assert one.call("topic_send('MYTOPIC', E'Two\\nlines, \"quoted\" — ü')") == OK
    one.type("BEGIN; SELECT messages.topic_send('MYTOPIC', 'never'); ROLLBACK;")
    for listener in two, three:
        [(_, payload)] = listener.heard()
        header = parse(payload)
        assert isinstance(header.pop("Id"), int)
        assert header == {
            "Type": "Topic", "Size": 26, "To": "MYTOPIC", "From": "NODE1",
            "Body": 'Two\nlines, "quoted" — ü',
        }  # fmt: skip
    one.call("topic_send('MYTOPIC', repeat('long ', 2000))")
    [(_, payload)] = two.heard()
    header = json.loads(payload)
    line, _, body = two.call(f"get_data('{payload}')").partition("\n")
    assert header.pop("Dkey").startswith("10.")
    assert line.startswith('{"Err":"0",')
    assert (json.loads(line), body) == ({"Err": "0", **header}, ("long " * 2000).strip())
    # A psql that is closed is reported as crashed, and one that says good-bye as disconnected.
    one.heard()
    pid = three.type("SELECT pg_backend_pid();")
    three.close()
    world.wait_for("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", int(pid))
    assert two.call("evaluate()") == '{"Err":"0","Events":2}'
    assert one.events() == ["topic_unlisten NODE3 MYTOPIC", "crash NODE3"]
    two.heard()
    assert [one.call("deinit('NODE1')") for _ in range(2)] == [OK, ALREADY]
    gone = ["topic_unnotify NODE1 MYTOPIC", "topic_none_notify MYTOPIC", "disconnect NODE1"]
    assert two.events() == gone


CALLS = [
    "evaluate()", "init('NODE1')", "use('NODE1')", "audience('{}')",
    "topic_auth('MYTOPIC')", "topic_status('MYTOPIC')",
    "topic_notify('MYTOPIC')", "topic_send('MYTOPIC', 'x')", "topic_unnotify('MYTOPIC')",
    "topic_listen('MYTOPIC')", "topic_unlisten('MYTOPIC')",
    "topic_observe('MYTOPIC')", "topic_unobserve('MYTOPIC')",
    "topic_send_many('MYTOPIC', '{x}')", "topic_send_as('NODE1', 'MYTOPIC', 'x')",
    "rpc('NODE2', 'SECRET', 'x')", "return('NODE2', 'SECRET', 'x')",
    "return_error('NODE2', 'SECRET', 'x')", "get_data('{}')", "deinit('NODE1')",
]  # fmt: skip


def test_debug1_logs_each_command_without_its_token_and_debug2_each_event_too(
    nodes: list[Psql],
) -> None:
    node = nodes[0]
    assert node.call("topic_notify('MYTOPIC')") == OK, "by default nothing is logged"
    node.call("topic_unnotify('MYTOPIC')")
    command = "DEBUG:  Messages command: topic_notify MYTOPIC"
    event = "DEBUG:  Messages event: topic_notify NODE1 MYTOPIC"
    node.type("SET client_min_messages = DEBUG2;")
    assert {command, event} <= set(node.call("topic_notify('MYTOPIC')").splitlines())
    node.call("topic_unnotify('MYTOPIC')")
    node.type("SET client_min_messages = DEBUG1;")
    printed = "\n".join(node.call(call) for call in CALLS)
    assert re.findall(r"^DEBUG:  Messages command: (\w+)", printed, re.MULTILINE) == [
        call.partition("(")[0] for call in CALLS
    ]
    assert command in printed.splitlines()
    assert "Messages event" not in printed
    assert "SECRET" not in printed
