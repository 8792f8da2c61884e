"""Every migration undone and made again, with data in all tables and nodes that stay connected."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import pytest_django
from django.contrib.auth.models import User
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.timezone import now

from psqlmessages import AsyncNode, Node
from psqlmessages.exceptions import NotInitialized
from psqlmessages.models import PipelineJob, Traffic, WebIdentity
from tests.conftest import TestedServer
from tests.reliability.counts import counted
from tests.reliability.crowd import EXCHANGE, write_exchange
from tests.reliability.migrating import (
    ALIAS,
    LATEST,
    Contents,
    contents,
    migrate,
    owners_database,
)
from tests.reliability.restarts import until
from tests.sql.conftest import World

RULES = (
    "user1 SYNC Topic T RW 60", "user2 ASYNC Topic T RW 60", "user1 PUB Topic * W 60",
)  # fmt: skip
MORE_RULES = (
    "user2 SUB Topic NEWS R 60", "user2 KEEPER Topic NEWS R 60", "user1 PUB Queue Q RW 60",
)  # fmt: skip
LISTEN = (
    "SELECT (SELECT cardinality(t.listeners) FROM messages.topics AS t WHERE t.topic = 'T') = 2"
)
# What docs/operations.md says that is removed by going back to a state.
REMOVED = {
    "0005_exchanges": {"psqlmessages_traffic", "psqlmessages_pipelinejob"},
    "0004_web": {
        "psqlmessages_exchange", "psqlmessages_destination", "psqlmessages_exchangecount",
    },
    "0003_sql": {"psqlmessages_webidentity"},
    "0002_queues": {
        "psqlmessages_streammessage", "psqlmessages_body", "messages._batch", "messages.staged",
        "messages._secret", "messages._settings", "messages._gate", "messages._evaluation",
        "messages._rules", "messages._recheck", "messages._unfinished",
        "messages._role_memberships", "messages._queues", "messages._stream",
        "messages._stream_last", "messages._stream_gone",
        "messages._clock_gap",
    },
    "0001_initial": {
        "psqlmessages_queue", "psqlmessages_element", "psqlmessages_elementkey",
        "psqlmessages_queuecount",
    },
    "zero": {
        "psqlmessages_auth", "psqlmessages_topic", "psqlmessages_session", "psqlmessages_client",
        "psqlmessages_membership", "psqlmessages_observation", "psqlmessages_subscription",
    },
}  # fmt: skip
# Those where something stands without anybody's doing, or nothing.
NOT_FILLED = {
    "psqlmessages_exchangecount", "psqlmessages_observation", "messages._evaluation",
    "messages._stream_gone", "messages._stream_last",
    "messages._recheck", "messages._unfinished", "messages._role_memberships",
    "messages._clock_gap",
}  # fmt: skip
# What calls move all the time: a position that goes on, when queues were last tended.
MOVING = {
    "psqlmessages_subscription", "messages._queues", "messages._stream", "messages._clock_gap",
}  # fmt: skip
STAGE = """
    INSERT INTO messages.staged (staging, place, bodies) VALUES (gen_random_uuid(), 1, '{"a"}');
    INSERT INTO messages._batch (role, query, batch) VALUES ('user1', gen_random_uuid()::text, 1)
