"""Topics, streams and queues with the ORM: sent with its transaction, taken with one effect."""

import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import product
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group, User
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connection, connections, transaction
from django.test import TestCase, override_settings
from django.utils.translation import gettext_lazy
from pytest_django import Settings

import psqlmessages
from project.postgres import Server
from psqlmessages import Element, StreamMessage, exceptions
from psqlmessages.checks import check_databases
from psqlmessages.django import (
    ReservedElement,
    areserve,
    asend,
    call,
    node,
    pop,
    publish,
    publish_many,
    push,
    push_many,
    read_stream,
    reserve,
    reserve_many,
    send,
    send_many,
)
from psqlmessages.relay import auth as relay_auth
from psqlmessages.rest import auth as rest_auth
from psqlmessages.retry import RateLimitedLogger
from psqlmessages.testing import allow_queue, answered_calls, sent_messages
from tests.django.conftest import Changed
from tests.django.waiting import wait_until
from tests.exchanges.conftest import namespace
from tests.sql.conftest import Program, World

SEND_AS = "messages.topic_send_as(text, text, text, text, text)"


@pytest.fixture
def listener(shop: World) -> Program:
    return shop.node("user2", "LISTENER", listen="ORDERS")


@transaction.atomic
def add_and_fail(add: Callable[[str, str], object], to: str) -> None:
    Group.objects.create(name="taken back")
    add(to, "taken back")
    raise ZeroDivisionError


def test_a_message_leaves_with_the_commit_of_the_orm_or_not_at_all(listener: Program):
    with transaction.atomic():
        Group.objects.create(name="order 1")
        assert send("ORDERS", {"id": 1}) is True
        assert listener.bodies() == []
    (header,) = [header for header in listener.headers() if header["Type"] == "Topic"]
    assert (header["From"], header["Enc"], header["Body"]) == ("shop", "json", '{"id":1}')
    with pytest.raises(ZeroDivisionError):
        add_and_fail(send, "ORDERS")
    assert listener.bodies() == []
    # If an inner block is rolled back, only its message is discarded.
    with transaction.atomic():
        send("ORDERS", "outer")
        with pytest.raises(ZeroDivisionError):
            add_and_fail(send, "ORDERS")
    assert listener.bodies() == ["outer"]
    assert [group.name for group in Group.objects.all()] == ["order 1"]


def test_without_listeners_the_order_is_saved_if_none_is_required(shop: World, caplog, monkeypatch):
    # The project's logger repeats a message only every ten seconds.
    log = RateLimitedLogger(logging.getLogger("psqlmessages"))
    monkeypatch.setattr("psqlmessages.django._log", log)
    with caplog.at_level(logging.WARNING, "psqlmessages"), transaction.atomic():
        assert send("ORDERS", "unheard") is False
        Group.objects.create(name="order 3")
    assert "topic ORDERS of database default has no listeners" in caplog.text
    assert Group.objects.filter(name="order 3").exists()
    assert send_many("ORDERS", ["a", {"b": 1}]) == 0
    assert send_many("ORDERS", []) == 0
    for function in (send, send_many):
        with pytest.raises(exceptions.NoListeners):
            function("ORDERS", ["a"], require_listener=True)


def test_after_a_refusal_the_transaction_goes_on(shop: World, listener: Program, changed: Changed):
    large, change = "x" * 9000, "UPDATE messages._settings SET max_body_bytes ="
    before = shop.owner.query("SELECT max_body_bytes FROM messages._settings")
    changed(f"{change} 8192", f"{change} {before}")
    with transaction.atomic():
        send("ORDERS", "before")
        for error, function, topic, body, given in (
            (exceptions.TopicNotExistent, send, "NOWHERE", "x", {}),
            (exceptions.DestinationNotAuthorized, send, "ORDERS", "x", {"ident": "LISTENER"}),
            (exceptions.BodyTooLarge, send, "ORDERS", large, {}),
            # If one of many is refused, all of them are undone, and nothing else.
            (exceptions.BodyTooLarge, send_many, "ORDERS", ["first", large], {}),
            # A token needs a node that receives the answers.
            (exceptions.NotConnected, send, "ORDERS", "a question", {"token": "ticket"}),
        ):
            with pytest.raises(error):
                function(topic, body, **given)
        with pytest.raises(ValueError, match="NUL"):
            send("ORDERS", "a\0b")
        with pytest.raises(TypeError, match="Group"):
            send("ORDERS", Group())
        Group.objects.create(name="after")
        send("ORDERS", "after")
    assert Group.objects.count() == 1
    assert listener.bodies() == ["before", "after"]


