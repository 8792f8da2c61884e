"""Handlers of a project in trouble: what is ended is done again, and `run` goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from threading import Barrier, Event, Thread

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, connection, transaction
from pytest_django import Settings

from psqlmessages import Element, Message
from psqlmessages import runner as running
from psqlmessages.calling import close_callers
from psqlmessages.django import commit, pop, publish, push_many, read_stream, reserve
from psqlmessages.handlers import Registry
from tests.django.test_runner import MOMENT, Seen, running_worker, send
from tests.reliability.counts import counted, size
from tests.reliability.locks import Opponent, cancelling, deadlocks, held
from tests.reliability.projects import django_at
from tests.reliability.restarts import until
from tests.sql.conftest import Program, World

RULES = (
    "psqlmessages shop Topic ORDERS RW 60",
    "psqlmessages shop Topic DONE W 60",
    "psqlmessages shop Queue WORK RW 60",
    "psqlmessages worker* Topic ORDERS* RW 60",
    "user2 ASKER Rpc worker* W 60",
    "user2 ASKER Topic ORDERS* W 60",
)
SERIALIZABLE = "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"
IS_HEARD = """
    SELECT EXISTS (SELECT FROM psqlmessages_topic AS t WHERE t.name = %s AND t.listeners > 0)
"""
REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"


@pytest.fixture
def shop(
    transactional_db: None,
    settings: Settings,
    own_world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    """The project on the server of the module's own; what fails is tried again at once."""
    settings.PSQLMESSAGES = {"NODE": "shop"}
    for name in ("RETRY_LEAST", "RETRY_MOST", "LISTEN_AGAIN"):
        monkeypatch.setattr(running, name, MOMENT)
    with django_at(own_world.server):
        own_world.rules(*RULES)
        Group.objects.all().delete()
        yield own_world
        close_callers()


@pytest.fixture
def sender(shop: World) -> Program:
    """The node ASKER, which sends to ORDERS and asks the worker."""
    sender = shop.node("user2", "ASKER")
    sender.ok("topic_notify", "ORDERS")
    return sender


@pytest.fixture
def registry() -> Registry:
    return Registry()


def answers(asker: Program, number: int) -> list[str]:
    """So many answers to the asker, among the events that come besides."""
    found: list[str] = []
    while len(found) < number:
        (header,) = asker.headers(1)
        if header["Type"] == "Return":
            found.append(header["Token"])
    return found


def test_an_answer_that_is_ended_ends_no_more_than_itself(
    shop: World, sender: Program, registry: Registry
) -> None:
    may_end = Event()

    @registry.on_rpc
    def handle(message: Message) -> str:
        if message.body == "held":
            shop.owner.connection.execute("BEGIN")
            shop.owner.connection.execute("LOCK TABLE psqlmessages_session")
            may_end.set()
        return "it"

    rounds = size(2, 20)
    with running_worker(registry) as runner:
        for number in range(rounds):
            may_end.clear()
            sender.ok("rpc", "worker", f"held {number}", "held")
            assert may_end.wait(90)
            with cancelling(shop, "%messages.return(%") as canceller:
                until(lambda: canceller.ended)
            shop.owner.connection.execute("ROLLBACK")
            sender.ok("rpc", "worker", f"free {number}", "free")
            # Who asked the first is told that there is no answer.
            assert sorted(answers(sender, 2)) == [f"free {number}", f"held {number}"]
        assert not runner.is_stopping
    counted(
        "statement cancelled", "answers of `run`",
        asked=2 * rounds, answered=rounds, told_that_there_is_none=runner.tally.unanswered,
    )  # fmt: skip
    assert runner.tally.unanswered == rounds


