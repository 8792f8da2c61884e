"""Handlers of a project in trouble: what is ended is done again, and `run` goes on."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, connection, transaction
from pytest_django import Settings

from project.postgres import Server
from psqlmessages import Element, Message
from psqlmessages import handler_worker as running
from psqlmessages.django import pop, publish, push_many, reserve_many
from psqlmessages.handler_registry import HandlerRegistry
from psqlmessages.rpc_client import close_clients
from tests.django.test_runner import MOMENT, Seen, running_worker, send
from tests.exchanges.conftest import field
from tests.exchanges.field import Field, working
from tests.reliability.counts import report, size
from tests.reliability.faults import copies, count_logged, django_on, forced_deadlock, until
from tests.sql.conftest import Program, World

__all__ = ["field"]

SERIALIZATION = "could not serialize access"
RULES = (
    "psqlmessages shop Topic ORDERS RW 60", "psqlmessages shop Topic DONE W 60",
    "psqlmessages shop Queue WORK RW 60", "psqlmessages worker* Topic ORDERS* RW 60",
    "user2 ASKER Rpc worker* W 60", "user2 ASKER Topic ORDERS* W 60",
)  # fmt: skip
SERIALIZABLE = "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"
IDLE = "ALTER ROLE psqlmessages {} idle_in_transaction_session_timeout"
NOBODY_IDLES = """
    SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE state = 'idle in transaction'
        AND datname = current_database())
"""


@pytest.fixture
def shop(
    transactional_db: None, settings: Settings, own_world: World, monkeypatch
) -> Iterator[World]:
    """The project on the module's server; handlers are retried immediately."""
    settings.PSQLMESSAGES = {"NODE": "shop"}
    for name in ("MIN_RETRY_DELAY", "MAX_RETRY_DELAY", "LISTEN_INTERVAL"):
        monkeypatch.setattr(running, name, MOMENT)
    with django_on(own_world.server):
        own_world.rules(*RULES)
        Group.objects.all().delete()
        yield own_world
        close_clients()


@pytest.fixture
def sender(shop: World) -> Program:
    return shop.node("user2", "ASKER", notify="ORDERS")


class Meeting:
    """Lets the first calls of four threads wait for each other."""

    def __init__(self) -> None:
        self.calls = itertools.count()
        self.barrier = Barrier(4, timeout=90)

    def __call__(self) -> None:
        if next(self.calls) < self.barrier.parties:
            self.barrier.wait()


def counting(meet: Meeting) -> None:
    """Read a number, and write the next one, as programs do that trust in isolation.

    The first four have all read before one writes, so that some fail, however busy the machine is.
    """
    group = Group.objects.get()
    meet()
    group.name = f"count {int(group.name.rpartition(' ')[2]) + 1}"
    group.save()


def test_handlers_above_read_committed_are_called_again(sender: Program):
    registry, seen, meet = HandlerRegistry(), Seen(), Meeting()
    failures: list[type | None] = []
    messages = size(40, 500)
    Group.objects.create(name="count 0")

    @registry.on_topic("ORDERS", tries=1000)
    def handle(message: Message) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute(SERIALIZABLE)
            counting(meet)
        except DatabaseError as error:
            failures.append(type(error.__cause__))
            raise
        transaction.on_commit(lambda: seen.add(message.body))

    with running_worker(registry, concurrency=4) as runner:
        send(sender, *(str(number) for number in range(messages)))
        seen.wait_for(messages)
    effects = int(Group.objects.get().name.rpartition(" ")[2])
    report(
        "serialization failure", "handlers, serializable", messages=messages,
        failures=runner.counters.failures, effects=effects, given_up=runner.counters.given_up,
    )  # fmt: skip
    assert (effects, runner.counters.given_up) == (messages, 0)
    assert set(failures) == {psycopg.errors.SerializationFailure}


