"""PubSub on the real database: what is published is heard, and what travels is the format."""

import inspect
import threading
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from psqlmessages import AsyncPubSub, NodeClosed, PubSub, ServerUnreachable
from psqlmessages.pubsub import Event
from tests.conftest import TestedServer
from tests.pubsub.conftest import SECONDS, Connect, Ear, Listener, NewBus, until
from tests.pubsub.test_segments import json_values, texts

MB = 1_000_000
# The bus and its ear outlive one example, and that does no harm.
REAL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def pid(bus: PubSub) -> int:
    """The process id of the bus's connection."""
    assert bus.connection is not None
    return bus.connection.info.backend_pid


# As the specification shows it


@pytest.mark.parametrize("autocommit", [True, False, None])
def test_a_bus_is_made_and_used_without_further_ado(
    server: TestedServer, connect: Connect, autocommit: bool | None
) -> None:
    """On a connection of one's own, in autocommit or not, or with a connection string."""
    connection = server.url("user2") if autocommit is None else connect(autocommit=autocommit)
    ear = Ear()
    bus = PubSub(connection, interval=1.0, skip_self=False)
    bus.subscribe("channel:A")
    bus.on("channel:A", ear)
    bus.publish("channel:A", {"a": 1})
    bus.publish("channel:A", "текст")
    bus.publish("channel:A")
    assert bus.connection is not None
    pid = bus.connection.info.backend_pid
    assert [ear.event() for _ in range(3)] == [
        Event(pid, "channel:A", {"a": 1}),
        Event(pid, "channel:A", "текст"),
        Event(pid, "channel:A", None),
    ]
    bus.close()


def test_what_travels_is_the_format_to_the_byte(bus: PubSub, listener: Listener) -> None:
    for payload in (None, "", "text", {"a": 1}, "é", "x" * 7998, "x" * 7999):
        bus.publish("A", payload)
    assert listener.segments() == [
        "",
        "!",
        "!text",
        '@{"a":1}',
        "$IcOp",
        "!" + "x" * 7998,
        "#IXh4" + "eHh4" * 1998 + "eH",
        "$h4" + "eHh4" * 666 + "eHg=",
    ]


def test_what_others_write_in_the_format_is_read(ear: Ear, raw: Any) -> None:
    for segment in ("", "!", "!text", '@{"a": 1}', "@null", "$IcOp", "#Ic", "#O", "$p"):
        raw(segment)
    assert [ear.payload() for _ in range(7)] == [None, "", "text", {"a": 1}, None, "é", "é"]


@REAL
@given(texts | st.lists(json_values) | st.dictionaries(texts, json_values))
def test_every_text_and_json_value_arrives_as_it_was(
    bus: PubSub, ear: Ear, payload: object
) -> None:
    bus.publish("A", payload)
    assert ear.payload() == payload


