"""A full disk: each call fails with PostgreSQL's words, what was committed stays, and all go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import psycopg
import pytest
import pytest_django
from django.contrib.auth.models import User

from project.postgres import Server
from psqlmessages import MessagesError, Node
from psqlmessages.commands.prune import emptied
from psqlmessages.models import Auth
from tests.conftest import TestedServer
from tests.exchanges.field import Bed, working
from tests.exchanges.field import Field as Exchanges
from tests.own_server import own_server
from tests.reliability.conftest import kept
from tests.reliability.counts import counted, size
from tests.reliability.disk import Disk, disk, move_log, move_log_back, move_tables
from tests.reliability.own_sites import own_site
from tests.reliability.projects import django_at
from tests.reliability.restarts import until
from tests.reliability.work import Work
from tests.servers import SERVER
from tests.sql.conftest import World
from tests.web.sockets import Visitor as Socket
from tests.web.visitor import Visitor

FAULT = "disk full"
RULES = (
    "user1 A Topic T RW 60",
    "user1 A Queue Q RW 60",
    "user2 B Topic T R 60",
    "user2 B Queue Q R 60",
    "user1 pipeline Topic T W 60",
    "psqlmessages L Queue Q W 60",
    f"{Server.owner} web.* Topic T* RW 60",
)
MEGABYTES, LOG_MEGABYTES = 96, 160
SPARE = 1024 * 1024
MANY = 40
# What PostgreSQL writes to empty tables: first pages of new indexes, and where each topic ended.
ROOM = 64 * 1024
# What autovacuum gives back, and takes, would make the counts depend on the time.
SETTINGS = {"autovacuum": "off", "max_wal_size": "64MB", "min_wal_size": "32MB"}
# Kept in a table until it is fetched; PostgreSQL cannot make it shorter.
LONG = "".join(map(chr, range(0x4E00, 0x4E00 + 12_000)))
PUBLISHED = """
    SELECT m.payload FROM psqlmessages_streammessage AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id WHERE t.name = 'T'
"""
PUSHED = """
    SELECT e.body FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'Q'
