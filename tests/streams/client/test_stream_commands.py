"""`stream publish` and `stream subscribe` as programs: what they print, how they end."""

import json
import re
import signal

import pytest

from psqlmessages import Node
from psqlmessages.cli.main import main
from tests.client.programs import PROMPTLY, finished, started
from tests.conftest import TestedServer
from tests.sql.conftest import World

SUBSCRIBE = ("stream", "subscribe", "READER", "NEWS", "60")
PUBLISH = ("stream", "publish", "WRITER", "NEWS")


def waiting(stream: World) -> list[str]:
    reader = stream.program("user2")
    with reader.connection.transaction(force_rollback=True):
        return reader.got("READER", "NEWS")


@pytest.fixture
def subscribed(stream: World, writer: Node) -> World:
    stream.program("user2").query("SELECT messages.subscribe('READER', 'NEWS', 60)")
    return stream


def test_lines_or_one_body_are_published(server: TestedServer, subscribed: World):
    url = server.url("user1")
    done = finished(*PUBLISH, "--batch", "3", dsn=url, typed="one\n\nthree\nfour")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("published 4 in ")
    assert main(["--dsn", url, *PUBLISH, "[1]"]) == 0
    assert main(["--dsn", url, *PUBLISH, '{"a":1}', "--json"]) == 0
    assert waiting(subscribed) == ["one", "", "three", "four", "[1]", '{"a":1}']


def test_each_body_is_printed_once(server: TestedServer, subscribed: World, writer: Node):
    writer.publish_many("NEWS", ["waited\x1b[2J", "too"])
    with started(*SUBSCRIBE, "--count", "3", dsn=server.url("user2")) as program:
        program.until("READER reads NEWS; press Ctrl-C to stop")
        program.until("WRITER: too")
        writer.publish_many("NEWS", ["live", "after"])
        assert program.end() == 0
    assert r"WRITER: waited\x1b[2J" in program.printed
    assert "after" not in program.printed
    assert waiting(subscribed) == ["after"]


def test_json_and_idle_seconds(server: TestedServer, subscribed: World, writer: Node, capsys):
    answers = [writer.publish("NEWS", body) for body in ({"id": 1}, b"\0")]
    subscribed.program("user1").ok("publish", "WRITER", "NEWS", "{", "json")
    subscribe = ["--dsn", server.url("user2"), *SUBSCRIBE]
    assert main([*subscribe, "--json", "--idle", "0"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    published = [(answer.id, "NEWS", "WRITER") for answer in answers]
    assert [(m["id"], m["topic"], m["sender"]) for m in printed[:2]] == published
    assert [m.get("body") for m in printed] == [{"id": 1}, "AA==", None]
    assert printed[1]["enc"] == "b64"
    assert "is malformed" in printed[2]["error"]
    assert printed[0]["published_at"].startswith("20")
    assert main([*subscribe, "--count", "1", "--idle", "0.1"]) == 1
    assert "received 0 in" in capsys.readouterr().err


def test_ctrl_c_keeps_unprinted_messages(server: TestedServer, subscribed: World, writer: Node):
    writer.publish_many("NEWS", range(20_000))
    with started(*SUBSCRIBE, dsn=server.url("user2")) as program:
        program.until("WRITER: 150")
        assert program.interrupt(signal.SIGINT) < PROMPTLY
        assert program.end() == 0
        assert "Traceback" not in program.printed
    printed = [int(number) for number in re.findall(r"WRITER: (\d+)", program.printed)]
    assert 150 < len(printed) < 20_000
    left = [int(body) for body in waiting(subscribed)]
    assert printed == list(range(len(printed)))
    assert left == list(range(left[0], left[0] + 1000))
    if "be delivered again" in program.printed:
        # The signal broke off a query, and the connection with it.
        assert left[0] <= len(printed)
    else:
        # The line at which the signal came may have been printed and not be passed yet.
        assert len(printed) - 1 <= left[0] <= len(printed)
