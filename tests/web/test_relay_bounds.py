"""The bounds of a WebSocket: each is told in a close code or an answer, and others go on."""

import asyncio
import heapq
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event

import psycopg
import pytest
from django.contrib.auth.models import User
from psycopg import sql
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from psqlmessages.relay.daphne import BURST_SECONDS, COMMON_SHARE, OWN_SHARE, CpuShare, Transport
from psqlmessages.relay.frames import EncodedFrame
from psqlmessages.relay.socket import MAX_WAITING_FRAMES, ReceiveQueue, SendQueue
from tests.conftest import TestedServer
from tests.sql.conftest import World
from tests.web.receivers import in_loop
from tests.web.site import Site
from tests.web.sockets import Enter, Visitor

# The smallest values of the settings.
TIGHT = {
    "RELAY_FRAME_BYTES": 4096, "RELAY_TOPICS": 3, "RELAY_SOCKETS": 5, "RELAY_QUEUE_FRAMES": 50,
    "RELAY_FRAMES_PER_SECOND": 20, "RELAY_QUEUE_BYTES": 256 * 1024,
}  # fmt: skip
STATUS = {"op": "topic_status", "topic": "ROOM"}
LARGE = "x" * 1000


@pytest.fixture
def tight(new_site: Callable[..., Site]) -> Site:
    return new_site(PSQLMESSAGES={"NODE": "tight", **TIGHT})


@pytest.fixture
def alice(enter: Enter, tight: Site) -> Visitor:
    return enter("alice", "web.alice", at=tight)


def test_frames_that_are_too_long_or_no_text_close(enter: Enter, tight: Site):
    longest = TIGHT["RELAY_FRAME_BYTES"]
    visitor = enter("alice", "web.alice", at=tight)
    visitor.connection.send(json.dumps({**STATUS, "ref": 1}).ljust(longest))
    assert visitor.answer_to(1)["Err"] == "0"
    gigabytes = struct.pack("!BBQ", 0x81, 0x80 | 127, 8 * 2**30) + b"mask"
    cases: tuple[tuple[Callable[[ClientConnection], object], int, str], ...] = (
        (lambda end: end.send("x" * (longest + 1)), 1009, "exceeds payload limit of 4096"),
        (lambda end: end.send("x" * 100 for _ in range(100)), 1009, ""),
        # The header alone is refused.
        (lambda end: end.socket.sendall(gigabytes), 1009, ""),
        (lambda end: end.send(b'{"op":"deinit"}'), 1003, "text"),
        (lambda end: end.send(b"\xff\xff", text=True), 1007, ""),
    )
    for send, code, reason in cases:
        visitor = enter("alice", at=tight)
        # The site may close the WebSocket earlier.
        with suppress(ConnectionClosed):
            send(visitor.connection)
        found = visitor.closed()
        assert found[0] == code
        assert reason in found[1]


def test_a_burst_is_answered_and_a_flood_ends_with_4429(enter: Enter, tight: Site, alice: Visitor):
    bob = enter("bob", "web.bob", at=tight)
    for number in range(60):
        alice.connection.send(json.dumps({**STATUS, "ref": number}))
    for number in range(60):
        assert alice.answer_to(number)["Err"] == "0"
    # The site may close the WebSocket earlier.
    with suppress(ConnectionClosed):
        for _ in range(5000):
            alice.connection.send(json.dumps(STATUS))
    assert alice.closed() == (4429, "more than 20 frames a second")
    bob.ok("topic_status", topic="ROOM")


def test_more_topics_than_allowed_are_refused(alice: Visitor, relay: World):
    for function in ("topic_listen", "topic_notify"):
        for topic in ("ROOM", "WEB.1", "WEB.2"):
            alice.ok(function, topic=topic)
        assert alice.error(function, topic="WEB.3") == (58, "more than 3 topics")
        assert alice.call(function, topic="WEB.2")["Already"] == 1
    alice.ok("topic_unlisten", topic="WEB.1")
    alice.ok("topic_listen", topic="WEB.3")
    relay.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    alice.event("topic_unlisten")
    alice.ok("topic_listen", topic="WEB.4")