def test_a_handler_that_deadlocks_or_loses_its_session_runs_again(shop: World, sender: Program):
    registry, seen, tries = HandlerRegistry(), Seen(), list[str]()
    superuser = shop.superuser()

    @registry.on_topic("ORDERS")
    def handle(message: Message) -> None:
        tries.append(message.body)
        if message.body.startswith("idle"):
            Group.objects.create(name=message.body)
            if tries.count(message.body) == 1:
                until(lambda: superuser.query(NOBODY_IDLES))
            publish("DONE", "done")
        else:
            publish("DONE", "done")
            Group.objects.create(name=message.body)
        transaction.on_commit(lambda: seen.add(message.body))

    superuser.execute(f"{IDLE.format('SET')} = '200ms'")
    try:
        with running_worker(registry) as runner:
            send(sender, "idle 1", "idle 2")
            seen.wait_for(2)
            failures = runner.counters.failures
    finally:
        superuser.execute(IDLE.format("RESET"))
    close_clients()
    connection.close()
    effects = Group.objects.count()
    report(
        "session terminated while idle in a transaction", "handlers of `run`", messages=2,
        failures=failures, effects=effects,
    )  # fmt: skip
    assert (effects, failures) == (2, 2)

    rounds, before = size(1, 20), count_logged(shop.server)
    with running_worker(registry) as runner:
        for number in range(rounds):
            with forced_deadlock(
                shop,
                holds="LOCK TABLE auth_group IN ACCESS EXCLUSIVE MODE",
                wants="LOCK TABLE psqlmessages_streammessage IN ACCESS EXCLUSIVE MODE",
            ):
                send(sender, str(number))
            seen.wait_for(number + 3)
    ended, effects = count_logged(shop.server) - before, Group.objects.count() - 2
    report(
        "deadlock", "handlers of `run`", messages=rounds, deadlocks=ended, effects=effects,
        given_up=runner.counters.given_up,
    )  # fmt: skip
    assert (effects, runner.counters.given_up) == (rounds, 0)
    assert ended >= rounds


def take(how: str, meet: Meeting, failures: list[type | None]) -> None:
    """Take from WORK in serializable transactions; repeat those that fail."""
    elements: list[Element] | None = None
    while elements != []:
        reserved = [] if how == "pop" else reserve_many("WORK", 3)
        elements = None
        while elements is None:
            try:
                elements = effect(reserved, meet)
            except DatabaseError as error:
                failures.append(type(error.__cause__))
    connection.close()


def effect(reserved: list[Element], meet: Meeting) -> list[Element]:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(SERIALIZABLE)
        elements = reserved or pop("WORK", 3)
        if elements:
            counting(meet)
            bodies = [element.body for element in elements]
            cursor.execute("INSERT INTO effects SELECT unnest(%s::text[])", [bodies])
            for element in reserved:
                element.commit()
    return elements


@pytest.mark.parametrize(
    "how", ["pop", pytest.param("reserve and commit", marks=pytest.mark.nightly)]
)
def test_elements_taken_in_serializable_transactions_have_one_effect(shop: World, how: str):
    bodies = [str(number) for number in range(size(40, 600))]
    push_many("WORK", bodies)
    Group.objects.create(name="count 0")
    shop.owner.connection.execute("DROP TABLE IF EXISTS effects; CREATE TABLE effects (body text)")
    meet, failures = Meeting(), list[type | None]()
    with ThreadPoolExecutor(4) as pool:
        for taking in [pool.submit(take, how, meet, failures) for _ in range(4)]:
            taking.result(100)
    names = [name for (name,) in shop.owner.connection.execute("SELECT body FROM effects")]
    lost, doubled = len(bodies) - len(set(names)), len(names) - len(set(names))
    report(
        "serialization failure", f"{how}, serializable, 4 threads", elements=len(bodies),
        failures=len(failures), lost=lost, duplicated=doubled,
    )  # fmt: skip
    assert (lost, doubled) == (0, 0)
    assert set(failures) == {psycopg.errors.SerializationFailure}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("how", ["reserve", "pop"])
def test_an_exchange_keeps_to_read_committed(field: Field, how: str):
    server, before = field.default.server, count_logged(field.default.server, SERIALIZATION)
    consumer = {"reserve": how == "reserve", "parallel": 3, "wsize": 10}
    field.define(x={"consumer": consumer, "src": "a", "dst": ["b", "c"]})
    bodies = [f"{number}.{each}" for number in range(size(20, 200)) for each in range(20)]
    setting = f"ALTER ROLE {Server.owner} {{}} default_transaction_isolation"
    with psycopg.connect(server.superuser_url, autocommit=True) as superuser:
        superuser.execute(f"{setting.format('SET')} = 'serializable'")
        try:
            with working(), working():
                for first in range(0, len(bodies), 20):
                    field.default.push_many("a", bodies[first : first + 20])
                field.until_idle(60)
        finally:
            superuser.execute(setting.format("RESET"))
    refused = count_logged(server, SERIALIZATION) - before
    report(
        "serialization failure", f"an exchange within databases ({how}), serializable",
        elements=len(bodies), failures=refused, lost=0, duplicated=0,
    )  # fmt: skip
    assert copies(field) == [sorted(bodies)] * 2
    assert refused == 0
