"""Large bodies: those that wait are fetched some at once, and one that is lost harms no other."""

import asyncio
from datetime import timedelta

import psycopg
import pytest

from psqlmessages import AsyncNode, Message, Node
from psqlmessages.client import calls
from psqlmessages.client.bodies import text_of
from psqlmessages.client.listening import Arrival, Listening
from psqlmessages.client.options import Options
from psqlmessages.exceptions import ConnectionLost, MessageExpired, MessagesError
from psqlmessages.wire import Payload
from tests.client.test_async_node import NewNode

NOW = timedelta(0)
BODIES = [f"{number} Grüße " + "ä\n" * 4_000 for number in range(20)]


def kept(number: int, size: int = 9_000, text: str | None = None) -> Arrival:
    header = {"Type": "Topic", "From": "A", "To": "T", "Size": size, "Dkey": str(number)}
    return Arrival(header, text, f"payload {number}")


def listening_with(*waiting: Arrival) -> Listening:
    listening = Listening("NODE1", Options())
    listening.inbox.extend(waiting)
    return listening


class TestWithoutDatabase:
    def test_what_waits_behind_is_fetched_too_and_not_again(self) -> None:
        small = Arrival({"Type": "Topic", "From": "A", "To": "T"}, "small", "")
        second, third = kept(2), kept(3)
        first, listening = kept(1), listening_with(small, second, third)
        script = text_of(first, listening)
        assert next(script) == calls.get_data_many(["payload 1", "payload 2", "payload 3"])
        with pytest.raises(StopIteration) as end:
            script.send(["one", "two", "three"])
        assert end.value.value == "one"
        for arrival, text in ((small, "small"), (second, "two"), (third, "three")):
            with pytest.raises(StopIteration) as end:
                next(text_of(arrival, listening))
            assert end.value.value == text
        assert listening.counters.fetched == 3

    def test_one_that_is_refused_is_asked_for_by_itself(self) -> None:
        first, second = kept(1), kept(2)
        script = text_of(first, listening_with(second))
        next(script)
        assert script.send([None, "two"]) == calls.get_data("payload 1")
        with pytest.raises(MessageExpired):
            script.throw(MessageExpired("1"))
        assert second.fetched == "two"

    def test_where_they_cannot_be_had_together_each_is_fetched_alone(self) -> None:
        script = text_of(kept(1), listening_with(kept(2)))
        next(script)
        assert script.throw(ConnectionLost("gone")) == calls.get_data("payload 1")
        assert script.throw(ConnectionLost("again")) == calls.get_data("payload 1")
        with pytest.raises(StopIteration) as end:
            script.send(Payload({"Err": "0"}, "one"))
        assert end.value.value == "one"

    def test_what_came_with_the_notification_is_no_body_that_is_kept(self) -> None:
        """Whoever knows the channel can write both, but not into the table of bodies."""
        script = text_of(kept(1, text="forged"), listening_with())
        assert next(script) == calls.get_data("payload 1")

    @pytest.mark.parametrize(("size", "together"), [(9_000, 7), (30_000, 2), (100_000, 1)])
    def test_so_many_as_are_no_burden(self, size: int, together: int) -> None:
        waiting = [kept(number, size) for number in range(2, 40)]
        call = next(text_of(kept(1, size), listening_with(*waiting)))
        assert isinstance(call, calls.Call)
        (asked,) = call.params
        assert (len(asked) if isinstance(asked, list) else 1) == together


def lose_one(owner: psycopg.Connection) -> None:
    """Remove the body of the fourth, as its expiry would."""
    owner.execute("DELETE FROM psqlmessages_body WHERE body LIKE '3 %'")


def check(messages: list[Message]) -> None:
    found = [message for message in messages if message.type == "Topic"]
    assert len(found) == len(BODIES)
    for number, message in enumerate(found):
        if number == 3:
            with pytest.raises(MessagesError):
                _ = message.body
        else:
            assert message.body == BODIES[number]


def test_large_bodies_that_wait_arrive_in_few_calls(
    node1: Node, node2: Node, owner: psycopg.Connection
) -> None:
    node2.topic_listen("ORDERS")
    node1.topic_notify("ORDERS")
    for body in BODIES:
        node1.topic_send("ORDERS", body)
    lose_one(owner)
    # The answer comes after all notifications.
    node2.topic_status("ORDERS")
    before = node2.counters.calls
    check(list(node2.messages(timeout=NOW)))
    assert node2.counters.calls - before < len(BODIES) / 2
    assert node2.counters.fetched == len(BODIES) - 1


def test_an_async_node_does_the_same(
    new_async_node: NewNode, node1: Node, owner: psycopg.Connection
) -> None:
    async def test(node2: AsyncNode) -> None:
        async with node2:
            await node2.topic_listen("ORDERS")
            node1.topic_notify("ORDERS")
            for body in BODIES:
                node1.topic_send("ORDERS", body)
            lose_one(owner)
            await node2.topic_status("ORDERS")
            before = node2.counters.calls
            check([message async for message in node2.messages(timeout=NOW)])
            assert node2.counters.calls - before < len(BODIES) / 2

    asyncio.run(test(new_async_node("NODE2")))