def test_large_and_many_bodies_arrive_whole_and_in_their_order(listener: Program):
    send("ORDERS", "x" * 100_000)
    (payload,) = [payload for payload in listener.payloads() if "Dkey" in payload]
    assert listener.data(payload)[1] == "x" * 100_000
    assert send_many("ORDERS", [f"order {number}" for number in range(500)]) == 500
    assert listener.bodies() == [f"order {number}" for number in range(500)]


def test_missing_settings_are_named(shop: World, settings: Settings):
    transaction.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER FUNCTION {SEND_AS} RENAME TO gone")
    with pytest.raises(exceptions.NotInstalled, match="migrations"):
        send("ORDERS", "x")
    transaction.rollback()
    transaction.set_autocommit(True)
    settings.PSQLMESSAGES = {}
    for function in (send, call):
        with pytest.raises(ImproperlyConfigured, match="PSQLMESSAGES = "):
            function("ORDERS", "x")


def test_the_asynchronous_functions_take_the_same_arguments():
    functions = {name: getattr(psqlmessages.django, name) for name in psqlmessages.django.__all__}
    twins = [name for name in functions if f"a{name}" in functions]
    assert len(twins) == 10
    for name in twins:
        parameters = [inspect.signature(functions[each]).parameters for each in (name, f"a{name}")]
        assert parameters[0] == parameters[1], name


def test_the_asynchronous_functions_do_the_same(stored: World, listener: Program):
    async def send_and_take() -> tuple[list[StreamMessage], list[Element]]:
        assert await asend("ORDERS", "1") is True
        assert await here.asend_many("ORDERS", ["2", "3"]) == 2
        assert (await here.apublish("ORDERS", "4")).subscribers == 1
        assert (await here.apublish_many("ORDERS", ["5", "6"])).subscribers == 1
        assert await here.apush("orders", "7") < min(await here.apush_many("orders", ["8", "9"]))
        messages = await here.aread_stream("worker.1", "ORDERS")
        assert await here.aread_stream("worker.1", "ORDERS") == []
        return messages, await here.apop("orders", 2)

    here = psqlmessages.django
    messages, elements = async_to_sync(send_and_take)()
    assert listener.bodies() == [each.body for each in messages] == list("123456")
    assert ([each.body for each in elements], left(stored)) == (["7", "8"], 1)


@pytest.mark.usefixtures("django_by_transaction")
def test_the_system_check_warns_and_calls_without_a_node_work(shop: World):
    (found,) = check_databases(databases=["default"])
    assert (found.id, found.level) == ("psqlmessages.W103", checks.WARNING)
    listener = shop.node("user2", "LISTENER", listen="ORDERS")
    allow_queue("orders")
    for number in range(10):
        assert send("ORDERS", f"order {number}")
        with transaction.atomic():
            bodies = [message.body for message in read_stream("worker.1", "ORDERS")]
        assert number == 0 or bodies == [number, f"order {number}"]
        publish("ORDERS", number + 1)
        push("orders", number)
        with transaction.atomic():
            assert [element.body for element in pop("orders")] == [number]
        push("orders", number)
        (element,) = reserve_many("orders", 1)
        element.rollback()
        with reserve("orders") as element:
            assert element.tries == 1
    heard = [body for body in listener.bodies() if body.startswith("order")]
    assert heard == [f"order {number}" for number in range(10)]


HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@dataclass(frozen=True)
class Store:
    """The stream or the queue: `add` adds bodies, `take` takes so many within a transaction."""

    name: str
    add: Callable[[Iterable[str]], object]
    take: Callable[[int], list[Any]]

    def save(self, count: int = 5) -> list[str]:
        """Save a group for each order that is taken."""
        names = [taken.body for taken in self.take(count)]
        Group.objects.bulk_create(Group(name=name) for name in names)
        return names

    @transaction.atomic
    def save_and(self, end: Callable[[], object]) -> None:
        assert self.save() == ["1", "2"]
        end()


def read(count: int = 100) -> list[StreamMessage]:
    return read_stream("worker.1", "ORDERS", max_rows=count)


STREAM = Store("stream", lambda bodies: publish_many("ORDERS", bodies), read)
QUEUE = Store("queue", lambda bodies: push_many("orders", bodies), lambda n: pop("orders", n))
both = pytest.mark.parametrize("store", [STREAM, QUEUE], ids=lambda store: store.name)


@pytest.fixture
def stored(shop: World) -> World:
    """The node worker.1 has subscribed to ORDERS; the project may push to orders and take."""
    allow_queue("orders")
    publish("ORDERS", "before anyone subscribes")
    with transaction.atomic():
        assert read() == []
    return shop


def saved() -> list[str]:
    return list(Group.objects.order_by("name").values_list("name", flat=True))


def left(world: World) -> int:
    return world.owner.query("SELECT count(*) FROM psqlmessages_element")


def test_messages_are_published_with_the_commit_of_the_orm_or_not_at_all(stored: World):
    with transaction.atomic():
        Group.objects.create(name="order 1")
        answer = publish("ORDERS", {"id": 1})
        assert answer[1:] == (0, 1)
        with pytest.raises(ZeroDivisionError):
            add_and_fail(publish, "ORDERS")
    with transaction.atomic():
        (message,) = read()
    assert message == StreamMessage(answer.id, "ORDERS", "shop", {"id": 1}, message.published_at)


def test_a_pool_of_psycopg_serves_messages_and_nodes_connect_beside_it(stored: World):
    pytest.importorskip("psycopg_pool")
    options = {**connection.settings_dict["OPTIONS"], "pool": {"min_size": 1, "max_size": 1}}
    with namespace("pooled", OPTIONS=options, NAME=connection.settings_dict["NAME"]):
        push("orders", 1, using="pooled")
        with reserve("orders", using="pooled") as job, node("shop", using="pooled"):
            assert job.body == 1
        assert left(stored) == 0
        connections["pooled"].close()
        connections["pooled"].close_pool()


def test_elements_are_pushed_with_the_commit_of_the_orm_or_not_at_all(stored: World):
    with transaction.atomic():
        Group.objects.create(name="order 1")
        id_ = push("orders", {"id": 1}, headers={"country": "it"}, tries=2)
        with pytest.raises(ZeroDivisionError):
            add_and_fail(push, "orders")
        assert left(stored) == 0
    with transaction.atomic():
        (element,) = pop("orders", 5)
    assert (element.id, element.headers) == (id_, {"country": "it"})
    assert (element.body, element.tries, element.lease) == ({"id": 1}, 2, "")


class EuroEncoder(json.JSONEncoder):
    def default(self, o: object) -> object:
        return f"{o} EUR" if isinstance(o, Decimal) else super().default(o)


def test_the_encoder_of_the_settings_converts_types_json_lacks(stored: World, settings: Settings):
    popped = partial(async_to_sync(psqlmessages.django.apop), "orders", 9)
    values = [
        Decimal("1.10"), date(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC),
        UUID(int=1), gettext_lazy("name"),
    ]  # fmt: skip
    arriving = ["1.10", "2026-01-02", "2026-01-02T03:04:05.678Z", str(UUID(int=1)), "name"]
    push("orders", values, headers={"price": Decimal(2)})
    push_many("orders", values)
    first, *others = popped()
    assert (first.body, first.headers) == (arriving, {"price": "2"})
    assert [element.body for element in others] == arriving
    encoder = f"{__name__}.{EuroEncoder.__name__}"
    settings.PSQLMESSAGES = {**settings.PSQLMESSAGES, "JSON_ENCODER": encoder}
    push("orders", {"price": Decimal("1.10")}, headers={"tax": Decimal(0)})
    (element,) = popped()
    assert (element.body, element.headers) == ({"price": "1.10 EUR"}, {"tax": "0 EUR"})
    with pytest.raises(TypeError, match="UUID"):
        push("orders", [UUID(int=1)])