@settings(REAL, max_examples=25)
@given(st.sampled_from(["x", "é", "\0", "я😀", '"', "xyz{"]), st.integers(0, 7), st.randoms())
@example("я", 7, None)
@example("\0", 7, None)
def test_every_size_up_to_10_mb_arrives(
    bus: PubSub, ear: Ear, text: str, digits: int, random: Any
) -> None:
    size = random.randint(1, 10**digits) if random is not None else 10 * MB
    payload = text * max(1, size // len(text.encode()))
    bus.publish("A", payload)
    # Compared before the assertion: pytest would explain how 10 MB differ.
    is_equal = ear.payload() == payload
    assert is_equal


def test_10_mb_of_json_arrive(bus: PubSub, ear: Ear) -> None:
    payload = {"rows": [{"id": number, "name": f"n°{number}"} for number in range(300_000)]}
    bus.publish("A", payload)
    is_equal = ear.payload() == payload
    assert is_equal


# Writers side by side


def test_writers_that_interleave_segment_by_segment_are_told_apart(
    ear: Ear, connect: Connect
) -> None:
    writers = [connect(), connect()]
    for segments in (("#Ic", "#IcO"), ("#O", "$p"), ("$p", "!x")):
        for writer, segment in zip(writers, segments, strict=True):
            writer.execute("SELECT pg_notify('A', %s)", (segment,))
    pids = [writer.info.backend_pid for writer in writers]
    assert [ear.event() for _ in range(3)] == [
        Event(pids[1], "A", "é"),
        Event(pids[0], "A", "é"),
        Event(pids[1], "A", "x"),
    ]


@pytest.mark.parametrize("is_shared", [True, False])
def test_long_messages_of_two_writers_at_once_all_arrive(
    new_bus: NewBus, ear: Ear, is_shared: bool
) -> None:
    """Two threads on one bus, or a bus for each."""
    first = new_bus()
    buses = [first, first if is_shared else new_bus()]

    def write(number: int) -> None:
        for count in range(20):
            buses[number].publish("A", f"{number} {count} " + "я" * 20_000)

    threads = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    heard = [ear.payload().split(" ", 2) for _ in range(40)]
    for thread in threads:
        thread.join()
    for number in "01":
        assert [int(count) for n, count, _ in heard if n == number] == list(range(20))
    assert {rest for *_, rest in heard} == {"я" * 20_000}


def test_what_a_writer_left_unfinished_is_dropped_when_it_is_gone(
    bus: PubSub, ear: Ear, connect: Connect
) -> None:
    dropped = bus.counters.unfinished
    writer = connect()
    writer.execute("SELECT pg_notify('A', %s)", ("#" + "A" * 7998,))
    bus.publish("A", "fence")
    assert ear.payload() == "fence"
    assert bus._subscriptions._assembly.senders == {writer.info.backend_pid}
    writer.close()
    until(lambda: bus.counters.unfinished == dropped + 1)
    assert bus._subscriptions._assembly.size == 0


def test_what_a_living_writer_left_unfinished_waits(
    bus: PubSub, ear: Ear, connect: Connect
) -> None:
    writer = connect()
    writer.execute("NOTIFY \"A\", '#Ic'")
    checks = bus._subscriptions._due_at
    until(lambda: bus._subscriptions._due_at > checks + 0.35)
    writer.execute("NOTIFY \"A\", '$Op'")
    assert ear.payload() == "é"


def test_what_was_unfinished_at_unsubscribe_is_not_joined_with_what_comes_later(
    bus: PubSub, ear: Ear, connect: Connect
) -> None:
    writer, received = connect(), bus.counters.received
    writer.execute("NOTIFY \"A\", '#Ic'")
    until(lambda: bus.counters.received == received + 1)
    bus.unsubscribe("A")
    bus.subscribe("A")
    writer.execute("NOTIFY \"A\", '#IcO'")
    writer.execute("NOTIFY \"A\", '$p'")
    assert ear.payload() == "é"


def test_unfinished_messages_are_bounded_by_settings(new_bus: NewBus, connect: Connect) -> None:
    bus, ear = new_bus(max_unfinished=2, max_unfinished_bytes=20_000), Ear()
    bus.subscribe("A")
    bus.on("A", ear)
    for _ in range(3):
        connect().execute("NOTIFY \"A\", '#Ic'")
    writer = connect()
    for _ in range(10):
        writer.execute("SELECT pg_notify('A', %s)", ("#" + "A" * 7000,))
    writer.execute("NOTIFY \"A\", '!fence'")
    assert ear.payload() == "fence"
    assert bus._subscriptions._assembly.size <= 20_000
    assert bus.counters.unfinished >= 3


# Channels


@pytest.mark.parametrize(
    "channel", ["a", "A b", "channel:A", "x;'--\\", "%s", "канал", "\t\n", "select", "я" * 31 + "x"]
)
def test_a_channel_of_any_name_works(bus: PubSub, channel: str) -> None:
    ear = Ear()
    bus.subscribe(channel)
    bus.on(channel, ear)
    bus.publish(channel, 1)
    assert ear.event()[1:] == (channel, 1)
    assert bus.unsubscribe(channel)


@pytest.mark.parametrize("channel", ["", 'a"b', "a\0b", "x" * 64, "я" * 32, None])
def test_a_channel_of_a_bad_name_is_refused_everywhere(bus: PubSub, channel: Any) -> None:
    for use in (bus.subscribe, bus.unsubscribe, bus.publish, lambda name: bus.on(name, print)):
        with pytest.raises((ValueError, TypeError), match="channel"):
            use(channel)


@pytest.mark.parametrize("payload", [b"x", {1}, float("nan"), "\ud800", "я" * 12 * MB])
def test_bad_input_sends_nothing_and_the_bus_goes_on(
    bus: PubSub, listener: Listener, payload: object
) -> None:
    published = bus.counters.published
    with pytest.raises((ValueError, TypeError)):
        bus.publish("A", payload)
    bus.publish("A", "good")
    assert listener.segments() == ["!good"]
    assert bus.counters.published == published + 1


def test_subscribing_twice_and_unsubscribing_what_was_not_is_no_error(
    bus: PubSub, ear: Ear
) -> None:
    assert bus.subscribe("twice")
    assert not bus.subscribe("twice")
    assert bus.unsubscribe("twice")
    assert not bus.unsubscribe("twice")
    assert not bus.unsubscribe("never")
    bus.on("twice", ear)
    bus.publish("twice", "unheard")
    bus.publish("A", "heard")
    assert ear.payload() == "heard"


def test_skip_self_drops_what_this_connection_sent(new_bus: NewBus, raw: Any) -> None:
    bus, ear = new_bus(skip_self=True), Ear()
    bus.subscribe("A")
    bus.on("A", ear)
    bus.publish("A", "own")
    bus.publish("A", "я" * 9000)
    raw("!other")
    assert ear.payload() == "other"
    assert (bus.counters.skipped, bus.counters.delivered) == (2, 1)


def test_what_is_malformed_is_counted_and_does_no_harm(bus: PubSub, ear: Ear, raw: Any) -> None:
    malformed = bus.counters.malformed
    for segment in ("text", "@{", "$IcO", "$", "é"):
        raw(segment)
    raw("!well")
    assert ear.payload() == "well"
    assert bus.counters.malformed == malformed + 5


# The end


def test_a_bus_that_is_closed_says_so_and_run_returns(new_bus: NewBus) -> None:
    bus = new_bus()
    bus.subscribe("A")
    waiting = threading.Thread(target=bus.run)
    waiting.start()
    bus.close()
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    assert not bus.is_healthy
    for use in (bus.open, lambda: bus.publish("A"), lambda: bus.subscribe("B")):
        with pytest.raises(NodeClosed, match="the bus is closed"):
            use()
    bus.close()


def test_settings_that_make_no_sense_and_servers_that_are_not_there_are_told(
    new_bus: NewBus, connect: Connect
) -> None:
    for setting in ("interval", "max_unfinished", "max_unfinished_bytes"):
        with pytest.raises(ValueError, match=f"{setting} is more than 0, not 0"):
            new_bus(**{setting: 0})
    with pytest.raises(TypeError, match=r"a psycopg\.Connection or a str is needed, not object"):
        PubSub(object())  # type: ignore[arg-type]
    with pytest.raises(ServerUnreachable):
        new_bus("host=127.0.0.1 port=1").open()
    connection = connect()
    connection.close()
    with pytest.raises(NodeClosed, match="given to the bus is closed"):
        PubSub(connection).subscribe("A")


def test_sync_and_async_offer_the_same() -> None:
    def offered(bus_class: type) -> dict[str, list[tuple[str, object, object]]]:
        signatures = {}
        for name, member in inspect.getmembers(bus_class):
            if name.startswith("_") and name != "__init__":
                continue
            parameters = inspect.signature(member).parameters.values() if callable(member) else ()
            signatures[name] = [(p.name, p.kind, p.default) for p in parameters]
        return signatures

    assert offered(PubSub) == offered(AsyncPubSub)
    assert {"subscribe", "unsubscribe", "publish", "on", "off", "run"} <= set(offered(PubSub))


def test_commits_of_the_bus_do_not_wait_for_the_disk_but_yours_are_left_alone(
    bus: PubSub, new_bus: NewBus, connect: Connect
) -> None:
    given = connect()
    new_bus(given).subscribe("A")
    for connection, setting in ((bus.connection, "off"), (given, "on")):
        assert isinstance(connection, psycopg.Connection)
        assert connection.execute("SHOW synchronous_commit").fetchone() == (setting,)
