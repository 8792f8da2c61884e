"""PubSub on the real database: messages arrive, in the documented format."""

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings

from psqlmessages import PubSub
from psqlmessages.exceptions import NodeClosed
from psqlmessages.pubsub import Event
from psqlmessages.pubsub.segments import cut
from tests.django.waiting import wait_until
from tests.pubsub.conftest import SECONDS, Connect, NewBus, Receiver
from tests.pubsub.test_format import json_values, texts
from tests.sql.conftest import Program

MB = 1_000_000
# All examples share the bus and its receiver.
ALLOWED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def test_published_bodies_arrive_unchanged(any_bus: NewBus):
    bus, receiver, called = any_bus(), Receiver(), []
    assert bus.subscribe("A")
    assert not bus.subscribe("A")
    for handler in (receiver, called.append):
        bus.on("A", handler)
    payloads = [None, "", "text", {"a": 1}, "é", "x" * 7998, "x" * 7999]
    for payload in payloads:
        bus.publish("A", payload)
    pid = bus.connection.info.backend_pid
    assert [receiver.event() for _ in payloads] == [Event(pid, "A", each) for each in payloads]
    wait_until(lambda: len(called) == len(payloads))
    bus.publish("A", "я" * 5 * MB)
    # Compare first: pytest would explain a difference of 10 MB.
    is_equal = receiver.payload() == "я" * 5 * MB
    assert is_equal
    assert bus.unsubscribe("A")
    assert not bus.unsubscribe("A")
    assert not bus.unsubscribe("never")
    bus.on("B", receiver)
    bus.subscribe("B")
    bus.publish("A", "unheard")
    bus.publish("B", "heard")
    assert receiver.payload() == "heard"


@settings(max_examples=25, suppress_health_check=ALLOWED)
@given(texts | json_values.filter(lambda value: type(value) is not str))
@example("\0" * 10 * MB)
@example({"rows": [{"id": number, "name": f"n°{number}"} for number in range(100_000)]})
def test_every_text_and_json_value_arrives(bus: PubSub, receiver: Receiver, payload: object):
    bus.publish("A", payload)
    is_equal = receiver.payload() == payload
    assert is_equal


@pytest.mark.parametrize("is_shared", [True, False])
def test_long_messages_of_two_writers_arrive(any_bus: NewBus, receiver: Receiver, is_shared: bool):
    first = any_bus()
    buses = [first, first if is_shared else any_bus()]

    def write(number: int) -> None:
        for count in range(10):
            buses[number].publish("A", f"{number} {count} " + "я" * 20_000)

    with ThreadPoolExecutor(2) as threads:
        writing = threads.map(write, (0, 1))
        heard = [receiver.payload().split(" ", 2) for _ in range(20)]
        list(writing)
    for number in "01":
        assert [int(count) for n, count, _ in heard if n == number] == list(range(10))
    assert {rest for *_, rest in heard} == {"я" * 20_000}


def test_an_open_batch_waits_for_its_writer(bus: PubSub, receiver: Receiver, connect: Connect):
    dropped, writer = bus.counters.unfinished, connect()
    writer.execute("NOTIFY \"A\", '#Ic'")
    checks = bus._state._keep_alive_at
    wait_until(lambda: bus._state._keep_alive_at > checks + 0.35)
    writer.execute("NOTIFY \"A\", '$Op'")
    assert receiver.payload() == "é"
    writer.execute("SELECT pg_notify('A', %s)", ("#" + "A" * 7998,))
    bus.publish("A", "fence")
    assert receiver.payload() == "fence"
    assert bus._state._assembler.senders == {writer.info.backend_pid}
    writer.close()
    wait_until(lambda: bus.counters.unfinished == dropped + 1)
    assert bus._state._assembler.size == 0


def test_unfinished_messages_are_bounded_by_settings(new_bus: NewBus, connect: Connect):
    bus = new_bus(max_unfinished=2, max_unfinished_bytes=20_000)
    receiver = Receiver.of(bus)
    for segments in (["#Ic"], ["#Ic"], ["#Ic"], ["#" + "A" * 7000] * 10, ["!fence"]):
        writer = connect()
        for segment in segments:
            writer.execute("SELECT pg_notify('A', %s)", (segment,))
    assert receiver.payload() == "fence"
    assert bus._state._assembler.size <= 20_000
    assert bus.counters.unfinished >= 3


def test_a_channel_of_any_name_works_and_of_a_bad_name_is_refused_everywhere(bus: PubSub):
    for channel in (
        "a", "A b", "channel:A", "x;'--\\", "%s", "канал", "\t\n", "select", "я" * 31 + "x",
    ):  # fmt: skip
        receiver = Receiver.of(bus, channel)
        bus.publish(channel, 1)
        assert receiver.event()[1:] == (channel, 1)
        assert bus.unsubscribe(channel)
    bad: list[tuple[Any, type[Exception], str]] = [
        ("", ValueError, "the channel name is empty"), ('a"b', ValueError, "a double quote"),
        ("a\0b", ValueError, "a NUL character"), ("x" * 64, ValueError, "at most 63 bytes, not 64"),
        ("я" * 32, ValueError, "at most 63 bytes, not 64"),
        ("\udc00", ValueError, "lone surrogate"),
        (5, TypeError, "a channel must be a str, not int"),
        (None, TypeError, "a channel must be a str, not NoneType"),
    ]  # fmt: skip
    for name, error, text in bad:
        for use in (bus.subscribe, bus.unsubscribe, bus.publish, lambda name: bus.on(name, print)):
            with pytest.raises(error, match=text):
                use(name)


