"""A full disk: each call fails with PostgreSQL's words, what was committed stays, and all go on."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import psycopg
import pytest

from psqlmessages import Node
from psqlmessages.cli.prune import prune
from psqlmessages.exceptions import MessagesError
from tests.conftest import TestedServer
from tests.reliability.conftest import create_once
from tests.reliability.counts import report, size
from tests.reliability.faults import Disk, log_moved, move_tables, small_disk, until
from tests.reliability.workload import Workload, query_column, stored_elements, stored_messages
from tests.servers import SERVER
from tests.sql.conftest import World
from tests.temporary_server import temporary_server

FAULT = "disk full"
RULES = (
    "user1 A Topic T RW 60", "user1 A Queue Q RW 60", "user2 B Topic T R 60",
    "user2 B Queue Q R 60", "psqlmessages L Queue Q W 60",
)  # fmt: skip
MEGABYTES, LOG_MEGABYTES = 96, 160
SPARE = 1024 * 1024
MANY = 40
# PostgreSQL needs this room to empty tables: it writes first pages of indexes.
ROOM = 64 * 1024
# With autovacuum, the counts would depend on the time.
SETTINGS = {"autovacuum": "off", "max_wal_size": "64MB", "min_wal_size": "32MB"}
TABLES_ARE_DUE = "UPDATE messages._stream SET maintained_at = 'epoch', switched_at = 'epoch'"
REFUSALS = (psycopg.Error, MessagesError)


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory, pytestconfig) -> tuple[TestedServer, Disk]:
    """A server whose tables are on a disk that can be filled."""
    if os.geteuid() != 0:
        pytest.skip("a disk that can be full is mounted by root")

    def create(stack: ExitStack) -> tuple[TestedServer, Disk]:
        folder, binaries = tmp_path_factory.mktemp("disk"), pytestconfig.stash[SERVER].binaries
        own_server = stack.enter_context(temporary_server(folder, binaries, settings=SETTINGS))
        small = stack.enter_context(small_disk(own_server.server.home.folder / "small", MEGABYTES))
        move_tables(own_server, small)
        return own_server, small

    made: tuple[TestedServer, Disk] = create_once(pytestconfig, "disk", create)
    return made


@dataclass
class Writing:
    """Node A writes until the disk is full: the bodies that were written, and the errors."""

    world: World
    disk: Disk
    node: Node
    done: list[str] = field(default_factory=list)
    faults: list[psycopg.Error] = field(default_factory=list)

    def until_full(self, act: Callable[[list[str]], object]) -> None:
        """Repeat a call with new bodies until PostgreSQL refuses it."""
        for _ in range(100_000):
            bodies = [f"{len(self.done) + number} {'x' * 500}" for number in range(MANY)]
            try:
                act(bodies)
            except psycopg.errors.DiskFull as error:
                self.faults.append(error)
                return
            self.done += bodies
        raise AssertionError("the disk is never full")

    def publish_much(self) -> None:
        for number in range(50):
            self.node.publish_many("T", [f"{number} {each} {'x' * 500}" for each in range(MANY)])


@pytest.fixture
def writing(full_disk: tuple[TestedServer, Disk]) -> Iterator[Writing]:
    own_server, small = full_disk
    world = World(own_server)
    world.rules(*RULES)
    try:
        with Node("A", own_server.url("user1")) as node:
            yield Writing(world, small, node)
    finally:
        small.clear()
        world.close()


def large(world: World) -> list[str]:
    return query_column(world, "SELECT body FROM psqlmessages_body")


WAYS: dict[str, tuple[Callable[[Node, list[str]], object], Callable[[World], list[str]]]] = {
    "publish_many": (lambda node, bodies: node.publish_many("T", bodies), stored_messages),
    "push_many": (lambda node, bodies: node.push_many("Q", bodies), stored_elements),
    "topic_send with large bodies": (
        lambda node, bodies: node.topic_send("T", "".join(bodies)),
        large,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_call_changes_nothing_and_keeps_earlier_commits(writing: Writing, way: str):
    act, stored = WAYS[way]
    reader = writing.world.program("user2")
    reader.read("B", "T")
    if stored is large:
        reader.ok("init", "B")
        reader.ok("topic_listen", "T")
        writing.node.topic_notify("T")
    ends = [f"{-number} {'x' * 500}" for number in range(1, MANY + 1)]
    act(writing.node, ends)
    before = stored(writing.world)
    writing.disk.fill(spare=SPARE)
    for _ in range(size(1, 3)):
        writing.until_full(lambda bodies: act(writing.node, bodies))
    writing.disk.clear()
    act(writing.node, ends)
    found = stored(writing.world)
    if stored is large:
        lost, half = len(before) + len(writing.done) // MANY + 1 - len(found), 0
    else:
        wanted = [*before, *writing.done, *ends]
        lost, half = len(set(wanted) - set(found)), len(found) - len(wanted)
    report(
        FAULT, way, committed=len(writing.done), refused=len(writing.faults), lost=lost,
        partly_done=half,
    )  # fmt: skip
    assert (lost, half) == (0, 0)
    for fault in writing.faults:
        assert "No space left on device" in str(fault)
        assert "Check free disk space" in str(fault)


def test_removals_work_while_the_disk_is_full(writing: Writing):
    world = writing.world
    reader = world.program("user2")
    reader.read("B", "T")
    writing.publish_much()
    writing.disk.fill(spare=SPARE)
    writing.until_full(lambda bodies: writing.node.push_many("Q", bodies))
    writing.disk.fill()
    # Taking elements updates counters, which may need a page.
    writing.disk.free_up(ROOM)
    world.owner.connection.execute("UPDATE messages._stream SET maintained_at = 'infinity'")
    reader.ok("unsubscribe", "B", "T")
    popped = len(writing.node.pop("Q", 100))
    drained = writing.node.drain("Q")
    left = stored_elements(world)
    writing.disk.fill()
    # If housekeeping at a commit fails, the call succeeds.
    world.owner.connection.execute(TABLES_ARE_DUE)
    assert world.program("user1").elements("pop", "A", "Q") == []
    url = world.server.url()
    with pytest.raises(REFUSALS, match="No space left on device"):
        prune(url)
    writing.disk.free_up(ROOM)
    tables, free = prune(url)["emptied_tables"], writing.disk.free
    writing.publish_much()
    report(
        FAULT, "pop, drain, unsubscribe with 64 kB free; prune without free space, then with 64 kB",
        popped=popped, drained=drained, left=len(left), prunes_refused=1, tables_emptied=tables,
        freed_kilobytes=(free - ROOM) // 1024,
    )  # fmt: skip
    assert (popped, left, tables) == (100, [], 1)
    assert free > 10 * ROOM


def test_readers_and_workers_go_on_by_themselves(writing: Writing):
    with Workload(writing.world, "stream of Node", "AsyncNode.consume") as work:
        for _ in range(size(2, 10)):
            work.wait_for_writes(20)
            refused = work.refused.total()
            writing.disk.fill()
            until(
                lambda: work.refused.total() > refused or work.is_too_far_ahead() or work.failures  # noqa: B023
            )
            writing.disk.clear()
        work.wait_for_writes(20)
    work.report(FAULT, "a stream reader and a consumer continue", refused=work.refused.total())


@pytest.mark.nightly  # the server is stopped and started three times
def test_a_full_wal_loses_no_committed_data(full_disk: tuple[TestedServer, Disk], writing: Writing):
    own_server, done = full_disk[0], list[str]()
    folder = own_server.server.home.folder / "log"

    def push_without_end() -> None:
        for number in range(100_000):
            node.push_many("Q", bodies := [f"{number} {n} {'x' * 500}" for n in range(200)])
            done.extend(bodies)

    with small_disk(folder, LOG_MEGABYTES) as small, log_moved(own_server, small):
        small.fill()
        with Node("L", own_server.url()) as node, pytest.raises(REFUSALS):
            push_without_end()
        small.clear()
        own_server.server.stop("immediate")
        own_server.server.start()
        found = stored_elements(writing.world)
    lost = len(set(done) - set(found))
    # The last call may have been committed although it failed.
    half = (len(found) - len(done)) % 200
    report(
        FAULT, "the write-ahead log: the server stops", committed=len(done), lost=lost,
        partly_done=half,
    )  # fmt: skip
    assert (lost, half) == (0, 0)
    assert done