def test_a_user_has_few_sockets_however_many_are_opened(enter: Enter, tight: Site):
    first = enter("alice", at=tight)
    with ThreadPoolExecutor(100) as pool:
        opening = [pool.submit(Visitor, tight, cookie=first.cookie) for _ in range(100)]
        opened = [future.result() for future in opening]
        assert Counter(pool.map(end_of, opened)) == {"open": 4, 4429: 96}
    for visitor in opened:
        visitor.close()
    others = [enter("alice", at=tight) for _ in range(4)]
    User.objects.update(is_superuser=True, is_staff=True)
    for path in ("/ws/node/", "/ws/monitor/"):
        refused = enter("alice", at=tight, path=path).closed()
        assert refused == (4429, "more than 5 WebSockets of one user")
    enter("bob", "web.bob", at=tight)
    others[0].close()
    enter("alice", "web.alice.2", at=tight)


def end_of(visitor: Visitor) -> object:
    """Return the code that closed a WebSocket, or "open"."""
    with suppress(ConnectionClosed):
        visitor.call("deinit")
        return "open"
    return visitor.connection.close_code


def test_only_a_reader_that_stops_is_closed_with_4408(enter: Enter, tight: Site, relay: World):
    # Its library reads one frame, and nothing more.
    slow = enter("alice", at=tight, max_queue=1)
    reader = enter("bob", "web.bob", at=tight)
    slow.ok("init", ident="web.slow", events=False)
    for visitor in (slow, reader):
        visitor.ok("topic_listen", topic="ROOM")
    other = relay.node("user2", "OTHER", notify="ROOM")
    for _ in range(500):
        if "crash web.slow" in other.events():
            break
        other.ok("topic_send_many", "ROOM", ["x" * 4000] * 20)
        assert [reader.message()["Body"] for _ in range(20)] == ["x" * 4000] * 20
    # Daphne itself would cut the connection after a second, without a reason.
    Event().wait(1.5)
    assert slow.closed() == (4408, "frames are read too slowly")


@contextmanager
def database_away(server: TestedServer) -> Iterator[None]:
    """Refuse and end all connections of ordinary roles to the test database."""
    database = sql.Identifier(server.database)
    with psycopg.connect(server.server.superuser_url("postgres"), autocommit=True) as superuser:
        allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        superuser.execute(allow.format(database, sql.SQL("false")))
        try:
            superuser.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                " AND (application_name LIKE '%%hub' OR query ~ 'auth_user|WebIdentity')",
                [server.database],
            )
            yield
        finally:
            superuser.execute(allow.format(database, sql.SQL("true")))


def test_while_the_database_is_unreachable_sockets_stay_open_and_get_events(
    server: TestedServer, relay: World, site: Site, enter: Enter, connect: Enter
):
    cookie, alice = site.login("bob"), enter("alice", "web.alice")
    for topic in ("ROOM", "WEB.1"):
        alice.ok("topic_listen", topic=topic)
    with database_away(server):
        assert alice.event("connection_lost")["Type"] == "Sys"
        away = (59, "the relay has no connection to PostgreSQL")
        assert alice.error("topic_status", topic="ROOM") == away
        text = "the database is unavailable: try again later"
        assert connect(cookie=cookie).closed() == (1013, text)
        relay.execute("DELETE FROM messages.auth WHERE dest = 'WEB.*'")
    assert alice.event("reconnected")["Away"] >= 0
    event = alice.event("topic_unlisten")
    assert (event["Ident"], event["Topic"]) == ("web.alice", "WEB.1")
    relay.node("user2", "OTHER", notify="ROOM").ok("topic_send", "ROOM", "still there?")
    assert alice.message()["Body"] == "still there?"
    assert connect(cookie=cookie).error("topic_status", topic="ROOM")[0] == 50


GONE = "SELECT NOT EXISTS (SELECT FROM psqlmessages_client WHERE ident LIKE 'web.alice.%%')"