"""
COUNTS = "SELECT row_to_json(q)::text FROM messages.queues AS q"


class Guests:
    """A Node and an AsyncNode that listen to T and stay, whatever becomes of the database."""

    def __init__(self, world: World) -> None:
        self._world, self._heard = world, Counter[str]()
        url = world.server.url
        self.sync, self.other = Node("SYNC", url("user1")), AsyncNode("ASYNC", url("user2"))
        self.threads = (
            threading.Thread(target=self._run),
            threading.Thread(target=lambda: asyncio.run(self._run_async())),
        )

    def _run(self) -> None:
        with self.sync as node:
            node.topic_listen("T")
            for message in node.messages():
                self._heard[message.event or message.body] += 1

    async def _run_async(self) -> None:
        async with self.other as node:
            await node.topic_listen("T")
            async for message in node.messages():
                self._heard[message.event or message.body] += 1

    @property
    def are_here(self) -> bool:
        """Whether neither has ended, nor lost its connection."""
        return all(thread.is_alive() for thread in self.threads) and not self._heard["reconnected"]

    def hear(self, word: str) -> None:
        """Send to them, and wait until both have heard it, once."""
        self._world.program("user1").ok("topic_send_as", "PUB", "T", word)
        until(lambda: self._heard[word] >= 2)
        assert self._heard[word] == 2


@contextmanager
def guests_of(world: World) -> Iterator[Guests]:
    guests = Guests(world)
    for thread in guests.threads:
        thread.start()
    try:
        until(lambda: not guests.are_here or world.owner.query(LISTEN))
        yield guests
    finally:
        guests.sync.stop()
        guests.other.stop()
        for thread in guests.threads:
            thread.join(90)


def fill(world: World) -> None:
    """Write something that only Django's tables hold, staged rows, a stream and a queue."""
    write_exchange(world.server, "ship", EXCHANGE)
    user, _ = User.objects.using(ALIAS).get_or_create(username="wanda")
    WebIdentity.objects.using(ALIAS).get_or_create(user=user, ident="wanda")
    PipelineJob.objects.using(ALIAS).get_or_create(name="job", state="running")
    figures = ("size_p50", "size_p95", "size_p99", "latency_p50", "latency_p95", "latency_p99")
    Traffic.objects.using(ALIAS).create(
        topic="T", sender="N", window_seconds=10, starts_at=now(), count=1, bytes=1,
        **dict.fromkeys(figures, 1.0),
    )  # fmt: skip
    world.owner.connection.execute(STAGE)
    publisher = world.program("user1")
    read_and_keep(world)
    publisher.ok("publish", "PUB", "NEWS", "kept")
    publisher.ok("topic_send_as", "PUB", "T", "x" * 20_000)
    publisher.ok("push", "PUB", "Q", "kept", None, None, None, None, 0, "key")
    publisher.ok("push", "PUB", "Q", "taken")


def read_and_keep(world: World) -> None:
    """Read as one reader; by the other one nothing is ever passed, so that nothing may go."""
    reader = world.program("user2")
    if not world.owner.query("SELECT count(*) FROM messages.stream_subscriptions"):
        reader.read("KEEPER", "NEWS", 3_600)
    reader.read("SUB", "NEWS")


def there_and_back(state: str, world: World, guests: Guests, database: BaseDatabaseWrapper) -> int:
    """Go back to a state and forward again; how many rows were removed, as is said."""
    before, queues = contents(database), world.owner.query(COUNTS)
    migrate(state)
    gone = contents(database)
    removed = set[str]().union(
        *(REMOVED[step] for step in list(REMOVED)[: list(REMOVED).index(state) + 1])
    )
    assert before.keys() - gone.keys() == removed
    assert {name for name in removed - NOT_FILLED if not before[name]} == set()
    assert guests.are_here
    migrate(LATEST)
    after = contents(database)
    assert before.keys() == after.keys()
    kept = gone.keys() - MOVING
    assert pick(before, kept) == pick(gone, kept) == pick(after, kept)
    if state not in ("0001_initial", "zero"):
        assert world.owner.query(COUNTS) == queues
    return sum(len(rows) for name, rows in before.items() if name not in gone)


def pick(found: Contents, names: set[str]) -> Contents:
    return {name: found[name] for name in names}


@pytest.mark.nightly  # every migration back and forward; every day those of functions
@pytest.mark.timeout(300)
def test_each_step_back_removes_what_is_said_and_forward_again_all_works(
    own: TestedServer,
    own_world: World,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    own_world.rules(*RULES, *MORE_RULES)
    with (
        django_db_blocker.unblock(),
        owners_database(own) as database,
        guests_of(own_world) as guests,
    ):
        read_and_keep(own_world)
        own_world.program("user1").ok("publish", "PUB", "NEWS", "that there is the topic")
        removed = {}
        for state in REMOVED:
            fill(own_world)
            removed[state] = there_and_back(state, own_world, guests, database)
            if state != "zero":
                guests.hear(f"after {state}")
        assert guests.are_here
        # Nothing is left of them: they are told at their next call, and others may come.
        own_world.rules(*RULES)
        with pytest.raises(NotInitialized):
            guests.sync.topic_listen("T")
        with Node("SYNC", own.url("user1")) as node:
            assert node.topic_listen("T")
    counted(
        "an upgrade", "each migration undone and made again under nodes", steps=len(removed),
        rows_removed_as_said=sum(removed.values()), others_removed=0, nodes_that_ended=0,
    )  # fmt: skip
