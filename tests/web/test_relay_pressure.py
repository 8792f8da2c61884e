"""What bounds a WebSocket in both directions, without one: rates, queues, turns of the loop."""

import asyncio
import heapq
import socket
from collections.abc import Sequence
from time import thread_time
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from twisted.internet.tcp import Connection

from psqlmessages.relay import direct
from psqlmessages.relay.intake import MOST_WAITING, Intake
from psqlmessages.relay.outbox import Outbox
from psqlmessages.relay.packets import Packet
from psqlmessages.relay.reading import (
    BURST_SECONDS,
    LEAST,
    PIECE_BYTES,
    SHARE,
    TURN_SECONDS,
    Reading,
    Share,
)
from psqlmessages.relay.sockets import Socket
from psqlmessages.relay.transport import SCOPE_KEY, Transport
from tests.web.receivers import in_loop


class Peer(Transport):
    """A server's WebSocket that takes so many bytes immediately, and then waits for its reader."""

    def __init__(self, room: int = 2**30) -> None:
        self.room = room
        self.writes: list[str] = []
        self.is_held = self.is_aborted = self.is_at_its_end = False
        self._has_room = asyncio.Event()
        if room:
            self._has_room.set()

    def give(self, framed: bytes, packets: Sequence[Packet]) -> None:
        assert framed == b"".join(packet.framed for packet in packets)
        self.writes.append(" ".join(packet.text for packet in packets))
        self.room -= len(framed)
        if self.room <= 0:
            self._has_room.clear()

    async def send(self, packet: Packet) -> None:
        self.give(packet.framed, [packet])

    @property
    def takes_now(self) -> bool:
        return self._has_room.is_set()

    async def writable(self) -> None:
        await self._has_room.wait()

    def read(self) -> None:
        self.room = 2**30
        self._has_room.set()

    def hold_reading(self, *, is_held: bool) -> None:
        self.is_held = is_held

    async def accept(self) -> None:
        self.writes.append("accepted")

    async def close(self, code: int, reason: str) -> None:
        self.writes.append(f"closed {code} {reason}")

    @property
    def is_ending(self) -> bool:
        return self.is_at_its_end

    def abort(self) -> None:
        self.is_aborted = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def turns() -> None:
    """Let the other tasks do all they can."""
    for _ in range(10):
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()


def put(outbox: Outbox, *texts: str) -> list[bool]:
    """Put frames in, in one moment."""
    return [outbox.put(Packet(text)) for text in texts]


# What is sent


@in_loop
async def test_a_queue_is_bounded_by_frames_and_by_bytes() -> None:
    for texts, accepted in (
        ("x x x x", 3),
        ("xxxx xxxx xxxx", 2),
        # Bytes are counted, not characters.
        ("üü üü üü", 2),
        # One frame alone may be larger than the bound.
        ("x" * 1000 + " x", 1),
    ):
        answers = put(Outbox(Peer(room=0), frames=3, size=10), *texts.split())
        assert answers == [True] * accepted + [False] * (len(answers) - accepted), texts


@in_loop
async def test_frames_of_one_moment_leave_in_one_write_and_in_order() -> None:
    peer, other = Peer(), Peer()
    outbox, others = (Outbox(each, frames=3, size=10) for each in (peer, other))
    # A fast reader may get more in a moment than may wait for a slow one.
    assert all(put(outbox, *"abc"))
    put(others, "1")
    assert all(put(outbox, *"defgh"))
    await turns()
    assert " ".join(peer.writes) == "a b c d e f g h"
    assert other.writes == ["1"]
    large = Peer(room=64 * 1024)
    put(Outbox(large, frames=1000, size=2**20), *["x" * 1000] * 500)
    await turns()
    assert [len(text) < 70_000 for text in large.writes] == [True]


@in_loop
async def test_frames_for_a_slow_reader_wait_within_the_bounds_and_follow_in_order() -> None:
    peer = Peer(room=4)
    outbox = Outbox(peer, frames=3, size=10)
    sending = asyncio.create_task(outbox.run())
    put(outbox, "a", "b")
    await turns()
    assert put(outbox, *"cdef") == [True, True, True, False]
    await turns()
    assert peer.writes == ["a b"]
    peer.read()
    await turns()
    assert put(outbox, "g") == [True]
    await turns()
    assert " ".join(peer.writes) == "a b c d e g"
    sending.cancel()


