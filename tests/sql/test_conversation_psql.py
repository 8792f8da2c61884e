"""A conversation in plain psql, without Python; and what calls print for debugging."""

import re
import subprocess

from tests.conftest import TestedServer
from tests.sql.conftest import World, parse

NOTIFICATION = re.compile(
    r'Asynchronous notification "([^"\n]+)" with payload "(.*?)"'
    r" received from server process with PID \d+\.\n",
    re.DOTALL,
)
OPTIONS = "--no-psqlrc", "--no-align", "--tuples-only", "--quiet"
OK, ALREADY = '{"Err":"0"}', '{"Err":"0","Already":1}'
WARNING = "WARNING:  Messages err:6 Client NODE2 exists with same pid"
# What is called, and what psql prints: one node, which sends to itself.
TYPED = (
    ("init('NODE2')", '{"Err":"0","Channel":"CHANNEL"}'),
    ("topic_listen('T')", OK),
    ("topic_notify('T')", OK),
    ("topic_auth('T')",
     '{"Err":"0","Notifiers":["NODE2"],"Listeners":["NODE2","NODE3"]}'),
    ("topic_status('T')", '{"Err":"0","Notifiers":["NODE2"],"Listeners":["NODE2"]}'),
    ("init('NODE2')", 'WARN\n{"Err":"0","Channel":"CHANNEL","Already":1}'),
    ("topic_send('T', E'Two\\nlines, \"quoted\" — ü')", OK),
    ("topic_send('T', 'never'); ROLLBACK", OK),
    ("topic_send('T', repeat('long ', 2000))", OK),
    ("rpc('NODE2', 'TOKEN', 'question')", OK),
    ("deinit('NODE2')", OK),
    ("deinit('NODE2')", ALREADY),
)  # fmt: skip


def typed(call: str) -> str:
    begin = "BEGIN; " if call.endswith("ROLLBACK") else ""
    return f"{begin}SELECT messages.{call};\n\\echo ---\n"


def test_nodes_talk_over_a_topic(world: World, server: TestedServer) -> None:
    world.rules(
        "user2 NODE2 Topic T RW 10", "user3 NODE3 Topic T R 10", "user2 NODE2 Rpc NODE2 W 5"
    )
    printed = subprocess.run(
        [server.psql, *OPTIONS, server.url("user2")],
        input="".join(typed(call) for call, _ in TYPED),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=True,
    ).stdout  # fmt: skip
    channels, payloads = zip(*NOTIFICATION.findall(printed), strict=True)
    answers = [answer.strip() for answer in NOTIFICATION.sub("", printed).split("---\n")]
    assert re.fullmatch(r"user2_\d+[0-9a-f]{32}", channels[0])
    assert answers == [
        *(text.replace("CHANNEL", channels[0]).replace("WARN", WARNING) for _, text in TYPED), "",
    ]  # fmt: skip
    assert set(channels) == {channels[0]}
    short, large, question = map(parse, payloads)
    assert isinstance(short.pop("Id"), int)
    assert short == {
        "Type": "Topic", "Size": 26, "To": "T", "From": "NODE2", "Body": 'Two\nlines, "quoted" — ü',
    }  # fmt: skip
    assert (large["Size"], large["Dkey"].partition(".")[0]) == (10_000, "10")
    assert re.fullmatch(r"[0-9a-f]{32,} 5 TOKEN", question["Token"])


CALLS: list[tuple[object, ...]] = [
    ("evaluate",), ("init", "NODE1"), ("use", "NODE1"), ("audience", "{}"),
    *((f"topic_{name}", "MYTOPIC") for name in ("auth", "status", "notify")),
    ("topic_send", "MYTOPIC", "x"),
    *((f"topic_{name}", "MYTOPIC")
      for name in ("unnotify", "listen", "unlisten", "observe", "unobserve")),
    ("topic_send_many", "MYTOPIC", ["x"]), ("topic_send_as", "NODE1", "MYTOPIC", "x"),
    ("rpc", "NODE2", "SECRET", "x"), ("return", "NODE2", "SECRET", "x"),
    ("return_error", "NODE2", "SECRET", "x"), ("get_data", "{}"), ("deinit", "NODE1"),
]  # fmt: skip


def test_debug1_logs_each_command_without_token_and_debug2_events(spec_world: World) -> None:
    node = spec_world.node("user1", "NODE1")
    spec_world.node("user2", "NODE2")
    node.payloads()
    node.ok("topic_notify", "MYTOPIC")
    node.ok("topic_unnotify", "MYTOPIC")
    assert node.warnings == [], "by default nothing is logged"
    command = "DEBUG: Messages command: topic_notify MYTOPIC"
    node.execute("SET client_min_messages = DEBUG2")
    node.ok("topic_notify", "MYTOPIC")
    assert {command, "DEBUG: Messages event: topic_notify NODE1 MYTOPIC"} <= set(node.warnings)
    node.ok("topic_unnotify", "MYTOPIC")
    node.execute("SET client_min_messages = DEBUG1")
    node.warnings.clear()
    for function, *arguments in CALLS:
        node.call(str(function), *arguments)
    printed = "\n".join(node.warnings)
    logged = re.findall(r"^DEBUG: Messages command: (\w+)", printed, re.MULTILINE)
    assert logged == [function for function, *_ in CALLS]
    assert command in node.warnings
    assert "Messages event" not in printed
    assert "SECRET" not in printed
