"""Bodies over the limit of NOTIFY: kept, fetched by those they are for, expired and removed."""

import json
import re
from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker
from pytest_django.fixtures import SettingsWrapper

from psqlmessages.install import write_settings
from tests.sql.conftest import Program, World, parse

KIB = 1024
MIB = 1024 * KIB
KEPT = "SELECT count(*) FROM psqlmessages_body"


def kept_message(pair: tuple[Program, Program], body: str = "x" * 20_000) -> str:
    """The payload of a long message from SENDER, as LISTENER received it."""
    sender, listener = pair
    sender.ok("topic_send", "T", body)
    return listener.payloads(1)[0]


@pytest.mark.parametrize("enc", [None, "json"])
def test_the_line_of_get_data_is_the_header_received_without_its_key(
    pair: tuple[Program, Program], enc: str | None
) -> None:
    sender, listener = pair
    sender.ok("topic_send", "T", "x" * 20_000, "TOKEN", enc)
    [payload] = listener.payloads()
    header = json.loads(payload)
    line, body = listener.data(payload)
    assert re.fullmatch(r"10\.[0-9a-z.]+", header.pop("Dkey"))
    assert line == {"Err": "0", **header}
    assert (header["Size"], body) == (20_000, "x" * 20_000)


@pytest.mark.parametrize("size", [8 * KIB, MIB, 50 * MIB], ids=["8kB", "1MB", "50MB"])
def test_a_body_comes_back_whole(pair: tuple[Program, Program], size: int) -> None:
    sender, listener = pair
    sent = sender.query(
        "SELECT messages.topic_send('T', repeat('0123456789abcdé\n', %s / 16))", size // 17 * 16
    )
    [payload] = listener.payloads()
    expected = "repeat('0123456789abcdé\n', %s / 16)"
    is_whole = listener.query(
        "SELECT split_part(fetched, E'\\n', 1)::json ->> 'Err' = '0'"
        f" AND substr(fetched, strpos(fetched, E'\\n') + 1) = {expected}"
        " FROM messages.get_data(%s) AS fetched",
        size // 17 * 16,
        payload,
    )
    assert (sent, is_whole) == ({"Err": "0"}, True)


def test_50_megabytes_arrive_at_the_program_that_fetches_them(
    pair: tuple[Program, Program],
) -> None:
    sender, listener = pair
    body = "0123456789abcdef" * (50 * MIB // 16)
    payload = kept_message(pair, body)
    assert parse(payload)["Size"] == 50 * MIB
    assert listener.data(payload)[1] == body


def test_a_body_is_kept_once_however_many_receive_it(
    world: World, pair: tuple[Program, Program]
) -> None:
    world.rules("user2 MORE* Topic T R 10", "user3 EYE Topic T O 10")
    others = [world.node("user2", f"MORE{number}") for number in range(3)]
    for other in others:
        other.ok("topic_listen", "T")
    eye = world.node("user3", "EYE")
    eye.ok("topic_observe", "T")
    receivers = [pair[1], *others, eye]
    for receiver in receivers:
        receiver.payloads()
    kept_message(pair)
    [payload] = {payload for receiver in receivers for payload in receiver._waiting or []} or {""}
    assert payload == ""


@pytest.fixture
def short_lived(world: World) -> str:
    """The payload of a body that is over, although nothing was removed yet."""
    world.rules("user1 QUICK Topic Q RW 1")
    node = world.node("user1", "QUICK")
    node.ok("topic_listen", "Q")
    node.ok("topic_notify", "Q")
    node.ok("topic_send", "Q", "x" * 20_000)
    return node.payloads(1)[0]