@pytest.mark.nightly  # an answer that is ended is there every day
def test_listening_that_is_ended_is_tried_again(
    shop: World,
    sender: Program,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Seen()

    @registry.on_topic("ORDERS*")
    def handle(message: Message) -> None:
        seen.add(message.body)

    # It looks for new topics when the test says so, and then each moment.
    monkeypatch.setattr(running, "LISTEN_AGAIN", timedelta(hours=1))
    rounds = size(2, 20)
    ended = 0
    with running_worker(registry) as runner:
        for number in range(rounds):
            topic = f"ORDERS.{number}"
            shop.rules(f"user2 ASKER Topic {topic} W 60")
            # What changes state waits for this table, and what only looks does not.
            with (
                held(shop, "LOCK TABLE messages._gate IN EXCLUSIVE MODE"),
                cancelling(shop, "%topic_listen%") as canceller,
            ):
                runner._listen_at = 0.0
                # Set anew when it has tried.
                until(lambda: runner._listen_at)
            ended += canceller.ended
            runner._listen_at = 0.0
            shop.wait_for(IS_HEARD, topic)
            sender.ok("topic_notify", topic)
            sender.ok("topic_send", topic, topic)
            assert seen.wait_for(number + 1)[-1] == topic
        assert not runner.is_stopping
    counted(
        "statement cancelled", "`run` begins to listen",
        topics=rounds, ended=ended, heard=len(seen.bodies),
    )  # fmt: skip
    assert "cannot listen" in caplog.text
    assert ended >= rounds


class Meeting:
    """Lets the first calls of four threads wait for each other; the later ones pass."""

    def __init__(self) -> None:
        self.calls = itertools.count()
        self.barrier = Barrier(4, timeout=90)

    def __call__(self) -> None:
        if next(self.calls) < self.barrier.parties:
            self.barrier.wait()


def counting(name: str, meet: Meeting) -> None:
    """Read a number, and write the next one, as programs do that trust in isolation.

    The first four have all read before one writes, so that some fail, however busy the machine is.
    """
    group = Group.objects.get()
    meet()
    group.name = f"{name} {int(group.name.rpartition(' ')[2]) + 1}"
    group.save()


@pytest.mark.parametrize(
    "isolation",
    [
        pytest.param(REPEATABLE, marks=pytest.mark.nightly),  # as SERIALIZABLE
        SERIALIZABLE,
    ],
)
def test_handlers_above_read_committed_are_called_again(
    sender: Program, registry: Registry, isolation: str
) -> None:
    seen = Seen()
    failures: list[type | None] = []
    messages = size(40, 500)
    meet = Meeting()
    Group.objects.create(name="count 0")

    @registry.on_topic("ORDERS", tries=1000)
    def handle(message: Message) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute(isolation)
            counting("count", meet)
        except DatabaseError as error:
            failures.append(type(error.__cause__))
            raise
        transaction.on_commit(lambda: seen.add(message.body))

    with running_worker(registry, concurrency=4) as runner:
        send(sender, *(str(number) for number in range(messages)))
        seen.wait_for(messages)
    effects = int(Group.objects.get().name.rpartition(" ")[2])
    counted(
        "serialization failure", f"handlers, {isolation.rpartition('LEVEL ')[2].lower()}",
        messages=messages, failures=runner.tally.failures, effects=effects,
        given_up=runner.tally.given_up,
    )  # fmt: skip
    assert (effects, runner.tally.given_up) == (messages, 0)
    assert set(failures) == {psycopg.errors.SerializationFailure}


def test_a_handler_whose_session_ends_while_it_idles_is_called_again(
    shop: World, sender: Program, registry: Registry
) -> None:
    shop.superuser().connection.execute(
        "ALTER ROLE psqlmessages SET idle_in_transaction_session_timeout = '200ms'"
    )
    seen, tries = Seen(), []

    @registry.on_topic("ORDERS")
    def handle(message: Message) -> None:
        Group.objects.create(name=message.body)
        tries.append(message.body)
        if tries.count(message.body) == 1:
            until(lambda: _is_gone(shop))
        publish("DONE", "done")
        transaction.on_commit(lambda: seen.add(message.body))

    try:
        with running_worker(registry) as runner:
            send(sender, "one", "two")
            seen.wait_for(2)
    finally:
        shop.superuser().connection.execute(
            "ALTER ROLE psqlmessages RESET idle_in_transaction_session_timeout"
        )
    effects = Group.objects.count()
    counted(
        "session ended as it idled in a transaction", "handlers of `run`",
        messages=2, failures=runner.tally.failures, effects=effects,
    )  # fmt: skip
    assert (effects, runner.tally.failures) == (2, 2)


def _is_gone(shop: World) -> bool:
    return not shop.watcher.query(
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"
        " AND datname = current_database()"
    )


def test_handlers_that_deadlock_are_called_again(
    shop: World, sender: Program, registry: Registry
) -> None:
    seen = Seen()
    shop.program("user2")
    before = deadlocks(shop)

    @registry.on_topic("ORDERS")
    def handle(message: Message) -> None:
        publish("DONE", "done")
        Group.objects.create(name=message.body)
        transaction.on_commit(lambda: seen.add(message.body))

    rounds = size(2, 20)
    with running_worker(registry) as runner:
        for number in range(rounds):
            with Opponent(
                shop,
                holds="LOCK TABLE auth_group IN ACCESS EXCLUSIVE MODE",
                wants="LOCK TABLE psqlmessages_streammessage IN ACCESS EXCLUSIVE MODE",
            ) as opponent:
                send(sender, str(number))
            assert opponent.has_met
            seen.wait_for(number + 1)
    ended, effects = deadlocks(shop) - before, Group.objects.count()
    counted(
        "deadlock", "handlers of `run`",
        messages=rounds, deadlocks=ended, effects=effects, given_up=runner.tally.given_up,
    )  # fmt: skip
    assert (effects, runner.tally.given_up) == (rounds, 0)
    assert ended >= rounds


class Taker:
    """Takes from WORK in serializable transactions, each of which counts; again where one fails."""

    def __init__(self, how: str, meet: Meeting) -> None:
        self.how = how
        self.meet = meet
        self.failures: list[type | None] = []
        self.thread = Thread(target=self._work)

    def _work(self) -> None:
        try:
            while True:
                elements = [] if self.how == "pop" else reserve("WORK", 3)
                if not self._done(elements):
                    return
        finally:
            connection.close()

    def _done(self, elements: list[Element]) -> bool:
        while True:
            try:
                return self._effect(elements)
            except DatabaseError as error:
                self.failures.append(type(error.__cause__))

    def _effect(self, elements: list[Element]) -> bool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(SERIALIZABLE)
            if self.how == "pop":
                elements = pop("WORK", 3)
            if not elements:
                return False
            counting("count", self.meet)
            bodies = [element.body for element in elements]
            cursor.execute("INSERT INTO effects SELECT unnest(%s::text[])", [bodies])
            if self.how != "pop":
                assert commit(*elements)
        return True


@pytest.mark.parametrize(
    "how",
    [
        "pop",
        pytest.param("reserve and commit", marks=pytest.mark.nightly),  # fails as often
    ],
)
def test_what_is_taken_in_serializable_transactions_has_one_effect(shop: World, how: str) -> None:
    bodies = [str(number) for number in range(size(40, 600))]
    push_many("WORK", bodies)
    Group.objects.create(name="count 0")
    shop.owner.connection.execute("DROP TABLE IF EXISTS effects; CREATE TABLE effects (body text)")
    meet = Meeting()
    takers = [Taker(how, meet) for _ in range(4)]
    for taker in takers:
        taker.thread.start()
    for taker in takers:
        taker.thread.join(100)
    names = [name for (name,) in shop.owner.connection.execute("SELECT body FROM effects")]
    failures = [failure for taker in takers for failure in taker.failures]
    lost, doubled = len(bodies) - len(set(names)), len(names) - len(set(names))
    counted(
        "serialization failure", f"{how}, serializable, 4 threads",
        elements=len(bodies), failures=len(failures), lost=lost, doubled=doubled,
    )  # fmt: skip
    assert (lost, doubled) == (0, 0)
    assert set(failures) == {psycopg.errors.SerializationFailure}


def test_a_stream_is_not_read_above_read_committed_and_says_so(shop: World) -> None:
    with transaction.atomic():
        read_stream("shop", "ORDERS")
    publish("ORDERS", "it")
    for isolation in (REPEATABLE, SERIALIZABLE):
        with pytest.raises(DatabaseError, match="READ COMMITTED"):
            _read_in(isolation)
    with transaction.atomic():
        assert [message.body for message in read_stream("shop", "ORDERS")] == ["it"]


def _read_in(isolation: str) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(isolation)
        read_stream("shop", "ORDERS")