"""
NOTHING_IS_EMPTIED = "UPDATE messages._stream SET tended_at = 'infinity'"
TABLES_ARE_DUE = "UPDATE messages._stream SET tended_at = '-infinity', switched_at = '-infinity'"
KEPT = "SELECT body FROM psqlmessages_body"


@pytest.fixture(scope="module")
def full_disk(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> tuple[TestedServer, Disk]:
    """A server whose tables are on a disk that can be filled."""
    if os.geteuid() != 0:
        pytest.skip("a disk that can be full is mounted by root")

    def make(stack: ExitStack) -> tuple[TestedServer, Disk]:
        folder, binaries = tmp_path_factory.mktemp("disk"), pytestconfig.stash[SERVER].binaries
        own = stack.enter_context(own_server(folder, binaries, settings=SETTINGS))
        small = stack.enter_context(disk(own.server.home.folder / "small", MEGABYTES))
        move_tables(own, small)
        return own, small

    made: tuple[TestedServer, Disk] = kept(pytestconfig, "disk", make)
    return made


@dataclass
class Writing:
    """Node A writes until the disk is full; what it was told to be done, and what it was told."""

    world: World
    disk: Disk
    node: Node
    done: list[str] = field(default_factory=list)
    faults: list[psycopg.Error] = field(default_factory=list)

    def until_full(self, act: Callable[[list[str]], object], count: int) -> None:
        """Repeat a call with bodies of its own until PostgreSQL refuses it."""
        for _ in range(100_000):
            bodies = [f"{len(self.done) + number} {'x' * 500}" for number in range(count)]
            try:
                act(bodies)
            except psycopg.errors.DiskFull as error:
                self.faults.append(error)
                return
            self.done += bodies
        raise AssertionError("the disk is never full")

    def found(self, query: str) -> list[str]:
        """The bodies that are in the database."""
        return [body for (body,) in self.world.owner.connection.execute(query)]


@pytest.fixture
def writing(full_disk: tuple[TestedServer, Disk]) -> Iterator[Writing]:
    own, small = full_disk
    world = World(own)
    world.rules(*RULES)
    try:
        with Node("A", own.url("user1")) as node:
            yield Writing(world, small, node)
    finally:
        small.clear()
        world.close()


WAYS: dict[str, tuple[Callable[[Node, list[str]], object], int, str]] = {
    "publish": (lambda node, bodies: node.publish("T", bodies[0]), 1, PUBLISHED),
    "publish_many": (lambda node, bodies: node.publish_many("T", bodies), MANY, PUBLISHED),
    "push": (lambda node, bodies: node.push("Q", bodies[0]), 1, PUSHED),
    "push_many": (lambda node, bodies: node.push_many("Q", bodies), MANY, PUSHED),
    "long bodies": (lambda node, bodies: node.topic_send("T", "".join(bodies)), MANY, KEPT),
}


@pytest.mark.parametrize(
    "way",
    [
        # Many at once fill a page in the middle of a call, and so do long bodies.
        *(pytest.param(way, marks=pytest.mark.nightly) for way in ("publish", "push")),
        "publish_many",
        "push_many",
        "long bodies",
    ],
)
def test_a_call_is_refused_whole_and_what_was_committed_stays(writing: Writing, way: str) -> None:
    act, count, query = WAYS[way]
    reader = writing.world.program("user2")
    reader.read("B", "T")
    if query is KEPT:
        reader.ok("init", "B")
        reader.ok("topic_listen", "T")
        writing.node.topic_notify("T")
    ends = [f"{-number} {'x' * 500}" for number in range(1, count + 1)]
    act(writing.node, ends)
    before = writing.found(query)
    writing.disk.fill(spare=SPARE)
    for _ in range(size(1, 3)):
        writing.until_full(lambda bodies: act(writing.node, bodies), count)
    writing.disk.clear()
    refused = len(writing.done)
    act(writing.node, ends)
    found = writing.found(query)
    if query is KEPT:
        wanted = len(before) + len(writing.done) // count + 1
        lost, half = wanted - len(found), 0
    else:
        wanted_bodies = [*before, *writing.done, *ends]
        lost = len(set(wanted_bodies) - set(found))
        half = len(found) - len(wanted_bodies)
    counted(FAULT, way, committed=refused, refused=len(writing.faults), lost=lost, half_done=half)
    assert (lost, half) == (0, 0)
    for fault in writing.faults:
        assert "No space left on device" in str(fault)
        assert "Check free disk space" in str(fault)


@pytest.mark.nightly  # Arrow is read in
def test_staged_rows_are_refused_whole_and_go_in_afterwards(
    writing: Writing, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("pyarrow")
    from psqlmessages.pipeline import committing, staging
    from tests.pipeline.test_sink_commits import batches, writer

    path = tmp_path_factory.mktemp("dsn") / "user1"
    path.touch(mode=0o600)
    path.write_text(writing.world.server.url("user1"))
    writing.world.program("user2").read("B", "T")
    stream = writer({"topic": "T", "dsnFile": str(path)})
    bodies = [f"{number} {'x' * 4000}" for number in range(400)]
    try:
        writing.disk.fill()
        with pytest.raises(MessagesError, match="No space left on device"):
            stream.write(batches(*bodies))
        writing.disk.clear()
        staged = stream.write(batches(*bodies))
        writing.disk.fill()
        with pytest.raises((psycopg.errors.DiskFull, MessagesError), match="No space left"):
            stream.commit([staged], 0)
        assert writing.found(PUBLISHED) == []
        writing.disk.clear()
        stream.commit([staged], 0)
        stream.commit([staged], 0)
    finally:
        committing.close()
        staging.close()
    assert sorted(writing.found(PUBLISHED)) == sorted(bodies)
    counted(
        FAULT, "rows staged by Spark", committed=len(bodies), refused=2, lost=0, doubled=0
    )  # fmt: skip


def test_what_removes_goes_on_while_the_disk_is_full(writing: Writing) -> None:
    reader = writing.world.program("user2")
    reader.read("B", "T")
    for number in range(50):
        writing.node.publish_many("T", [f"{number} {each} {'x' * 500}" for each in range(MANY)])
    writing.disk.fill(spare=SPARE)
    writing.until_full(lambda bodies: writing.node.push_many("Q", bodies), MANY)
    writing.disk.fill()
    # Who takes counts, and needs a page for that now and then.
    writing.disk.give(ROOM)
    writing.world.owner.connection.execute(NOTHING_IS_EMPTIED)
    reader.ok("unsubscribe", "B", "T")
    popped = len(writing.node.pop("Q", 100))
    drained = writing.node.drain("Q")
    left = writing.found(PUSHED)
    writing.disk.fill()
    # What the commit of a call looks after fails, and the call does not.
    writing.world.owner.connection.execute(TABLES_ARE_DUE)
    assert writing.world.program("user1").elements("pop", "A", "Q") == []
    url = writing.world.server.url()
    with pytest.raises((psycopg.errors.DiskFull, MessagesError), match="No space left on device"):
        emptied(url)
    writing.disk.give(ROOM)
    tables, free = emptied(url), writing.disk.free
    for number in range(50):
        writing.node.publish_many("T", [f"{number} {each} {'x' * 500}" for each in range(MANY)])
    counted(
        FAULT, "pop, drain, unsubscribe with 64 KB; prune with none, then with 64 KB",
        popped=popped, drained=drained, left=len(left),
        prune_refused=1, tables_emptied=tables, kilobytes_given_back=(free - ROOM) // 1024,
    )  # fmt: skip
    assert (popped, left, tables) == (100, [], 1)
    assert free > 10 * ROOM


@pytest.mark.django_db(transaction=True)
def test_the_admin_says_why_nothing_was_saved(writing: Writing) -> None:
    with django_at(writing.world.server):
        visitor = Visitor()
        User.objects.filter(username="chief").delete()
        visitor.client.force_login(User.objects.create_superuser("chief"))
        page = visitor.open("/admin/psqlmessages/auth/add/")
        writing.disk.fill()
        names = ("role", "ident", "type", "dest", "mode", "timeout")
        for number in range(2000):
            given = ("user3", f"N{number}", "Topic", "Z" * 99, "R", "9")
            values = dict(zip(names, given, strict=True))
            answer = visitor.send(page, "Save", **values)
            if answer.errors or not Auth.objects.filter(ident=f"N{number}").exists():
                break
        assert "No space left on device" in answer.text, answer.text
        assert not Auth.objects.filter(ident=f"N{number}").exists()
        writing.disk.clear()
        visitor.send(answer, "Save", **values)
        assert Auth.objects.filter(ident=f"N{number}").exists()
    counted(FAULT, "a rule saved in the admin", refused=1, saved_afterwards=1)


def test_readers_and_workers_go_on_by_themselves(writing: Writing) -> None:
    with Work(writing.world, "stream of Node", "AsyncNode.consume") as work:
        for _ in range(size(2, 10)):
            work.go_on(20)
            refused = work.refused.total()
            writing.disk.fill()
            # The writer waits for a reader that has no room, or has none itself.
            until(
                lambda: work.refused.total() > refused or work.is_too_far() or work.failures  # noqa: B023
            )
            writing.disk.clear()
        work.go_on(20)
    counted(
        FAULT, "a durable reader and a consumer go on",
        **work.counts(), refused=work.refused.total(),
    )  # fmt: skip
    work.check()


@pytest.mark.django_db(transaction=True)
def test_exchanges_go_on_by_themselves(writing: Writing) -> None:
    own = writing.world.server
    with django_at(own):
        bed = Bed(own)
        exchanges = Exchanges({"default": bed})
        try:
            exchanges.define(x={"src": "a", "dst": ["b", "c"]})
            # The bed has rules of its own only.
            writing.world.rules(*RULES)
            bodies = [f"{number} {'x' * 2000}" for number in range(size(2000, 10_000))]
            bed.push_many("a", bodies)
            writing.disk.fill()
            writing.until_full(lambda bodies: writing.node.push_many("Q", bodies), MANY)
            with working() as hands:
                assert hands.worker is not None
                worker = hands.worker
                until(lambda: any(tally.waits for tally in worker.ledger.tallies.values()))
                writing.disk.clear()
                exchanges.until_idle(60)
            found = [sorted(bed.bodies(queue)) for queue in "bc"]
        finally:
            exchanges.close()
    assert found == [sorted(bodies)] * 2
    counted(FAULT, "an exchange goes on", elements=len(bodies), lost=0, doubled=0)


@pytest.mark.nightly  # a site starts for it
def test_websockets_are_told_and_go_on(
    writing: Writing,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    rounds, told, short = size(3, 20), set(), 0
    folder = tmp_path_factory.mktemp("site")
    with own_site(writing.world.server, folder, django_db_blocker) as site:
        site.user("alice", idents=["web.*"])
        cookie = site.login("alice")
        alice, bob, late = (Socket(site, cookie=cookie) for _ in range(3))
        for name, socket in (("alice", alice), ("bob", bob)):
            socket.ok("init", ident=f"web.{name}")
        bob.ok("topic_listen", topic="T")
        alice.ok("topic_notify", topic="T")
        for number in range(rounds):
            writing.disk.fill()
            for _ in range(3):
                told.add(until_refused(alice))
            # What needs no room goes on meanwhile.
            short += is_sent(alice, f"short {number}")
            read_until(bob, f"short {number}")
            late.call("init", ident="web.late")
            writing.disk.clear()
            until(lambda: is_sent(alice, LONG))
            read_until(bob, LONG)
            late.ok("init", ident="web.late")
            late.ok("deinit")
        alice.ok("topic_listen", topic="T.other")
        for socket in (alice, bob, late):
            socket.close()
    counted(
        FAULT, "WebSockets that send long bodies", refused=3 * rounds, refused_with=56,
        short_ones_sent_meanwhile=short, closed=0,
    )  # fmt: skip
    assert told == {(56, "the request failed")}
    assert short == rounds


def is_sent(socket: Socket, body: str) -> bool:
    return bool(socket.call("topic_send", topic="T", body=body)["Err"] == "0")


def until_refused(socket: Socket) -> tuple[int, str]:
    """Send long bodies until one is refused: by which error."""
    for _ in range(1000):
        answer = socket.call("topic_send", topic="T", body=LONG)
        if answer["Err"] != "0":
            return int(answer["Err"]), answer["Errstr"]
    raise AssertionError("the disk is never full")


def read_until(socket: Socket, wanted: str) -> None:
    while socket.message().get("Body") != wanted:
        pass


@pytest.mark.nightly  # the server is stopped and started three times
def test_the_log_of_changes_is_full_and_nothing_committed_is_lost(
    full_disk: tuple[TestedServer, Disk], writing: Writing
) -> None:
    own, _ = full_disk
    with disk(own.server.home.folder / "log", LOG_MEGABYTES) as small:
        move_log(own, small)
        done: list[str] = []
        with Node("L", own.url()) as node, pytest.raises((MessagesError, psycopg.Error)):
            push_until_refused(small, node, done)
        small.clear()
        own.server.stop("immediate")
        own.server.start()
        with psycopg.connect(own.url()) as owner:
            found = [body for (body,) in owner.execute(PUSHED)]
        move_log_back(own, small)
    lost = len(set(done) - set(found))
    # The last call may have been committed: who called was not told.
    half = (len(found) - len(done)) % 200
    counted(
        FAULT, "the log of changes (WAL): the server stops", committed=len(done), lost=lost,
        half_done=half,
    )  # fmt: skip
    assert (lost, half) == (0, 0)
    assert done


def push_until_refused(small: Disk, node: Node, done: list[str]) -> None:
    small.fill()
    for number in range(100_000):
        node.push_many("Q", bodies := [f"{number} {n} {'x' * 500}" for n in range(200)])
        done += bodies
