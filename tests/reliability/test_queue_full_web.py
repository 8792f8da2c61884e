"""The notification queue is full for exchanges, REST, WebSockets and Django: told, nothing half."""

import re
from collections.abc import Callable

import pytest
import pytest_django
from django.contrib.auth.models import User
from django.db import DatabaseError, OperationalError, transaction

from project.postgres import Server
from psqlmessages import MessagesError, NotificationQueueFull
from psqlmessages.django import publish, send, send_many
from tests.conftest import TestedServer
from tests.django.waiting import wait_until
from tests.exchanges.field import Bed, working
from tests.exchanges.field import Field as Exchanges
from tests.reliability.counts import counted, size
from tests.reliability.holders import SMALL_QUEUE, full_queue, need_small_queue
from tests.reliability.own_sites import own_site
from tests.reliability.projects import django_at
from tests.rest.callers import Caller, bearer
from tests.sql.conftest import Program, World
from tests.web.sockets import Visitor

SERVER_SETTINGS, need_server = SMALL_QUEUE, need_small_queue
FAULT = "the notification queue is full"
OWNER = Server.owner
RULES = (
    f"{OWNER} SENDER Topic T RW 60",
    f"{OWNER} web.* Topic T RW 60",
    f"{OWNER} web.* Queue Q RW 60",
    "user1 WAITER Queue * RW 60",
    "user2 LISTENER Topic T RW 60",
)
AWAITED = "SELECT awaited_until > clock_timestamp() FROM psqlmessages_queue WHERE name = %s"
KEPT = """
    SELECT (SELECT count(*) FROM psqlmessages_streammessage)
        + (SELECT count(*) FROM psqlmessages_element)
"""


@pytest.fixture
def listener(own_world: World) -> Program:
    """LISTENER listens to T, and is subscribed to it."""
    own_world.rules(*RULES)
    own_world.wait_for("SELECT pg_notification_queue_usage() = 0")
    listener = own_world.node("user2", "LISTENER")
    listener.ok("topic_listen", "T")
    listener.read("LISTENER", "T")
    return listener


def waits_for(world: World, queue: str) -> Program:
    """Somebody who waits for elements, and so is notified of each push."""
    # Where rules went, as before each test, channels move at the next look.
    world.wait_for("SELECT (messages.evaluate() ->> 'Err') = '0'")
    waiter = world.program("user1")
    channel = waiter.ok("queue_listen", "WAITER", queue)["Channel"]
    waiter.connection.execute(f'LISTEN "{channel}"')
    assert world.owner.query(AWAITED, queue)
    return waiter


@pytest.mark.django_db(transaction=True)
def test_an_exchange_delivers_nothing_or_all(own: TestedServer, own_world: World) -> None:
    with django_at(own):
        bed = Bed(own)
        exchanges = Exchanges({"default": bed})
        try:
            exchanges.define(x={"src": "a", "dst": ["b", "c"]})
            own_world.rules(*RULES)
            waits_for(own_world, "b")
            bodies = [str(number) for number in range(size(500, 5000))]
            bed.push_many("a", bodies)
            with full_queue(own), working() as hands:
                assert hands.worker is not None
                ledger = hands.worker.ledger
                exchanges.until(lambda: any(tally.waits for tally in ledger.tallies.values()))
                half_done = len(bodies) - len(bed.bodies("a"))
                half_done += len(bed.bodies("b")) + len(bed.bodies("c"))
            exchanges.run_until_idle()
            found = [bed.bodies(queue) for queue in "bc"]
        finally:
            exchanges.close()
    lost = sum(len(set(bodies) - set(each)) for each in found)
    doubled = sum(len(each) - len(set(each)) for each in found)
    counted(
        FAULT, "an exchange, where somebody waits at a destination",
        elements=len(bodies), half_done=half_done, lost=lost, doubled=doubled,
    )  # fmt: skip
    assert (half_done, lost, doubled) == (0, 0, 0)


SENDS: dict[str, Callable[[], object]] = {
    "send": lambda: send("T", "x", ident="SENDER"),
    "send_many": lambda: send_many("T", ["x", "y"], ident="SENDER"),
    "publish": lambda: publish("T", "x", ident="SENDER"),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", SENDS)
def test_in_django_the_transaction_fails_and_all_that_belongs_to_it(
    own: TestedServer, own_world: World, listener: Program, way: str
) -> None:
    run, tries = SENDS[way], size(5, 50)
    told: list[type[Exception]] = []
    committed: list[str] = []

    def with_a_row() -> None:
        with transaction.atomic():
            User.objects.create(username=f"of the transaction of {way}")
            transaction.on_commit(lambda: committed.append(way))
            run()

    with django_at(own):
        before = own_world.owner.query(KEPT)
        with full_queue(own):
            for act in (with_a_row, run):
                for _ in range(tries):
                    with pytest.raises((DatabaseError, MessagesError)) as refused:
                        act()
                    told.append(type(refused.value))
                    assert re.search("too many notifications|queue is full", str(refused.value))
            half_done = own_world.owner.query(KEPT) - before + len(committed)
            half_done += User.objects.filter(username__endswith=way).count()
        own_world.wait_for("SELECT pg_notification_queue_usage() < 0.5")
        wait_until(lambda: succeeds(with_a_row))
        rows = User.objects.filter(username__endswith=way)
        assert rows.count() == 1
        rows.delete()
    counted(
        FAULT, f"{way} of psqlmessages.django, alone and in transaction.atomic()",
        refused=len(told), half_done=half_done, done_afterwards=len(committed),
    )  # fmt: skip
    assert (half_done, committed) == (0, [way])
    assert told == [OperationalError] * tries + [NotificationQueueFull] * tries


def succeeds(act: Callable[[], object]) -> bool:
    """Whether the full queue refuses no more."""
    try:
        act()
    except (DatabaseError, NotificationQueueFull):
        return False
    return True


def test_the_rest_api_and_websockets_say_so(
    own: TestedServer,
    own_world: World,
    listener: Program,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    waits_for(own_world, "Q")
    calls, tries = ("topics/T", "q/default/Q"), size(5, 50)
    with own_site(own, tmp_path_factory.mktemp("site"), django_db_blocker) as site:
        caller = Caller(site, bearer(site, "wanda", "web.rest"))
        site.user("alice", idents=["web.alice"])
        socket = Visitor(site, cookie=site.login("alice"))
        socket.ok("init", ident="web.alice")
        socket.ok("topic_notify", topic="T")
        before = own_world.owner.query(KEPT)
        with full_queue(own):
            answers = [caller.call("POST", call, b"x") for call in calls for _ in range(tries)]
            errors = {socket.error("topic_send", topic="T", body="x") for _ in range(tries)}
            reads = [caller.call("GET", "topics/T").status for _ in range(tries)]
            half_done = own_world.owner.query(KEPT) - before
        for call in calls:
            wait_until(lambda call=call: caller.call("POST", call, b"y").status < 300)
        wait_until(lambda: socket.call("topic_send", topic="T", body="z")["Err"] == "0")
        caller.close()
        socket.close()
    counted(
        FAULT, "REST API", answered_503=sum(answer.status == 503 for answer in answers),
        read_meanwhile=len(reads), half_done=half_done,
    )  # fmt: skip
    counted(FAULT, "a WebSocket", refused_with=58, half_done=half_done)
    assert {answer.status for answer in answers} == {503}
    assert {"notification queue" in answer.detail for answer in answers} == {True}
    assert errors == {(58, "more than PostgreSQL's notification queue holds")}
    assert set(reads) == {200}
    assert half_done == 0