def test_many_are_pushed_all_or_none(stored: World):
    ids = push_many("orders", ["a", None], headers=[{"n": 1.0}, None], keys=["k", None])
    assert push("orders", "again", key="k") == ids[0]
    assert push_many("orders", [], delay=HOUR) == []
    first, second = reserve_many("orders", 9)
    assert (first.body, first.headers, second.body, second.headers) == ("a", {"n": 1.0}, None, {})


@both
def test_a_taken_element_has_one_effect_despite_failures(stored: World, store: Store):
    def be_killed() -> None:
        pid = connection.connection.info.backend_pid
        stored.watcher.query("SELECT pg_terminate_backend(%s, 60000)", pid)

    store.add(["1", "2"])
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            store.save_and(lambda: 1 / 0)
    with pytest.raises(OperationalError):
        store.save_and(be_killed)
    connection.close()
    assert saved() == []
    for names in (["1", "2"], []):
        with transaction.atomic():
            assert store.save() == names
    assert (saved(), left(stored)) == (["1", "2"], 0)


@both
def test_workers_share_the_elements_and_take_each_once(stored: World, store: Store):
    def work(_: int) -> None:
        for _ in range(25):
            with transaction.atomic():
                store.save(2)
        connections.close_all()

    store.add(f"{number:03}" for number in range(100))
    with ThreadPoolExecutor(4) as pool:
        if store is QUEUE:
            # The other workers do not wait for this transaction.
            with transaction.atomic():
                assert [element.body for element in pop("orders")] == ["000"]
                list(pool.map(work, range(4)))
                Group.objects.create(name="000")
        list(pool.map(work, range(4)))
    assert saved() == [f"{number:03}" for number in range(100)]


def test_a_commit_with_the_effect_is_done_once(stored: World):
    @transaction.atomic
    def save_and_commit(element: ReservedElement, name: str) -> None:
        Group.objects.create(name=name)
        element.commit()

    push("orders", "x")
    (early,) = reserve_many("orders", 1, duration=timedelta(microseconds=1))
    (late,) = reserve_many("orders", 1)
    assert (late.id, late.tries) == (early.id, 1)
    with pytest.raises(exceptions.LeaseExpired, match=r"roll back your writes"):
        save_and_commit(early, "effect")
    save_and_commit(late, "effect")
    with pytest.raises(exceptions.LeaseExpired):
        save_and_commit(late, "second effect")
    assert (saved(), left(stored)) == (["effect"], 0)
    push_many("orders", ["a", "b"])
    first, second = reserve_many("orders", 2)
    first.renew(60)
    first.rollback(delay=0)
    second.rollback(delay=HOUR)
    with pytest.raises(exceptions.LeaseExpired):
        second.renew()
    assert [(one.body, one.tries) for one in reserve_many("orders", 2)] == [("a", 1)]


def test_a_rollback_tells_whether_the_element_became_a_dead_letter(stored: World):
    async def settle() -> list[bool]:
        first, second, third = await sync_to_async(reserve_many)("failing", 3)
        await first.arenew(60)
        await third.acommit()
        return [await first.arollback(delay=0), await second.arollback()]

    allow_queue("failing", mode="A")
    allow_queue("failing*")
    stored.owner.ok("configure_queue", "shop", "failing", 2)
    for tries in (0, 1, 0):
        push("failing", "x", tries=tries)
    assert async_to_sync(settle)() == [False, True]
    (again,) = reserve_many("failing", 3)
    assert again.rollback() is True
    assert reserve_many("failing", 3) == []


