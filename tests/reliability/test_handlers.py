"""Handlers of a project in trouble: what is ended is done again, and `run` goes on."""

import itertools
from collections.abc import Iterator
from threading import Barrier

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, connection, transaction

from project.postgres import Server
from psqlmessages import Message
from psqlmessages import handler_worker as running
from psqlmessages.django import publish
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
    "psqlmessages worker* Topic ORDERS* RW 60",
    "user2 ASKER Rpc worker* W 60", "user2 ASKER Topic ORDERS* W 60",
)  # fmt: skip
IDLE = "ALTER ROLE psqlmessages {} idle_in_transaction_session_timeout"
NOBODY_IDLES = """
    SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE state = 'idle in transaction'
        AND datname = current_database())
"""


@pytest.fixture
def shop(transactional_db: None, settings, own_world: World, monkeypatch) -> Iterator[World]:
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


def test_handlers_above_read_committed_are_called_again(sender: Program):
    registry, seen = HandlerRegistry(), Seen()
    failures: list[type | None] = []
    messages = size(40, 500)
    # The first four calls all read before one of them writes, so that some of them fail.
    calls, first_reads = itertools.count(), Barrier(4, timeout=90)
    Group.objects.create(name="count 0")

    @registry.on_topic("ORDERS", tries=1000)
    def handle(message: Message) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            group = Group.objects.get()
            if next(calls) < first_reads.parties:
                first_reads.wait()
            group.name = f"count {int(group.name.rpartition(' ')[2]) + 1}"
            group.save()
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