def test_a_peer_lost_during_a_call_leaves_nothing(enter: Enter, relay: World):
    # Different names: an earlier node may still exist.
    for ident, request in (
        ("", {"op": "init", "ident": "web.alice.1"}),
        ("web.alice.2", {"op": "topic_listen", "topic": "ROOM"}),
        ("web.alice.3", {"op": "rpc", "node": "OTHER", "token": "t", "body": ""}),
    ):
        visitor = enter("alice", ident)
        with relay.owner.connection.transaction():
            # The operation waits for this lock when the peer disconnects.
            relay.execute("LOCK TABLE messages._rules_lock IN EXCLUSIVE MODE")
            visitor.connection.send(json.dumps(request))
            visitor.break_off()
    relay.wait_for(GONE)


class Peer(Transport):
    """A WebSocket that takes so many bytes, and then waits for its reader."""

    def __init__(self, room: int = 2**30) -> None:
        self.room = room
        self.is_writable = room > 0
        self.writes: list[str] = []
        self.is_paused = False

    def write_frames(self, frames: Sequence[EncodedFrame]) -> None:
        self.writes.append(" ".join(frame.text for frame in frames))
        self.room -= sum(len(frame.data) for frame in frames)
        self.is_writable = self.room > 0

    async def send(self, frame: EncodedFrame) -> None:
        self.write_frames([frame])

    def pause_reading(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused


def put(outbox: SendQueue, *texts: str) -> list[bool]:
    return [outbox.put(EncodedFrame(text)) for text in texts]


@in_loop
async def test_a_queue_is_bounded_by_frames_and_by_bytes():
    # The limit is in bytes, not characters; a single frame may be larger.
    for texts, accepted in (("x x x x", 3), ("xxxx " * 3, 2), ("üü " * 3, 2), (f"{LARGE} x", 1)):
        answers = put(SendQueue(Peer(room=0), max_frames=3, max_bytes=10), *texts.split())
        assert answers == [True] * accepted + [False] * (len(answers) - accepted), texts


@in_loop
async def test_frames_of_one_moment_leave_in_one_write_and_in_order():
    peer, other, large = Peer(), Peer(), Peer(room=64 * 1024)
    outbox, others = (SendQueue(each, max_frames=3, max_bytes=10) for each in (peer, other))
    # A fast reader may get more frames than the limit.
    assert all(put(outbox, *"abc"))
    put(others, "1")
    assert all(put(outbox, *"defgh"))
    put(SendQueue(large, max_frames=1000, max_bytes=2**20), *[LARGE] * 500)
    for _ in range(10):
        await asyncio.sleep(0)
    assert " ".join(peer.writes) == "a b c d e f g h"
    assert other.writes == ["1"]
    assert [len(text) < 70_000 for text in large.writes] == [True]


@in_loop
async def test_a_peer_is_not_read_while_too_much_waits():
    for text, most in (("x", MAX_WAITING_FRAMES), ("x" * 100, 5)):
        peer = Peer()
        intake = ReceiveQueue(peer, per_second=1000, frame_bytes=100)
        for number in range(most):
            assert not peer.is_paused, number
            assert intake.put(text)
        assert peer.is_paused
        await intake.get()
        assert not peer.is_paused


@pytest.mark.parametrize("number", [1, 2, 100])
def test_peers_that_take_too_much_share_a_tenth_and_others_are_never_throttled(number: int):
    now = 100.0
    modest = CpuShare(clock=lambda: now)
    for _ in range(1000):
        now += 0.1
        assert modest.charge(0.09 * OWN_SHARE) == 0
    seconds, taken, began = 0.005, 0.0, now
    # Each first uses up its burst.
    due = [(now, n, CpuShare(clock=lambda: now)) for n in range(number)]
    for *_, share in due:
        assert share.charge(BURST_SECONDS) == 0
    for _ in range(2000):
        due_at, n, share = heapq.heappop(due)
        now = max(now, due_at)
        if share.is_throttled:
            share.resume()
        now += seconds
        taken += seconds
        heapq.heappush(due, (now + share.charge(seconds), n, share))
        share.throttle()
    for *_, share in due:
        share.resume()
    assert taken / (now - began) == pytest.approx(COMMON_SHARE, rel=0.2)