def test_the_block_of_a_reservation_has_one_effect_or_gives_back(stored: World):
    with reserve("orders") as nothing:
        assert nothing is None
    push("orders", "x")

    def handle(then: Callable[[], object], seconds: float = 60) -> None:
        with reserve("orders", seconds, delay=0) as job:
            Group.objects.create(name=job.body)
            then()

    with pytest.raises(ZeroDivisionError):
        handle(lambda: 1 / 0)
    with pytest.raises(exceptions.LeaseExpired):
        # Its lease ends during the block, and another consumer takes it.
        handle(lambda: wait_until(lambda: reserve_many("orders", 1)), 0.001)
    assert (saved(), left(stored)) == ([], 1)
    with reserve("orders") as job:
        Group.objects.create(name=f"{job.body} {job.tries}")
    assert (saved(), left(stored)) == (["x 2"], 0)

    async def divide(delay: int) -> str:
        async with areserve("orders", delay=0) as job:
            return f"{job.body} {1 // delay}"

    push("orders", "y")
    with pytest.raises(ZeroDivisionError):
        async_to_sync(divide)(0)
    assert async_to_sync(divide)(1) == "y 1"
    assert left(stored) == 0


def test_a_refusal_is_raised_and_one_of_adding_or_commit_breaks_no_transaction(stored: World):
    stored.rules(f"{Server.owner} writer Topic ORDERS W 60")
    allow_queue("read-only", mode="R")
    allow_queue("write-only", mode="W")
    with transaction.atomic():
        for error, words, call, *arguments in (
            (exceptions.TopicNotExistent, "", publish, "UNHEARD", "x"),
            (TypeError, "cannot be mixed", publish_many, "ORDERS", [b"x", "y"]),
            (exceptions.ModeNotAuthorized, "", push, "read-only", "x"),
            (TypeError, "cannot be mixed", push_many, "orders", [b"x", "y"]),
        ):
            with pytest.raises(error, match=words or None):
                call(*arguments)
        Group.objects.create(name="order 2")
    assert saved() == ["order 2"]
    for error, call, *arguments in (
        (exceptions.ModeNotAuthorized, read_stream, "writer", "ORDERS"),
        (exceptions.NotPositive, read_stream, "worker.1", "ORDERS", timedelta(0)),
        (exceptions.ModeNotAuthorized, pop, "write-only"),
        (exceptions.NotPositive, pop, "orders", 0),
        (exceptions.NotPositive, reserve_many, "orders", 0),
    ):
        with pytest.raises(error), transaction.atomic():
            call(*arguments)
    for call in (read, pop):
        with pytest.raises(transaction.TransactionManagementError, match=r"transaction\.atomic"):
            call("orders")


def test_a_value_of_a_wrong_type_is_refused_with_the_argument_and_what_is_allowed(stored: World):
    def take(**arguments: object) -> object:
        return reserve("orders", **arguments).__enter__()

    def take_async(**arguments: object) -> object:
        return async_to_sync(areserve("orders", **arguments).__aenter__)()

    add, add_many = partial(push, "orders", 1), partial(push_many, "orders", [1, 2])
    add()
    (element,) = reserve_many("orders", 1)
    read_on, user = partial(read_stream, "worker.1", "ORDERS"), User(pk=1)
    acall = async_to_sync(psqlmessages.django.acall)
    seconds, many = "a timedelta or a number of seconds", "a list or another iterable"
    for argument, allowed, values, *calls in (
        ("timeout", seconds, ("x", None, True), partial(call, "PRICES", 1),
         partial(acall, "PRICES", 1), read_on),
        ("delay", seconds, ("5", [5]), add, add_many, element.rollback, take, take_async),
        ("duration", seconds, ("5", None), take, take_async, element.renew),
        ("lifetime", seconds, ("x", None), partial(relay_auth.token_for, user),
         partial(rest_auth.token_for, user)),
        ("mature", "a datetime with a time zone", ("5", 5), add),
        ("max_rows", "an int", ("5", None, 5.0), read_on),
        ("count", "an int", ("5", None), partial(pop, "orders"), partial(reserve_many, "orders")),
        ("tries", "an int", ("5", None), add),
        ("headers", "a mapping with str keys", ("{}", {1: 2}), add),
        ("headers", many, (5, "ab"), add_many), ("keys", many, (5, "ab"), add_many),
        ("bodies", many, (5, "ab"), partial(push_many, "orders"), partial(send_many, "ORDERS"),
         partial(publish_many, "ORDERS")),
    ):  # fmt: skip
        for value, function in product(values, calls):
            words = rf"^{argument} must be {allowed}.* {re.escape(repr(value))}"
            with pytest.raises(TypeError, match=words), transaction.atomic():
                function(**{argument: value})
    with answered_calls(), pytest.raises(TypeError, match="timeout must be"):
        call("PRICES", 1, timeout="x")
    with pytest.raises(ValueError, match="lifetime must end before"):
        relay_auth.token_for(user, math.inf)