# The connection of a server


def test_only_a_connection_without_tls_is_written_to_directly() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours, None, None)
        assert direct.connection_of(connection) is connection
        connection.TLS = True
        assert direct.connection_of(connection) is None


def test_a_connection_whose_peer_does_not_read_the_rest_is_aborted() -> None:
    connection = Socket()
    connection._transport = transport = Peer()
    transport.is_at_its_end = True
    connection.reap()
    # The last frames may be on their way.
    assert not transport.is_aborted
    connection.reap()
    assert transport.is_aborted


# What is read


@in_loop
async def test_a_peer_is_not_read_while_too_much_waits() -> None:
    for text, most in (("x", MOST_WAITING), ("x" * 100, 5)):
        peer = Peer()
        intake = Intake(peer, per_second=1000, frame_bytes=100)
        for number in range(most):
            assert not peer.is_held, number
            assert intake.put(text)
        assert peer.is_held
        await intake.get()
        assert not peer.is_held


def test_frames_of_a_refused_peer_are_not_processed() -> None:
    came = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": '{"op":"init","ident":"a"}'},
        {"type": "websocket.receive", "bytes": b"x"},
        {"type": "websocket.disconnect", "code": 4401},
    ]

    async def receive() -> dict[str, object]:
        return came.pop(0)

    async def knock() -> list[str]:
        peer = Peer()
        await Socket()({"user": AnonymousUser(), SCOPE_KEY: peer}, receive, None)
        return peer.writes

    assert asyncio.run(knock()) == ["accepted", "closed 4401 log in first"]
    assert came == []


# A peer's share of the loop


@pytest.mark.parametrize("number", [1, 2, 100])
def test_peers_that_take_too_much_share_a_tenth_and_others_never_rest(number: int) -> None:
    clock = Clock()
    modest = Share(clock=clock)
    for _ in range(1000):
        clock.now += 0.1
        assert modest.took(0.09 * LEAST) == 0
    seconds, taken, began = 0.005, 0.0, clock.now
    # By turns, so that each has used up what it had at first.
    due = [(clock.now, n, Share(clock=clock)) for n in range(number)]
    for *_, share in due:
        assert share.took(BURST_SECONDS) == 0
    for _ in range(2000):
        due_at, n, share = heapq.heappop(due)
        clock.now = max(clock.now, due_at)
        share.rest(is_resting=False)
        clock.now += seconds
        taken += seconds
        heapq.heappush(due, (clock.now + share.took(seconds), n, share))
        share.rest(is_resting=True)
    for *_, share in due:
        share.rest(is_resting=False)
    assert taken / (clock.now - began) == pytest.approx(SHARE, rel=0.2)


class Protocol:
    """The part of autobahn's protocol that Reading uses; each piece takes so many seconds."""

    STATE_OPEN = state = 3
    message_data = None

    def __init__(self, seconds: float) -> None:
        self.pieces: list[bytes] = []
        self._seconds = seconds

    def dataReceived(self, data: bytes) -> None:  # noqa: N802
        self.pieces.append(data)
        began = thread_time()
        while thread_time() - began < self._seconds:
            pass


@in_loop
async def test_data_is_read_by_pieces_in_order_with_turns_for_others_and_rests_between() -> None:
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    seen: list[int] = []
    rests: list[bool] = []
    protocol: Any = Protocol(seconds=max(TURN_SECONDS, 0.03))
    data = bytes(range(256)) * (PIECE_BYTES * 5 // 256)

    def rest() -> None:
        rests.append(reading.is_resting)
        if sum(map(len, protocol.pieces)) == len(data) + 4 and not reading.is_resting:
            is_over.set()

    def turn() -> None:
        seen.append(len(protocol.pieces))
        if not is_over.is_set():
            loop.call_soon(turn)

    reading = Reading(protocol, 1000, rest)
    turn()
    protocol.dataReceived(data)
    protocol.dataReceived(b"more")
    async with asyncio.timeout(60):
        await is_over.wait()
    assert b"".join(protocol.pieces) == data + b"more"
    assert max(map(len, protocol.pieces)) == PIECE_BYTES
    assert set(seen) >= {1, 2, 3, 4}
    assert (rests[0], rests[-1]) == (True, False)
