"""Bodies over the limit of NOTIFY: kept once, fetched by those they are for, and then over."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.core.management import call_command
from pytest_django import DjangoDbBlocker, Settings

from tests.sql.conftest import Program, World, parse

KIB = 1024
MIB = 1024 * KIB
LONG = "x" * 20_000
KEPT = "SELECT count(*) FROM psqlmessages_body"
PROLONG = "UPDATE psqlmessages_body SET expires_at = expires_at + %s"


@pytest.fixture
def payload(pair: tuple[Program, Program]) -> str:
    """The payload of a long message of SENDER to T."""
    sender, listener = pair
    sender.ok("topic_send", "T", LONG)
    return listener.payloads(1)[0]


def missing(payload: str) -> tuple[dict[str, str], None]:
    """The answer to a key that does not exist, or that must seem so."""
    return {"Err": "13", "Errstr": f"Message {parse(payload)['Dkey']} not exists"}, None


@pytest.mark.parametrize("enc", [None, "json"])
def test_the_line_of_get_data_is_the_header_received_without_its_key(
    pair: tuple[Program, Program], enc: str | None
) -> None:
    sender, listener = pair
    sender.ok("topic_send", "T", LONG, "TOKEN", enc)
    [payload] = listener.payloads()
    header = json.loads(payload)
    line, body = listener.data(payload)
    assert re.fullmatch(r"1000\.[0-9a-z.]+", header.pop("Dkey"))
    assert line == {"Err": "0", **header}
    assert (header["Size"], body) == (20_000, LONG)
    assert listener.query("SELECT messages.get_data(%s)", payload).startswith('{"Err":"0",')


@pytest.mark.parametrize("size", [8 * KIB, MIB, 50 * MIB], ids=["8kB", "1MB", "50MB"])
def test_a_body_comes_back_whole(pair: tuple[Program, Program], size: int) -> None:
    sender, listener = pair
    body = "0123456789abcé\n" * (size // 16)
    sender.ok("topic_send", "T", body)
    [payload] = listener.payloads()
    assert parse(payload)["Size"] == size
    assert listener.data(payload)[1] == body


def test_a_body_is_kept_once_however_many_receive_it(
    world: World, pair: tuple[Program, Program]
) -> None:
    world.rules("user2 MORE* Topic T R 10", "user3 EYE Topic T O 10")
    sender, *receivers = [*pair, *(world.node("user2", f"MORE{number}") for number in range(3))]
    for receiver in receivers[1:]:
        receiver.ok("topic_listen", "T")
    receivers.append(world.node("user3", "EYE"))
    receivers[-1].ok("topic_observe", "T")
    sender.ok("topic_send", "T", LONG)
    payloads = [receiver.payloads()[-1] for receiver in receivers]
    assert len(set(payloads)) == 1
    assert world.owner.query(KEPT) == 1
    assert [receiver.data(payloads[0])[1] for receiver in receivers] == [LONG] * 5


def test_a_body_can_be_fetched_again(pair: tuple[Program, Program], payload: str) -> None:
    answers = [pair[1].data(payload) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


def test_the_header_comes_from_what_is_kept_not_from_the_caller(
    pair: tuple[Program, Program], payload: str
) -> None:
    key = parse(payload)["Dkey"]
    line, body = pair[1].data(json.dumps({"Dkey": key, "From": "FORGED", "Size": 1}) + "\nforged")
    assert (line["From"], line["Size"], body) == ("SENDER", 20_000, LONG)


def test_who_may_listen_but_does_not_is_told_to(
    pair: tuple[Program, Program], payload: str
) -> None:
    listener = pair[1]
    listener.ok("topic_unlisten", "T")
    refused = listener.data(payload)
    listener.ok("topic_listen", "T")
    assert refused == ({"Err": "11", "Errstr": "You are not listening from topic T"}, None)
    assert listener.data(payload)[1] == LONG


@pytest.mark.parametrize(
    "rule",
    ["user3 THIRD Topic T W 10", "user3 THIRD Topic T O 10", "user3 THIRD Topic U RW 10"],
)
def test_the_body_of_a_topic_without_r_seems_not_to_exist(
    world: World, payload: str, rule: str
) -> None:
    world.rules(rule)
    assert world.node("user3", "THIRD").data(payload) == missing(payload)


def test_the_sender_of_a_body_is_no_reader_of_it(
    pair: tuple[Program, Program], payload: str
) -> None:
    assert pair[0].data(payload) == missing(payload)


def test_an_observer_fetches_while_it_observes(world: World, payload: str) -> None:
    world.rules("user3 EYE Topic T* O 10")
    eye = world.node("user3", "EYE")
    eye.ok("topic_observe", "T*")
    fetched = eye.data(payload)
    eye.ok("topic_unobserve", "T*")
    assert fetched[1] == LONG
    assert eye.data(payload) == missing(payload)


def test_an_observer_of_another_topic_finds_nothing(world: World, payload: str) -> None:
    world.rules("user3 EYE Topic * O 10", "user1 SENDER Topic U W 10")
    eye = world.node("user3", "EYE")
    for observed in ("U", "TT*"):
        eye.ok("topic_observe", observed)
    assert eye.data(payload) == missing(payload)


@pytest.mark.parametrize("login", ["user2", "user3"])
def test_an_observer_opens_nothing_for_others(world: World, payload: str, login: str) -> None:
    world.rules("user3 EYE Topic T* O 10", f"{login} THIRD Topic U R 10")
    world.node("user3", "EYE").ok("topic_observe", "T*")
    assert world.node(login, "THIRD").data(payload) == missing(payload)


def test_a_listener_that_lost_its_right_finds_nothing(
    world: World, pair: tuple[Program, Program], payload: str
) -> None:
    world.owner.connection.execute(
        "DELETE FROM messages.auth WHERE ident = 'LISTENER' AND dest = 'T'"
    )
    assert pair[1].data(payload) == missing(payload)


def test_another_node_of_the_same_session_is_not_the_listener(
    world: World, pair: tuple[Program, Program], payload: str
) -> None:
    world.rules("user2 BESIDE Topic U R 10")
    listener = pair[1]
    listener.ok("init", "BESIDE")
    refused = listener.data(payload)
    listener.ok("use", "LISTENER")
    assert refused == missing(payload)
    assert listener.data(payload)[1] == LONG


def test_the_body_of_an_rpc_is_for_the_node_asked_only(
    world: World, pair: tuple[Program, Program]
) -> None:
    sender, listener = pair
    world.rules("user2 BESIDE Topic T R 10")
    sender.ok("rpc", "LISTENER", "TOKEN", LONG)
    payload = listener.payloads()[-1]
    beside = world.node("user2", "BESIDE")
    beside.ok("topic_listen", "T")
    assert listener.data(payload)[1] == LONG
    assert [beside.data(payload), sender.data(payload)] == [missing(payload)] * 2


def another_slot(found: re.Match[str]) -> str:
    return f".{(int(found[1]) + 1) % 21}"


ALTERED = {
    "another id": lambda key: key[:-1] + ("0" if key[-1] != "0" else "1"),
    "another slot": lambda key: re.sub(r"\.(\d+)", another_slot, key, count=1),
    "a slot that is none": lambda key: re.sub(r"\.\d+", ".21", key, count=1),
    "a slot beyond all numbers": lambda key: re.sub(r"\.\d+", "." + "9" * 20, key, count=1),
    "upper case": lambda key: key[:-32] + "A" * 32,
    "cut": lambda key: key[:-1],
    "longer": lambda key: key + "0",
    "SQL": lambda key: key.replace(".", "_0 WHERE true; --", 1),
    "a newline": lambda key: key + "\n",
}


@pytest.mark.parametrize("alteration", ALTERED)
def test_an_altered_key_finds_nothing(
    pair: tuple[Program, Program], payload: str, alteration: str
) -> None:
    key = ALTERED[alteration](parse(payload)["Dkey"])
    line, body = pair[1].data(json.dumps({"Dkey": key}))
    assert (line["Err"], body) == ("13", None)


@pytest.fixture
def quick(world: World) -> Program:
    """Sends to itself over a topic whose bodies are kept for a second."""
    world.rules("user1 QUICK Topic Q RW 1")
    quick = world.node("user1", "QUICK")
    quick.ok("topic_listen", "Q")
    quick.ok("topic_notify", "Q")
    return quick


def test_an_expired_body_is_told_apart_even_when_it_is_removed(
    world: World, quick: Program
) -> None:
    quick.ok("topic_send", "Q", LONG)
    payload = quick.payloads()[-1]
    world.owner.connection.execute(PROLONG, [timedelta(hours=1)])
    assert quick.data(payload)[1] == LONG
    world.owner.connection.execute(PROLONG, [-timedelta(hours=1)])
    quick.query("SELECT pg_sleep(1.01)")
    key = parse(payload)["Dkey"]
    expired = ({"Err": "12", "Errstr": f"Message {key} expired"}, None)
    assert quick.data(payload) == expired
    world.owner.connection.execute("TRUNCATE psqlmessages_body")
    assert quick.data(payload) == expired


def test_no_alteration_of_its_key_revives_an_expired_body(world: World, quick: Program) -> None:
    quick.ok("topic_send", "Q", LONG)
    payload = quick.payloads()[-1]
    world.owner.connection.execute("UPDATE psqlmessages_body SET expires_at = clock_timestamp()")
    timeout, slot, expiry, chance = parse(payload)["Dkey"].split(".")
    keys = [f"9{timeout}.{slot}.{expiry}.{chance}", f"{timeout}.{slot}.9{expiry}.{chance}"]
    answers = [quick.data(json.dumps({"Dkey": key})) for key in keys]
    assert [(line["Err"] in ("12", "13"), body) for line, body in answers] == [(True, None)] * 2


def test_a_key_says_the_timeout_of_the_rule_first(
    world: World, pair: tuple[Program, Program]
) -> None:
    world.rules("user3 SLOW Topic T W 86400")
    slow = world.node("user3", "SLOW")
    slow.ok("topic_notify", "T")
    slow.ok("topic_send", "T", LONG)
    payload = pair[1].payloads()[-1]
    assert parse(payload)["Dkey"].startswith("86400.")


@pytest.fixture
def smaller_maximum(settings: Settings, django_db_blocker: DjangoDbBlocker) -> Iterator[int]:
    """Django's setting says 10,000 bytes, and migrate has written it."""
    with django_db_blocker.unblock():
        settings.PSQLMESSAGES = {"MAX_BODY_BYTES": 10_000}
        call_command("migrate", verbosity=0)
        yield 10_000
        settings.PSQLMESSAGES = {}
        call_command("migrate", verbosity=0)


def test_the_maximum_of_djangos_settings_binds_every_connection(
    pair: tuple[Program, Program], smaller_maximum: int
) -> None:
    sender, listener = pair
    sender.ok("topic_send", "T", "x" * smaller_maximum)
    refused = sender.error("topic_send", "T", "x" * (smaller_maximum + 1))
    assert refused == (51, "body of 10001 bytes exceeds 10000")
    assert [parse(payload)["Size"] for payload in listener.payloads()] == [smaller_maximum]