def test_the_statement_in_an_error_adds_the_rules_that_the_call_needs(stored: World):
    def repeat(error: type[exceptions.MessagesError], call: Callable[[], object]) -> object:
        with pytest.raises(error) as raised:
            call()
        (statement,) = re.findall(r"INSERT INTO messages\.auth .*(?=\))", str(raised.value))
        stored.owner.connection.execute(statement)
        modes.append(re.findall(r"'(\w+)', 60\)", statement)[0])
        return call()

    modes: list[str] = []
    missing, unknown = exceptions.TopicNotExistent, exceptions.IdentNotExistent
    denied = exceptions.DestinationNotAuthorized
    stored.rules(f"{Server.owner} it's* Topic ORDERS RW 60", f"{Server.owner} shop Rpc VAT W 60")
    with node("shop") as shop:
        for error, function, *arguments in (
            (missing, publish, "it's new", 1), (missing, send, "new", 1),
            (missing, send_many, "many", [1]), (missing, shop.topic_listen, "heard"),
            (missing, async_to_sync(psqlmessages.django.aread_stream), "worker.1", "read"),
            (denied, push, "first", 1), (denied, async_to_sync(psqlmessages.django.apop), "second"),
            (denied, shop.push, "third", 1), (denied, shop.pop, "fourth"),
            (denied, partial(reserve_many, ident="it's me"), "it's fifth", 1),
            # No rule names the acting node.
            (unknown, partial(push, ident="nobody"), "sixth", 1),
            (unknown, partial(send, ident="somebody"), "seventh", 1),
        ):  # fmt: skip
            repeat(error, partial(function, *arguments))
        assert modes[:7] == ["W", "W", "W", "RW", "R", "W", "R"]
        # The called node has its rule, and is not connected.
        for ask, callee in ((call, "TAXES"), (shop.call, "VAT")):
            with pytest.raises(exceptions.NotConnected):
                repeat(unknown, partial(ask, callee, 1))

    # The statement has NODE in place of the name of the listener.
    with pytest.raises(exceptions.NoListeners):
        repeat(exceptions.NoListeners, partial(send, "new", 1, require_listener=True))
    with node("NODE") as listener:
        listener.topic_listen("new")
        assert send("new", 1) is True
    another = node("another")
    repeat(exceptions.IdentNotAuthorized, another.open)
    another.close()


def test_published_messages_are_collected_in_tests(shop: World):
    with sent_messages() as sent:
        publish("ORDERS", {"id": 1})
        publish_many("ORDERS", [2, 3])
        with pytest.raises(ZeroDivisionError):
            add_and_fail(publish, "ORDERS")
        assert sent.bodies("ORDERS") == [{"id": 1}, 2, 3]
        assert not sent[0].has_receivers
        with transaction.atomic():
            read()
        publish("ORDERS", "with a subscription")
        assert sent[-1].has_receivers


@override_settings(PSQLMESSAGES={"NODE": "tested"})
class InATestCase(TestCase):
    """What is pushed in a transaction that never commits can be popped there."""

    def test_pushed_elements_can_be_popped(self):
        allow_queue("tested.*")
        push("tested.orders", {"id": 1})
        (element,) = pop("tested.orders")
        assert element.body == {"id": 1}
