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


def test_nodes_talk_over_a_topic(world: World, server: TestedServer):
    world.rules("user2 NODE2 Topic T RW 9", "user3 NODE3 Topic T R 9", "user2 NODE2 Rpc NODE2 W 5")
    printed = subprocess.run(
        [server.psql, *OPTIONS, server.url("user2")],
        input="".join(typed(call) for call, _ in TYPED),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=True,
    ).stdout  # fmt: skip
    channels, payloads = zip(*NOTIFICATION.findall(printed), strict=True)
    assert re.fullmatch(r"user2_\d+[0-9a-f]{32}", channels[0])
    assert [answer.strip() for answer in NOTIFICATION.sub("", printed).split("---\n")] == [
        *(text.replace("CHANNEL", channels[0]).replace("WARN", WARNING) for _, text in TYPED), "",
    ]  # fmt: skip
    assert set(channels) == {channels[0]}
    short, large, question = map(parse, payloads)
    assert isinstance(short.pop("Id"), int)
    assert short == {
        "Type": "Topic", "Size": 26, "To": "T", "From": "NODE2", "Body": 'Two\nlines, "quoted" — ü',
    }  # fmt: skip
    assert (large["Size"], large["Dkey"].partition(".")[0]) == (10_000, "9")
    assert re.fullmatch(r"[0-9a-f]{32,} 5 TOKEN", question["Token"])
