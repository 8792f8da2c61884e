"""How a subscription begins, lives, is refused and ends."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Timer
from time import monotonic

import pytest

from psqlmessages import AsyncSubscription, Node, Subscription, exceptions
from psqlmessages.client import subscription
from tests.client.nodes import NOW, offered
from tests.client.programs import PROMPTLY
from tests.sql.conftest import World
from tests.streams.client.conftest import SOON, NewReader
from tests.streams.client.test_client_reading import all_there_is, bodies


def test_who_was_away_for_longer_than_the_timeout_is_told(
    stream: World, writer: Node, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    with new_reader() as node:
        node.subscribe("NEWS", timedelta(minutes=3))
    writer.publish("NEWS", "kept")
    pass_time(stream, minutes=2)
    with new_reader() as node:
        assert all_there_is(node) == ["kept"]
        assert (node.subscription("NEWS").is_recovered, node.counters.gaps) == (True, 0)
    writer.publish("NEWS", "missed")
    pass_time(stream, minutes=6)
    with new_reader() as node:
        messages = node.subscribe("NEWS", timedelta(minutes=1))
        assert not node.subscription("NEWS").is_recovered
        assert node.counters.gaps == 1
        assert "timed out; messages before" in caplog.text
        writer.publish("NEWS", "new")
        assert next(messages).body == "new"
    with new_reader() as node:
        node.subscribe("NEWS")
        assert (node.subscription("NEWS").is_recovered, node.counters.gaps) == (True, 0)


def pass_time(stream: World, minutes: int) -> None:
    age = "UPDATE psqlmessages_subscription SET pinged_at = pinged_at - make_interval(mins => %s)"
    stream.execute(age, [minutes])


def test_a_slow_reader_pings(writer: Node, reader: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = reader.subscribe("NEWS", timedelta(minutes=1))
    writer.publish_many("NEWS", range(10))
    assert bodies(messages, 3) == [0, 1, 2]
    before = reader.subscription("NEWS")
    assert before.backlog == 10
    now = monotonic()
    monkeypatch.setattr(subscription, "monotonic", lambda: now + 21)
    assert bodies(messages, 1) == [3]
    after = reader.subscription("NEWS")
    assert after.expires > before.expires
    assert after.backlog == 7


@pytest.mark.usefixtures("no_second_look")
def test_a_waiting_reader_pings(stream: World, writer: Node, reader: Node) -> None:
    messages = reader.subscribe("NEWS", timedelta(seconds=6), idle=SOON)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, messages)
        stream.wait_for(
            "SELECT pinged_at > started_at + interval '1 s' FROM psqlmessages_subscription"
        )
        writer.publish("NEWS", "x")
        assert waiting.result(SOON.total_seconds()).body == "x"


@pytest.mark.parametrize("how", [Node.stop, Node.close])
def test_stop_and_close_end_iteration_at_once(reader: Node, how: Callable[[Node], None]) -> None:
    messages = reader.subscribe("NEWS")
    Timer(0.3, how, (reader,)).start()
    began = monotonic()
    assert list(messages) == []
    assert monotonic() - began < 0.3 + PROMPTLY


def test_stop_passes_what_the_caller_has_done(writer: Node, new_reader: NewReader) -> None:
    with new_reader() as node:
        messages = node.subscribe("NEWS")
        writer.publish_many("NEWS", range(5))
        for message in messages:
            if message.body == 2:
                node.stop()
    with new_reader() as node:
        assert all_there_is(node) == [3, 4]


def test_unsubscribe_ends_the_subscription_and_who_iterates(writer: Node, reader: Node) -> None:
    messages = reader.subscribe("NEWS")
    writer.publish_many("NEWS", range(3))
    assert bodies(messages, 1) == [0]
    with ThreadPoolExecutor() as pool:
        writer.publish("NEWS.1", "made")
        waiting = pool.submit(list, reader.subscribe("NEWS.1"))
        assert reader.unsubscribe("NEWS") is True
        assert reader.unsubscribe("NEWS") is False
        assert list(messages) == []
        assert not waiting.done()
        assert reader.unsubscribe("NEWS.1") is True
        assert waiting.result(PROMPTLY) == []
    with pytest.raises(exceptions.NotSubscribed):
        reader.subscription("NEWS")


def test_refusals_are_exceptions(
    stream: World, writer: Node, reader: Node, new_reader: NewReader
) -> None:
    with pytest.raises(exceptions.NodeClosed, match="not open yet"):
        new_reader().subscribe("NEWS")
    with pytest.raises(exceptions.TopicNotExistent):
        reader.subscribe("NEWS.UNHEARD")
    with pytest.raises(exceptions.ModeNotAuthorized):
        writer.subscribe("NEWS")
    with pytest.raises(exceptions.ModeNotAuthorized):
        reader.publish("NEWS", "x")
    for options in ({"timeout": NOW}, {"max_rows": 0}):
        with pytest.raises(exceptions.NotPositive):
            reader.subscribe("NEWS", **options)
    with pytest.raises(ValueError, match="at most 2147483647 seconds, not 2147483648"):
        reader.subscribe("NEWS", timeout=timedelta(seconds=2**31))
    messages = reader.subscribe("NEWS")
    stream.rules("user2 READER Topic OTHER R 60")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, messages)
        stream.execute("DELETE FROM messages.auth WHERE mode = 'R' AND dest = 'NEWS*'")
        with pytest.raises(exceptions.DestinationNotAuthorized):
            waiting.result(SOON.total_seconds())


def test_events_do_not_pile_up(writer: Node, reader: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psqlmessages.client.node_state._MAX_UNREAD_EVENTS", 3)
    messages = reader.subscribe("NEWS", idle=NOW)
    for number in range(5):
        writer.topic_notify("NEWS")
        writer.topic_unnotify("NEWS")
        writer.publish("NEWS", number)
        assert bodies(messages, 1) == [number]
    assert len(reader._state.inbox) == 3
    assert reader.counters.dropped_events >= 5


def test_sync_and_async_subscriptions_offer_the_same() -> None:
    sync, asynchronous = offered(Subscription), offered(AsyncSubscription)
    assert sync == asynchronous | {"__init__": sync["__init__"]}
