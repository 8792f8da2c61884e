"""A node reads a subscription: how it begins, what comes, what comes again, how it ends."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from threading import Timer
from time import monotonic

import pytest
from psycopg.conninfo import make_conninfo

from psqlmessages import AsyncNode, Node, Options, Subscription, exceptions
from psqlmessages.client import subscription
from tests.client.nodes import NOW, QUICK, end_backend, in_a_loop
from tests.client.programs import PROMPTLY
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.sql.conftest import World
from tests.streams.client.conftest import HOURS, NO_POLLING, SOON, NewReader

LONG = timedelta(minutes=3)
PATIENT = replace(QUICK, probe_timeout=LONG, stream_poll_interval=timedelta(hours=1))


def bodies(messages: Subscription, number: int) -> list[object]:
    return [message.body for message in islice(messages, number)]


def all_there_is(node: Node, topic: str = "NEWS", **options: int) -> list[object]:
    return [message.body for message in node.subscribe(topic, idle=NOW, **options)]


@pytest.mark.usefixtures("no_second_look")
def test_stored_messages_come_first_then_live_ones(writer: Node, new_reader: NewReader):
    with new_reader() as node:
        node.subscribe("NEWS", HOURS)
    published = [writer.publish("NEWS", number) for number in range(5)]
    # What it calls by itself comes with time, and is not counted.
    with new_reader(replace(NO_POLLING, evaluate_interval=HOURS, probe_interval=HOURS)) as node:
        messages = node.subscribe("NEWS", HOURS)
        waited = list(islice(messages, 5))
        assert [message.body for message in waited] == [0, 1, 2, 3, 4]
        assert [message.id for message in waited] == [answer.id for answer in published]
        for number in range(5, 8):
            Timer(0.05, writer.publish, ("NEWS", number)).start()
            assert next(messages).body == number
        # Registering, what waited, and twice for each that came: confirmed, woken.
        assert node.counters.calls <= 12


def test_further_arguments_of_the_caller_are_passed(writer: Node, new_reader: NewReader):
    with new_reader() as node:
        messages = node.subscribe("NEWS", idle=NOW)
        writer.publish_many("NEWS", range(5))
        assert [message.body for message in messages] == [0, 1, 2, 3, 4]
        assert node.subscription("NEWS").backlog == 0
    with new_reader() as node:
        assert all_there_is(node) == []


def test_a_kill_loses_no_message(stream: World, writer: Node, new_reader: NewReader):
    with new_reader() as node:
        messages = node.subscribe("NEWS", max_rows=2)
        writer.publish_many("NEWS", range(5))
        assert bodies(messages, 4) == [0, 1, 2, 3]
        # The reader dies with 2 and 3 at hand: without a word, so without `stop` or `close`.
        node._session._connection.close()
        stream.wait_for(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity"
            " WHERE application_name = 'psqlmessages READER')"
        )
        with new_reader() as other:
            assert all_there_is(other) == [2, 3, 4]


def test_a_new_loop_starts_after_the_confirmed_position(writer: Node, reader: Node):
    messages = reader.subscribe("NEWS")
    writer.publish_many("NEWS", range(10))
    taken = list(islice(messages, 6))
    assert next(reader.subscribe("NEWS")).body == 0
    messages.confirm(taken[2])
    assert next(reader.subscribe("NEWS")).body == 3
    messages.confirm()
    messages.confirm()
    assert next(reader.subscribe("NEWS")).body == 6


def test_a_lost_position_gives_no_message_twice(stream: World, writer: Node, reader: Node):
    messages = reader.subscribe("NEWS", max_rows=2)
    writer.publish_many("NEWS", range(6))
    assert bodies(messages, 4) == [0, 1, 2, 3]
    # As after the crash of a server whose last commits were not on the disk yet.
    stream.execute("UPDATE psqlmessages_subscription SET position = position - 2")
    assert bodies(messages, 2) == [4, 5]
    messages.confirm()
    assert all_there_is(reader) == []


@pytest.mark.parametrize(("taken", "left"), [(2, [2, 3, 4]), (1, [2, 3, 4]), (4, [4])])
def test_elements_taken_by_another_reader_hide_no_others(
    stream: World, writer: Node, reader: Node, taken: int, left: list[int]
):
    messages = reader.subscribe("NEWS", max_rows=2, idle=NOW)
    writer.publish_many("NEWS", range(5))
    assert bodies(messages, 2) == [0, 1]
    stream.program("user2").query("SELECT messages.subscribe('READER', 'NEWS', 60, %s)", taken)
    assert [message.body for message in messages] == left


def test_subscriptions_read_elsewhere_are_left(stream: World, writer: Node, reader: Node, caplog):
    messages = reader.subscribe("NEWS")
    other = stream.program("user2")
    writer.publish_many("NEWS", range(3))
    with ThreadPoolExecutor() as pool:
        with other.connection.transaction(force_rollback=True):
            other.query("SELECT messages.subscribe('READER', 'NEWS', 60)")
            waiting = pool.submit(next, messages)
            stream.wait_for(
                "SELECT count(*) = 1 FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND application_name = 'psqlmessages READER'"
            )
            began = monotonic()
            assert reader.subscription("NEWS").is_recovered
            assert monotonic() - began < PROMPTLY
            assert not waiting.done()
        assert waiting.result(SOON.total_seconds()).body == 0
    assert "another reader may have locked" in caplog.text


def test_without_a_wake_it_looks_again_by_itself(writer: Node, new_reader: NewReader):
    with new_reader(Options(stream_poll_interval=timedelta(seconds=0.2))) as node:
        messages = node.subscribe("NEWS")
        node._session._connection.execute("UNLISTEN *")
        writer.publish("NEWS", "unheard")
        assert next(messages).body == "unheard"
        assert node._state.wakeups.count("NEWS") == 1, "it was woken: this proves nothing"


@pytest.mark.usefixtures("no_second_look")
def test_a_rollback_releases_the_messages_behind_it(stream: World, writer: Node, reader: Node):
    messages = reader.subscribe("NEWS", HOURS)
    other = stream.program("user1")
    with ThreadPoolExecutor() as pool:
        with other.connection.transaction(force_rollback=True):
            other.ok("publish", "WRITER", "NEWS", "never committed")
            waiting = pool.submit(next, messages)
            writer.publish("NEWS", "behind")
            wait_until(lambda: reader.counters.received)
            assert reader.subscription("NEWS").backlog == 1
            assert not waiting.done()
        # No wake comes of a rollback.
        assert waiting.result(SOON.total_seconds()).body == "behind"


def test_the_isolation_level_of_a_role_does_not_matter(server: TestedServer, writer: Node):
    options = "-c default_transaction_isolation=serializable"
    with Node("READER", make_conninfo(server.url("user2"), options=options)) as node:
        messages = node.subscribe("NEWS")
        writer.publish("NEWS", "x")
        assert next(messages).body == "x"


def test_threads_share_a_node_that_reads_several_topics(writer: Node, reader: Node):
    topics = [f"NEWS.{number}" for number in range(4)]
    for topic in topics:
        writer.publish(topic, "made")
    reader.topic_listen("NEWS.0")
    subscriptions = [reader.subscribe(topic) for topic in topics]
    live = (m.body for m in reader.messages(SOON) if m.type == "Topic")
    with ThreadPoolExecutor(len(topics) + 1) as pool:
        waits = [pool.submit(bodies, messages, 30) for messages in subscriptions]
        waits.append(pool.submit(lambda: list(islice(live, 30))))
        for number in range(30):
            for topic in topics:
                assert writer.publish(topic, number)[1:] == (int(topic == "NEWS.0"), 1)
        for wait in waits:
            assert wait.result(SOON.total_seconds()) == list(range(30))
    assert "published" not in {message.event for message in reader.messages(NOW)}


@pytest.mark.usefixtures("no_second_look")
def test_readers_on_other_connections_are_woken(stream: World, writer: Node, reader: Node):
    own = stream.program("user2")
    read = "SELECT payload FROM messages.subscribe('READER', 'NEWS', 60)"
    assert own.query(read) is None
    # The first time there is always reason: whatever came before.
    assert reader.wait_published("NEWS", SOON) is True
    assert reader.wait_published("NEWS", timedelta(seconds=0.1)) is False
    Timer(0.1, writer.publish, ("NEWS", "woken")).start()
    assert reader.wait_published("NEWS", SOON) is True
    assert own.query(read) == "woken"
    writer.publish("NEWS", "meanwhile")
    assert reader.wait_published("NEWS", SOON) is True


@pytest.mark.usefixtures("no_second_look")
def test_a_new_connection_reads_on(stream: World, writer: Node, new_reader: NewReader):
    with new_reader(PATIENT) as node, ThreadPoolExecutor() as pool:
        messages = node.subscribe("NEWS", max_rows=4)
        writer.publish_many("NEWS", range(6))
        taken = bodies(messages, 5)
        end_backend(stream, "READER")
        # The reader learns of it when it asks; nothing wakes it but its own return.
        writer.publish("NEWS", 6)
        waiting = pool.submit(bodies, messages, 2)
        assert taken + waiting.result(LONG.total_seconds()) == list(range(7))
        end_backend(stream, "READER")
        writer.publish("NEWS", 7)
        assert next(messages).body == 7
        assert (node.counters.reconnects, node.counters.gaps) == (2, 0)


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_ids_may_come_again(stream: World, writer: Node, reader: Node, is_confirmed: bool):
    messages = reader.subscribe("NEWS", idle=NOW)
    assert list(messages) == []
    before = [writer.publish("NEWS", number).id for number in range(3)]
    assert before[0] is not None
    taken = [message.body for message in (messages if is_confirmed else islice(messages, 3))]
    assert taken == [0, 1, 2]
    # A standby that never had these commits takes over.
    lost = before[0] - 1
    owner = stream.owner.connection
    owner.execute("DELETE FROM psqlmessages_streammessage WHERE id > %s", [lost])
    owner.execute("UPDATE psqlmessages_subscription SET position = %s", [lost])
    owner.execute("SELECT setval('messages._stream_id', %s)", [lost])
    after = [writer.publish("NEWS", number).id for number in range(10, 15)]
    assert before == after[:3]
    assert [message.body for message in messages] == list(range(10, 15))


def test_a_gap_is_reported(stream: World, writer: Node, new_reader: NewReader, caplog):
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


def test_a_slow_reader_pings(writer: Node, reader: Node, monkeypatch):
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
def test_a_waiting_reader_pings(stream: World, writer: Node, reader: Node):
    messages = reader.subscribe("NEWS", timedelta(seconds=6), idle=SOON)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, messages)
        later = "pinged_at > started_at + interval '1 s'"
        stream.wait_for(f"SELECT {later} FROM psqlmessages_subscription")
        writer.publish("NEWS", "x")
        assert waiting.result(SOON.total_seconds()).body == "x"


@pytest.mark.parametrize("how", [Node.stop, Node.close])
def test_stop_and_close_end_iteration_at_once(reader: Node, how: Callable[[Node], None]):
    messages = reader.subscribe("NEWS")
    Timer(0.3, how, (reader,)).start()
    began = monotonic()
    assert list(messages) == []
    assert monotonic() - began < 0.3 + PROMPTLY


def test_stop_forwards_the_elements_that_were_acknowledged(writer: Node, new_reader: NewReader):
    with new_reader() as node:
        messages = node.subscribe("NEWS")
        writer.publish_many("NEWS", range(5))
        for message in messages:
            if message.body == 2:
                node.stop()
    with new_reader() as node:
        assert all_there_is(node) == [3, 4]


def test_unsubscribe_ends_the_subscription_and_its_iterators(writer: Node, reader: Node):
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


def test_refusals_are_exceptions(stream: World, writer: Node, reader: Node, new_reader: NewReader):
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


def test_events_do_not_pile_up(writer: Node, reader: Node, monkeypatch):
    monkeypatch.setattr("psqlmessages.client.node_state._MAX_UNREAD_EVENTS", 3)
    messages = reader.subscribe("NEWS", idle=NOW)
    for number in range(5):
        writer.topic_notify("NEWS")
        writer.topic_unnotify("NEWS")
        writer.publish("NEWS", number)
        assert bodies(messages, 1) == [number]
    assert len(reader._state.inbox) == 3
    assert reader.counters.dropped_events >= 5


@in_a_loop
async def test_it_subscribes_when_awaited_or_first_read(writer: Node, async_reader: AsyncNode):
    async with async_reader as node:
        lazy = node.subscribe("NEWS", idle=NOW)
        with pytest.raises(exceptions.NotSubscribed):
            await node.subscription("NEWS")
        messages = await node.subscribe("NEWS")
        assert messages.topic == "NEWS"
        assert (await node.subscription("NEWS")).is_recovered
        await asyncio.to_thread(writer.publish, "NEWS", "x")
        assert (await anext(messages)).body == "x"
        await messages.confirm()
        assert [message async for message in lazy] == []


@in_a_loop
async def test_a_cancelled_wait_loses_nothing(writer: Node, async_reader: AsyncNode):
    async with async_reader as node:
        messages = await node.subscribe("NEWS", max_rows=7)
        taken: list[object] = []
        cancelled, patience = 0, 0.0
        publish_all = asyncio.to_thread(lambda: [writer.publish("NEWS", n) for n in range(100)])
        publishing = asyncio.create_task(publish_all)
        while len(taken) < 100:
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.wait({waiting}, timeout=patience)
            waiting.cancel()
            try:
                taken.append((await waiting).body)
                patience = 0.0
            except asyncio.CancelledError:
                # Ever longer, until some come through, however slow the machine.
                cancelled, patience = cancelled + 1, 1.5 * patience + 0.0005
        await publishing
        await messages.confirm()
        assert cancelled > 10
        assert taken == list(range(100))
        assert [message async for message in node.subscribe("NEWS", idle=NOW)] == []