def test_bad_input_sends_nothing_and_the_bus_goes_on(bus: PubSub, listener: Program):
    bad: list[tuple[Any, type[Exception], str]] = [
        (b"x", TypeError, "type bytes cannot be sent"),
        ({1, 2}, TypeError, "type set cannot be sent: Object of type set is not JSON"),
        ({"a": object()}, TypeError, "type dict cannot be sent: Object of type object"),
        (float("nan"), ValueError, "not JSON compliant"),
        ([float("inf")], ValueError, "not JSON compliant"),
        ("ab\ud800", ValueError, "lone surrogate at position 2"),
        ("я" * 12 * MB, ValueError, "a message can have at most 23991000 bytes"),
    ]
    for payload, error, text in bad:
        with pytest.raises(error, match=text):
            bus.publish("A", payload)
    bus.publish("A", "good")
    assert listener.payloads() == ["!good"]
    assert bus.counters.published == 1


def test_skip_self_drops_messages_of_the_same_connection(any_bus: NewBus, raw: Any):
    bus = any_bus(skip_self=True)
    receiver = Receiver.of(bus)
    bus.publish("A", "own")
    bus.publish("A", "я" * 9000)
    raw("!other")
    assert receiver.payload() == "other"
    assert (bus.counters.skipped, bus.counters.delivered) == (2, 1)


def test_malformed_notifications_are_counted_and_ignored(bus: PubSub, receiver: Receiver, raw: Any):
    malformed = bus.counters.malformed
    segments = (
        "text", "é", "@", "@{", "@nope", "@NaN", "@" + "[" * 7_900, "$", "$====", "$IcO", "$YWJj",
        "$IcM=", "$Ic\nOp", cut(base64.b64encode(b"!" + b"x" * 10_000).decode())[-1],
    )  # fmt: skip
    for segment in segments:
        raw(segment)
    raw("!well")
    assert receiver.payload() == "well"
    assert bus.counters.malformed == malformed + len(segments)


def test_handlers_are_called_in_their_order_until_they_are_removed(bus: PubSub, receiver: Receiver):
    called: list[int] = []
    handlers = [lambda _: called.append(1), lambda _: called.append(2)]
    for handler in (*handlers, receiver):
        bus.on("B", handler)
    bus.subscribe("B")
    for is_on in (True, False):
        bus.publish("B")
        receiver.event()
        assert bus.off("B", handlers[0]) == is_on
    assert called == [1, 2, 2]


def test_a_failing_handler_is_counted_and_others_are_called(any_bus: NewBus, caplog):
    bus = any_bus()
    bus.on("failing", lambda event: 1 / event.payload)
    receiver = Receiver.of(bus, "failing")
    bus.publish("failing", 0)
    bus.publish("failing", 1)
    assert [receiver.payload(), receiver.payload()] == [0, 1]
    assert bus.counters.handler_failures == 1
    assert "a handler of channel failing failed" in caplog.text


def test_a_handler_may_use_the_bus_and_close_it(new_bus: NewBus):
    bus, receivers = new_bus(), []

    def answer(event: Event) -> None:
        receivers.append(Receiver.of(bus, "answers"))
        bus.on("answers", lambda _: bus.close())
        bus.publish("answers", event.payload * 2)

    bus.subscribe("questions")
    bus.on("questions", answer)
    bus.publish("questions", "я" * 10_000)
    bus.run()
    assert receivers[0].payload() == "я" * 20_000
    assert bus.connection is None


def test_coroutine_functions_and_non_functions_are_refused(bus: PubSub):
    async def handler(event: Event) -> None:
        """Never called."""

    with pytest.raises(TypeError, match="use AsyncPubSub"):
        bus.on("A", handler)
    with pytest.raises(TypeError, match="must be callable"):
        bus.on("A", "print")  # type: ignore[arg-type]


def test_a_bus_that_is_closed_says_so_and_run_returns(any_bus: NewBus):
    bus = any_bus()
    bus.subscribe("A")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(bus.run)
        bus.close()
        waiting.result(SECONDS)
    assert not bus.is_healthy
    for use in (bus.open, lambda: bus.publish("A"), lambda: bus.subscribe("B")):
        with pytest.raises(NodeClosed, match="the bus is closed"):
            use()
    bus.close()


def test_wrong_settings_are_refused(any_bus: NewBus, new_bus: NewBus, connect: Connect):
    for setting in ("interval", "max_unfinished", "max_unfinished_bytes"):
        with pytest.raises(ValueError, match=f"{setting} must be more than 0, not 0"):
            any_bus(**{setting: 0})
    with pytest.raises(TypeError, match=r"Connection or str, not object"):
        any_bus(object())
    connection = connect()
    connection.close()
    with pytest.raises(NodeClosed, match="given to the bus is closed"):
        new_bus(connection).subscribe("A")


def test_only_own_commits_skip_the_disk(bus: PubSub, new_bus: NewBus, connect: Connect):
    given = connect()
    new_bus(given).subscribe("A")
    for connection, setting in ((bus.connection, "off"), (given, "on")):
        assert isinstance(connection, psycopg.Connection)
        assert connection.execute("SHOW synchronous_commit").fetchone() == (setting,)
