"""The conversation of the documentation's nodes, typed into plain psql."""

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import TestedServer
from tests.sql.conftest import World

NOTIFICATION = re.compile(
    r'Asynchronous notification "([^"\n]+)" with payload "(.*?)"'
    r" received from server process with PID \d+\.\n",
    re.DOTALL,
)
FENCE = count(1)

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


class Printed(NamedTuple):
    """What psql printed: lines of text, and the notifications as (channel, payload)."""

    text: str
    notifications: list[tuple[str, str]]

    @property
    def header(self) -> dict[str, Any]:
        """The header of the one notification."""
        [(_, payload)] = self.notifications
        return json.loads(payload.partition("\n")[0])

    @property
    def body(self) -> str:
        """The body of the one notification."""
        [(_, payload)] = self.notifications
        return payload.partition("\n")[2]


class Psql:
    """A psql kept open: it gets what is typed, and gives back what it prints."""

    def __init__(self, program: Path, url: str) -> None:
        self.process = subprocess.Popen(
            [program, "--no-psqlrc", "--no-align", "--tuples-only", "--quiet", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )

    def type(self, sql: str) -> Printed:
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
        return Printed(NOTIFICATION.sub("", text).strip(), NOTIFICATION.findall(text))

    def heard(self) -> list[str]:
        """The events that arrived, as their words."""
        headers = [json.loads(payload) for _, payload in self.type("").notifications]
        return [
            " ".join(header[field] for field in ("Evt", "Ident", "Topic") if field in header)
            for header in headers
        ]

    def close(self) -> None:
        """Close the window: psql gets no chance to say good-bye."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(world: World, server: TestedServer) -> Iterator[Psql]:
    """The owner, who has inserted the rules."""
    psql = Psql(server.psql, server.url())
    assert psql.type(RULES).text == ""
    yield psql
    psql.close()


@pytest.fixture
def nodes(owner: Psql, server: TestedServer) -> Iterator[list[Psql]]:
    """Three psqls of three ordinary roles, each registered as its node."""
    psqls = [Psql(server.psql, server.url(f"user{number}")) for number in (1, 2, 3)]
    for number, psql in enumerate(psqls, 1):
        psql.type(f"SELECT messages.init('NODE{number}');")
    for psql in psqls:
        psql.type("")
    yield psqls
    for psql in psqls:
        psql.close()


@pytest.fixture
def talking(nodes: list[Psql]) -> list[Psql]:
    """NODE1 sends to MYTOPIC, NODE2 and NODE3 listen; all events so far are read."""
    one, two, three = nodes
    two.type("SELECT messages.topic_listen('MYTOPIC');")
    three.type("SELECT messages.topic_listen('MYTOPIC');")
    one.type("SELECT messages.topic_notify('MYTOPIC');")
    for psql in nodes:
        psql.type("")
    return nodes


def test_the_owner_reads_the_rules_he_inserted_in_any_order_of_columns(owner: Psql) -> None:
    printed = owner.type(
        "SELECT role, ident, type, dest, mode, timeout FROM messages.auth ORDER BY type, ident;"
    )
    assert printed.text.splitlines() == [
        "user1|NODE1|Rpc|NODE2|W|5",
        "user2|NODE2|Rpc|NODE1|W|5",
        "user1|NODE1|Topic|MYTOPIC|W|10",
        "user2|NODE2|Topic|MYTOPIC|RW|10",
        "user3|NODE3|Topic|MYTOPIC|R|10",
    ]


def test_init_answers_with_a_channel_of_role_pid_and_chance(
    owner: Psql, server: TestedServer
) -> None:
    psql = Psql(server.psql, server.url("user1"))
    pid = psql.type("SELECT pg_backend_pid();").text
    answer = psql.type("SELECT messages.init('NODE1');").text
    psql.close()
    assert re.fullmatch(rf'\{{"Err":"0","Channel":"user1_{pid}[0-9a-z]{{20,}}"\}}', answer), answer


def test_init_a_second_time_warns_and_says_already(nodes: list[Psql]) -> None:
    text = nodes[0].type("SELECT messages.init('NODE1');").text
    warning, answer = text.splitlines()
    assert warning == "WARNING:  Messages err:6 Client NODE1 exists with same pid"
    assert re.fullmatch(r'\{"Err":"0","Channel":"user1_[0-9a-z]+","Already":1\}', answer)


def test_topic_auth_prints_the_authorized_without_added_spaces(nodes: list[Psql]) -> None:
    printed = nodes[0].type("SELECT messages.topic_auth('MYTOPIC');")
    assert printed.text == '{"Err":"0","Notifiers":["NODE1","NODE2"],"Listeners":["NODE2","NODE3"]}'


def test_topic_status_prints_who_sends_and_listens_now(talking: list[Psql]) -> None:
    printed = talking[2].type("SELECT messages.topic_status('MYTOPIC');")
    assert printed.text == '{"Err":"0","Notifiers":["NODE1"],"Listeners":["NODE2","NODE3"]}'


def test_topic_notify_and_its_undo_say_already_the_second_time(nodes: list[Psql]) -> None:
    texts = [
        nodes[0].type(f"SELECT messages.{function}('MYTOPIC');").text
        for function in ("topic_notify", "topic_notify", "topic_unnotify", "topic_unnotify")
    ]
    assert texts == ['{"Err":"0"}', '{"Err":"0","Already":1}'] * 2


def test_an_event_arrives_as_an_asynchronous_notification(nodes: list[Psql]) -> None:
    one, _, three = nodes
    channel = json.loads(one.type("SELECT messages.init('NODE1');").text.splitlines()[-1])
    three.type("SELECT messages.topic_listen('MYTOPIC');")
    [(heard_on, payload)] = one.type("").notifications
    assert heard_on == channel["Channel"]
    assert re.fullmatch(
        r'\{"Type":"Sys","Evt":"topic_listen","Ident":"NODE3","Topic":"MYTOPIC","Id":\d+\}', payload
    )


def test_a_short_message_arrives_with_its_body_at_every_listener(talking: list[Psql]) -> None:
    one, two, three = talking
    answer = one.type("SELECT messages.topic_send('MYTOPIC', E'Two\\nlines, \"quoted\" — ü');").text
    heard = [two.type(""), three.type("")]
    assert answer == '{"Err":"0"}'
    for printed in heard:
        assert printed.body == 'Two\nlines, "quoted" — ü'
        fields = {name: value for name, value in printed.header.items() if name != "Id"}
        assert fields == {"Type": "Topic", "Size": 26, "To": "MYTOPIC", "From": "NODE1"}


def test_a_long_message_is_fetched_with_get_data(talking: list[Psql]) -> None:
    one, two, _ = talking
    one.type("SELECT messages.topic_send('MYTOPIC', repeat('long ', 2000));")
    [(_, payload)] = two.type("").notifications
    header = json.loads(payload)
    line, _, body = two.type(f"SELECT messages.get_data('{payload}');").text.partition("\n")
    assert header.pop("Dkey").startswith("10.")
    assert json.loads(line) == {"Err": "0", **header}
    assert line.startswith('{"Err":"0",')
    assert body == ("long " * 2000).strip()


def test_an_rpc_and_its_answer_cross_with_the_token(nodes: list[Psql]) -> None:
    one, two, _ = nodes
    asked = one.type("SELECT messages.rpc('NODE2', 'TOKEN_RISPOSTA', 'Parametro');").text
    question = two.type("")
    token = question.header["Token"]
    answered = two.type(f"SELECT messages.return('NODE1', '{token}', 'Risposta');").text
    answer = one.type("")
    assert (asked, answered) == ('{"Err":"0"}', '{"Err":"0"}')
    assert re.fullmatch(r"[0-9a-f]{32,} 5 TOKEN_RISPOSTA", token)
    assert question.header.items() >= {
        "Type": "Rpc", "Size": 9, "To": "NODE2", "From": "NODE1",
    }.items()  # fmt: skip
    assert question.body == "Parametro"
    assert answer.header.items() >= {
        "Type": "Return", "Size": 8, "To": "NODE1", "From": "NODE2", "Token": "TOKEN_RISPOSTA",
    }.items()  # fmt: skip
    assert answer.body == "Risposta"


@pytest.mark.parametrize(
    ("number", "sql", "err", "text"),
    [
        (1, "topic_listen('MYTOPIC')", 3, "cannot auth R with Topic MYTOPIC"),
        (3, "rpc('NODE1', 'T', 'p')", 2, "cannot use Rpc to NODE1"),
        (1, "topic_send('OTHER', 'x')", 9, "Topic OTHER is not existent"),
        (2, "init('NODE3')", 5, "there are no permissions for ident NODE3"),
    ],
)
def test_what_is_not_allowed_gets_a_warning_and_an_answer(
    nodes: list[Psql], number: int, sql: str, err: int, text: str
) -> None:
    printed = nodes[number - 1].type(f"SELECT messages.{sql};")
    assert printed.text.splitlines() == [
        f"WARNING:  Messages err:{err} {text}",
        f'{{"Err":"{err}","Errstr":"{text}"}}',
    ]


def test_a_message_of_a_rolled_back_transaction_never_arrives(talking: list[Psql]) -> None:
    one, two, _ = talking
    one.type("BEGIN; SELECT messages.topic_send('MYTOPIC', 'never'); ROLLBACK;")
    one.type("BEGIN; SELECT messages.topic_send('MYTOPIC', 'kept'); COMMIT;")
    assert two.type("").body == "kept"


def test_a_psql_that_is_closed_is_reported_as_crashed(talking: list[Psql], world: World) -> None:
    one, two, three = talking
    pid = three.type("SELECT pg_backend_pid();").text
    three.close()
    world.wait_for("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", int(pid))
    evaluated = two.type("SELECT messages.evaluate();").text
    assert evaluated == '{"Err":"0","Events":2}'
    assert one.heard() == ["topic_unlisten NODE3 MYTOPIC", "crash NODE3"]
    assert two.type("SELECT messages.topic_status('MYTOPIC');").text == (
        '{"Err":"0","Notifiers":["NODE1"],"Listeners":["NODE2"]}'
    )


def test_deinit_ends_the_sending_and_then_the_node(talking: list[Psql]) -> None:
    one, two, _ = talking
    texts = [one.type("SELECT messages.deinit('NODE1');").text for _ in range(2)]
    assert texts == ['{"Err":"0"}', '{"Err":"0","Already":1}']
    assert two.heard() == [
        "topic_unnotify NODE1 MYTOPIC",
        "topic_none_notify MYTOPIC",
        "disconnect NODE1",
    ]


def test_debug1_logs_each_command_and_no_event(nodes: list[Psql]) -> None:
    nodes[0].type("SET client_min_messages = DEBUG1;")
    lines = nodes[0].type("SELECT messages.topic_notify('MYTOPIC');").text.splitlines()
    assert "DEBUG:  Messages command: topic_notify MYTOPIC" in lines
    assert not any("Messages event" in line for line in lines)


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


def test_debug1_logs_every_command_by_its_name_and_no_token(talking: list[Psql]) -> None:
    talking[0].type("SET client_min_messages = DEBUG1;")
    printed = [talking[0].type(f"SELECT messages.{call};").text for call in CALLS]
    logged = re.findall(r"^DEBUG:  Messages command: (\w+)", "\n".join(printed), re.MULTILINE)
    assert logged == [call.partition("(")[0] for call in CALLS]
    assert "SECRET" not in "".join(printed)


def test_debug2_logs_each_event_too(nodes: list[Psql]) -> None:
    nodes[0].type("SET client_min_messages = DEBUG2;")
    lines = nodes[0].type("SELECT messages.topic_notify('MYTOPIC');").text.splitlines()
    assert "DEBUG:  Messages command: topic_notify MYTOPIC" in lines
    assert "DEBUG:  Messages event: topic_notify NODE1 MYTOPIC" in lines


def test_by_default_nothing_is_logged(nodes: list[Psql]) -> None:
    printed = nodes[0].type("SELECT messages.topic_notify('MYTOPIC');")
    assert printed.text == '{"Err":"0"}'
