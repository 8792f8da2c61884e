"""The runner: transactions, failures and retries, concurrency, answers, its end."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from psqlmessages import Message, Options, django
from psqlmessages import handler_worker as running
from psqlmessages.django import node
from psqlmessages.exceptions import CallFailed, MessagesError, TopicNotExistent
from psqlmessages.handler_registry import HandlerRegistry
from psqlmessages.handler_worker import HandlerWorker
from tests.django.waiting import answer_to, wait_until
from tests.sql.conftest import Program, World

MOMENT = timedelta(milliseconds=10)


class Seen:
    """Collects messages of handlers; the thread of the test waits for them."""

    def __init__(self) -> None:
        self.bodies: list[object] = []

    def add(self, body: object) -> None:
        self.bodies.append(body)

    def wait_for(self, number: int) -> list[object]:
        wait_until(lambda: len(self.bodies) >= number)
        return list(self.bodies)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def registry() -> HandlerRegistry:
    return HandlerRegistry()


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch) -> None:
    for name in ("MIN_RETRY_DELAY", "MAX_RETRY_DELAY", "LISTEN_INTERVAL"):
        monkeypatch.setattr(running, name, MOMENT)


@contextmanager
def running_worker(
    registry: HandlerRegistry, options: Options | None = None, **given: Any
) -> Iterator[HandlerWorker]:
    with node("worker", options=options) as worker:
        runner = HandlerWorker(worker, registry, using="default", **given)
        runner.listen()
        thread = threading.Thread(target=runner.run)
        thread.start()
        try:
            yield runner
        finally:
            runner.stop()
            thread.join(60)
            assert not thread.is_alive()


def send(sender: Program, *bodies: str) -> None:
    for body in bodies:
        sender.ok("topic_send", "ORDERS", body)


def test_a_hung_handler_blocks_none(sender: Program, registry: HandlerRegistry, seen: Seen, caplog):
    release = threading.Event()

    @registry.on_topic("ORDERS", atomic=False, ordered=True)
    def handle(message: Message) -> None:
        if message.body == "for ever":
            assert release.wait(60)
        seen.add(message.body)

    with running_worker(registry, stuck_after=timedelta(seconds=0.5)) as runner:
        send(sender, "for ever", "other")
        assert seen.wait_for(1) == ["other"]
        assert (len(runner._stuck), runner.counters.stuck) == (1, 1)
        release.set()
        assert seen.wait_for(2) == ["other", "for ever"]
        wait_until(lambda: not runner._stuck)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "has not returned for" in record.getMessage()
    assert "test_runner.py" in record.getMessage()


def test_too_many_hung_handlers(sender: Program, registry: HandlerRegistry, monkeypatch):
    monkeypatch.setattr(running, "MAX_STUCK", 1)
    release = threading.Event()

    @registry.on_topic("ORDERS", atomic=False)
    def handle(message: Message) -> None:
        assert release.wait(60)

    with node("worker") as worker:
        stuck = timedelta(seconds=0.2)
        runner = HandlerWorker(worker, registry, using="default", stuck_after=stuck)
        runner.listen()
        send(sender, "one", "two")
        with pytest.raises(MessagesError, match="2 handlers have not returned"):
            runner.run()
    release.set()


def saved() -> list[str]:
    return sorted(Group.objects.values_list("name", flat=True))


@pytest.mark.parametrize(("max_age", "connections"), [(0, 3), (60, 1)])
def test_messages_keep_order_and_are_atomic(
    shop: World, sender: Program, registry: HandlerRegistry, seen: Seen, monkeypatch,
    max_age: int, connections: int,
):  # fmt: skip
    listener = shop.node("user2", "LISTENER", listen="ORDERS.2")
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age)
    pids = []

    @registry.on_topic("ORDERS")
    def handle(message: Message) -> None:
        Group.objects.create(name=message.body)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            pids.append(cursor.fetchone())
        django.send("ORDERS.2", message.body, ident="worker")
        # It leaves at the commit.
        assert listener.bodies() == [body for body, *_ in seen.bodies[-1:]]
        seen.add((message.body, message.sender, connection.in_atomic_block))

    with running_worker(registry) as runner:
        send(sender, "one", "two", "three")
        assert seen.wait_for(3) == [(body, "ASKER", True) for body in ("one", "two", "three")]
    assert saved() == ["one", "three", "two"]
    assert runner.counters.handled == 3
    # Old connections are closed around each message.
    assert len(set(pids)) == connections


def test_handlers_async_and_in_autocommit(sender: Program, registry: HandlerRegistry, seen: Seen):
    @registry.on_topic("ORDERS", atomic=False)
    def without(message: Message) -> None:
        assert not connection.in_atomic_block

    @registry.on_topic("ORDERS", tries=2)
    async def handle(message: Message) -> None:
        await Group.objects.acreate(name=message.body)
        await sync_to_async(seen.add)(message.body)
        if message.body == "fails":
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled

    with running_worker(registry) as runner:
        send(sender, "fails")
        assert seen.wait_for(2) == ["fails", "fails"]
        wait_until(lambda: runner.counters.given_up)
        send(sender, "works")
        assert seen.wait_for(3)[2] == "works"
    assert saved() == ["works"]
    assert runner.counters.failures == 2


def test_an_ordered_handler_gets_the_messages_of_a_topic_one_by_one(
    sender: Program, registry: HandlerRegistry, seen: Seen, shop: World
):
    release = threading.Event()

    @registry.on_topic("ORDERS*", ordered=True, atomic=False)
    def handle(message: Message) -> None:
        if message.body == "slow":
            assert release.wait(60)
        seen.add(message.body)

    shop.rules("user2 ASKER Topic ORDERS.LATER W 60")
    sender.ok("topic_notify", "ORDERS.LATER")
    with running_worker(registry, concurrency=4) as runner:
        send(sender, "slow", "next", "last")
        sender.ok("topic_send", "ORDERS.LATER", "other")
        assert seen.wait_for(1) == ["other"]
        wait_until(lambda: len(runner._waiting_calls) == 2)
        release.set()
        assert seen.wait_for(4) == ["other", "slow", "next", "last"]


def test_failed_handlers_retry(sender: Program, registry: HandlerRegistry, seen: Seen, caplog):
    @registry.on_topic("ORDERS", tries=3)
    def handle(message: Message) -> None:
        Group.objects.create(name=message.body)
        seen.add(message.body)
        if message.body == "bad" and seen.bodies.count("bad") < 3:
            raise ValueError(message.body)
        if message.body == "worst":
            raise SystemExit(1)

    with caplog.at_level(logging.WARNING, "psqlmessages"), running_worker(registry) as runner:
        send(sender, "bad", "good", "worst")
        seen.wait_for(7)
        wait_until(lambda: runner.counters.given_up)
    assert Counter(seen.bodies) == {"bad": 3, "good": 1, "worst": 3}
    assert saved() == ["bad", "good"]
    counters = runner.counters
    assert (counters.handled, counters.failures, counters.given_up) == (2, 5, 1)
    assert "handle failed; retry in" in caplog.text
    assert "ValueError: bad" in caplog.text
    assert "failed 3 times: the message is lost" in caplog.text


def test_an_rpc_is_answered_after_commit(sender: Program, registry: HandlerRegistry, shop: World):
    shop.rules(f"{shop.owner.query('SELECT session_user')} OWNER Rpc worker W 60")
    shop.owner.ok("init", "OWNER")
    with running_worker(registry) as runner:
        sender.ok("rpc", "worker", "ticket", "x")
        header = answer_to(sender)
        assert (header["Err"], header["Body"]) == ("56", "worker has no RPC handler")
        assert runner.counters.unhandled == 1
        with shop.owner.connection.transaction():
            shop.owner.ok("rpc", "worker", "ticket", "x" * 9000)
            shop.owner.execute("DELETE FROM psqlmessages_body")
        assert answer_to(shop.owner)["Body"] == "the body could not be fetched"

    @registry.on_rpc
    def handle(message: Message) -> object:
        Group.objects.create(name=message.body)
        if message.body == "fails":
            raise ValueError("secret")
        if message.body == "refuses":
            raise CallFailed(Group._meta.verbose_name)  # a lazy translation
        return object() if message.body == "unsendable" else {"sold": message.body}

    with running_worker(registry) as runner:
        sender.ok("rpc", "worker", "ticket", '"works"', "json")
        header = answer_to(sender)
        assert (header["Token"], header["Enc"]) == ("ticket", "json")
        assert header["Body"] == '{"sold":"works"}'
        assert shop.owner.query("SELECT count(*) FROM auth_group") == 1
        reasons = {"fails": "the handler of worker failed (ValueError)", "refuses": "group"}
        for body, reason in {**reasons, "unsendable": "the answer could not be sent"}.items():
            sender.ok("rpc", "worker", "ticket", body)
            header = answer_to(sender)
            assert (header["Err"], header["Body"]) == ("56", reason)
    assert saved() == ["unsendable", "works"]
    assert runner.counters.unanswered == 1


def test_a_pattern_takes_allowed_topics_also_later_ones(
    sender: Program, registry: HandlerRegistry, seen: Seen, shop: World
):
    @registry.on_topic("*")
    def handle(message: Message) -> str:
        seen.add((message.topic, message.body))
        return "mine"

    shop.rules("user2 ASKER Topic PRICES W 60")
    with running_worker(registry):
        # A topic's question is answered by what the handler returns.
        sender.ok("topic_send", "ORDERS", "whose?", "ticket")
        header = answer_to(sender)
        assert (header["From"], header["Body"]) == ("worker", "mine")
        shop.rules("user2 ASKER Topic ORDERS.LATER W 60")
        sender.ok("topic_notify", "ORDERS.LATER")
        wait_until(lambda: sender.call("topic_send", "ORDERS.LATER", "y")["Err"] != "10")
        assert set(seen.wait_for(2)) == {("ORDERS", "whose?"), ("ORDERS.LATER", "y")}


def test_a_regained_right_is_used_again_also_after_a_reconnect(
    sender: Program, registry: HandlerRegistry, seen: Seen, shop: World
):
    @registry.on_topic("ORDERS")
    def handle(message: Message) -> None:
        seen.add(message.body)

    def set_mode(mode: str) -> None:
        shop.execute("UPDATE messages.auth SET mode = %s WHERE ident = 'worker*'", (mode,))

    def give_back(body: str) -> None:
        assert sender.call("topic_send", "ORDERS", "unheard")["Err"] == "10"
        set_mode("RW")
        wait_until(lambda: sender.call("topic_send", "ORDERS", body)["Err"] == "0")
        wait_until(lambda: body in seen.bodies)

    away = timedelta(seconds=1)
    with running_worker(registry, options=Options(backoff_min=away, backoff_max=away)) as runner:
        set_mode("W")
        give_back("heard")
        shop.end_backends("application_name = 'psqlmessages worker'")
        set_mode("W")
        wait_until(lambda: runner._node.counters.reconnects)
        give_back("heard again")
    assert set(seen.bodies) == {"heard", "heard again"}


def test_a_topic_without_a_rule_and_losing_all_rules_fail(shop: World, registry: HandlerRegistry):
    forbidden = HandlerRegistry()
    forbidden.on_topic("PRICES")(print)
    registry.on_topic("ORDERS")(print)
    with node("worker") as worker:
        with pytest.raises(TopicNotExistent):
            HandlerWorker(worker, forbidden, using="default").listen()
        runner = HandlerWorker(worker, registry, using="default")
        runner.listen()
        shop.owner.query("DELETE FROM messages.auth RETURNING 1")
        with pytest.raises(MessagesError, match="no rule allows this"):
            runner.run()


def named(name: str) -> object:
    def handle(message: Message) -> None: ...

    handle.__name__ = handle.__qualname__ = name
    return handle


FOUND = (
    ("Topic", "ORDERS", "worker", ["exact", "by pattern"]),
    ("Topic", "ORDINARY", "worker", ["by pattern"]), ("Topic", "MAIL", "mail.1", ["mail"]),
    ("Topic", "MAIL", "worker", []), ("Topic", "MAIL", None, ["mail"]),
    ("Rpc", "prices", "prices", ["one"]), ("Rpc", "price.2", "price.2", ["some"]),
    ("Rpc", "stock", "stock", ["every"]),
)  # fmt: skip


def test_the_handlers_with_the_closest_name_get_a_message():
    registry = HandlerRegistry()
    for decorate, name in (
        (registry.on_topic("ORDERS"), "exact"), (registry.on_topic("ORD*"), "by pattern"),
        (registry.on_topic("PRICES"), "another"), (registry.on_topic("MAIL", node="mail*"), "mail"),
        (registry.on_rpc, "every"), (registry.on_rpc(node="price*"), "some"),
        (registry.on_rpc(node="prices"), "one"),
    ):  # fmt: skip
        handle = named(name)
        assert decorate(handle) is handle, "a decorated function stays what it was"
    for type_, to, ident, found in FOUND:
        handlers = registry.match(Message(type_, "shop", to, "x", to), ident)
        assert [handler.function.__name__ for handler in handlers] == found
    with pytest.raises(ImproperlyConfigured, match=r"every and .*second"):
        registry.on_rpc(named("second"))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        registry.on_topic("ORDERS", tries=0)
    with pytest.raises(TypeError, match="needs the name of a topic"):
        registry.on_topic(named("third"))
    with pytest.raises(TypeError, match=r"@on_rpc\(node='worker'\)"):
        registry.on_rpc("worker")
