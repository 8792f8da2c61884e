"""Handlers: what is called with what is heard, when, and what it may do."""

import sys
import threading

import pytest

from psqlmessages import PubSub
from psqlmessages.pubsub import Event, line
from tests.client.programs import PROMPTLY
from tests.pubsub.conftest import Connect, Ear, NewBus


def test_handlers_are_called_in_their_order_until_they_are_taken_off(bus: PubSub, ear: Ear) -> None:
    called = []
    handlers = [lambda _: called.append(1), lambda _: called.append(2)]
    for handler in handlers:
        bus.on("handlers", handler)
    bus.on("handlers", ear)
    bus.subscribe("handlers")
    bus.publish("handlers")
    ear.event()
    assert bus.off("handlers", handlers[0])
    assert not bus.off("handlers", handlers[0])
    bus.publish("handlers")
    ear.event()
    assert called == [1, 2, 2]


def test_a_handler_that_fails_is_counted_and_the_others_are_called(
    bus: PubSub, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear()
    bus.subscribe("failing")
    bus.on("failing", lambda event: 1 / event.payload)
    bus.on("failing", ear)
    bus.publish("failing", 0)
    bus.publish("failing", 1)
    assert [ear.payload(), ear.payload()] == [0, 1]
    assert bus.counters.handler_failures == 1
    assert "a handler of channel failing failed" in caplog.text


def test_a_handler_that_wants_to_exit_does_not_end_the_bus(bus: PubSub, ear: Ear) -> None:
    bus.subscribe("exiting")
    bus.on("exiting", lambda _: sys.exit(1))
    bus.publish("exiting")
    bus.publish("A", "still heard")
    assert ear.payload() == "still heard"
    assert bus.counters.handler_failures == 1


def test_nothing_is_heard_after_unsubscribe_though_it_had_come(bus: PubSub, ear: Ear) -> None:
    heard = []

    def once(event: Event) -> None:
        heard.append(event.payload)
        bus.unsubscribe("once")

    bus.subscribe("once")
    bus.on("once", once)
    assert bus.connection is not None
    with bus.connection.transaction():
        for payload in (1, 2):
            bus.publish("once", payload)
        bus.publish("A", "last")
    assert ear.payload() == "last"
    assert heard == [1]


def test_what_a_call_reads_is_delivered_without_waiting_for_the_keep_alive(
    new_bus: NewBus,
) -> None:
    bus, ear = new_bus(interval=600.0), Ear()
    bus.subscribe("A")
    bus.on("A", ear)
    for number in range(1_000):
        bus.publish("A", number)
        assert ear.payload() == number


def test_a_handler_may_use_the_bus(bus: PubSub) -> None:
    ear = Ear()

    def answer(event: Event) -> None:
        bus.subscribe("answers")
        bus.on("answers", ear)
        bus.publish("answers", event.payload * 2)

    bus.subscribe("questions")
    bus.on("questions", answer)
    bus.publish("questions", "я" * 10_000)
    assert ear.payload() == "я" * 20_000


def test_a_coroutine_function_and_what_is_no_function_are_refused(bus: PubSub) -> None:
    async def handler(event: Event) -> None:
        """Never called."""

    with pytest.raises(TypeError, match="AsyncPubSub only"):
        bus.on("A", handler)
    with pytest.raises(TypeError, match="can be called"):
        bus.on("A", "print")  # type: ignore[arg-type]


def test_a_bus_is_closed_though_the_owner_of_its_connection_is_busy(
    new_bus: NewBus, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_CLOSING_SECONDS", 0.2)
    given = connect()
    bus = new_bus(given)
    bus.subscribe("A")
    with given.lock:
        closing = threading.Thread(target=bus.close)
        closing.start()
        bus._line.ended.wait(PROMPTLY)
        assert bus._line.ended.is_set()
    closing.join()
    assert given.execute("SELECT 1").fetchone() == (1,)


def test_a_handler_may_close_the_bus(new_bus: NewBus) -> None:
    bus = new_bus()
    bus.subscribe("closing")
    bus.on("closing", lambda _: bus.close())
    bus.publish("closing")
    bus.run()
    assert bus.connection is None
