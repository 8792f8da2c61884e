"""How frames leave: together at the end of a moment, framed once, in order, within the bounds."""

import asyncio
import socket
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest
from twisted.internet.tcp import Connection
from websockets.frames import Frame, Opcode

from psqlmessages.relay import departures, direct
from psqlmessages.relay.outbox import Outbox
from psqlmessages.relay.packets import Packet
from psqlmessages.relay.transport import Transport
from tests.web.test_relay_queues import turns


class Taker(Transport):
    """A server's WebSocket that takes at once so many bytes, and then waits for its reader."""

    def __init__(self, room: int = 2**30) -> None:
        self.room = room
        self.writes: list[str] = []
        self.is_broken = False
        self._has_room = asyncio.Event()
        self._has_room.set()

    def give(self, framed: bytes, packets: Sequence[Packet]) -> None:
        if self.is_broken:
            raise ZeroDivisionError
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


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine."""
    asyncio.run(asyncio.wait_for(test, 20))


def put(outbox: Outbox, *texts: str) -> list[bool]:
    """Put frames in, in one moment."""
    return [outbox.put(Packet(text)) for text in texts]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 200_000])
def test_a_packet_is_framed_as_a_server_frames_text(size: int) -> None:
    text = "x" * size
    expected = Frame(Opcode.TEXT, text.encode()).serialize(mask=False)
    assert Packet(text).framed == expected


def test_a_packet_counts_bytes_and_not_characters() -> None:
    assert Packet("üü").size == 4


def test_frames_of_one_moment_leave_in_one_write_and_in_order() -> None:
    async def test() -> None:
        taker, other = Taker(), Taker()
        outbox, others = (Outbox(each, frames=100, size=1000) for each in (taker, other))
        put(outbox, "a", "b")
        put(others, "1")
        put(outbox, "c")
        assert taker.writes == []
        await turns()
        assert (taker.writes, other.writes) == (["a b c"], ["1"])
        put(outbox, "d")
        await turns()
        assert taker.writes == ["a b c", "d"]

    run(test())


def test_a_fast_reader_may_get_more_in_a_moment_than_may_wait_for_a_slow_one() -> None:
    async def test() -> None:
        taker = Taker()
        outbox = Outbox(taker, frames=3, size=10)
        assert put(outbox, *"abcdefgh") == [True] * 8
        await turns()
        assert " ".join(taker.writes) == "a b c d e f g h"

    run(test())


def test_what_a_slow_reader_leaves_waits_within_the_bounds_and_follows_in_order() -> None:
    async def test() -> None:
        taker = Taker(room=4)
        outbox = Outbox(taker, frames=3, size=10)
        sending = asyncio.create_task(outbox.run())
        put(outbox, "a", "b")
        await turns()
        assert taker.writes == ["a b"]
        assert put(outbox, *"cdef") == [True, True, True, False]
        await turns()
        assert taker.writes == ["a b"]
        taker.read()
        await turns()
        assert put(outbox, "g") == [True]
        await turns()
        assert " ".join(taker.writes) == "a b c d e g"
        sending.cancel()

    run(test())


def test_no_more_is_given_than_one_write_may_hold() -> None:
    async def test() -> None:
        taker = Taker(room=64 * 1024)
        outbox = Outbox(taker, frames=1000, size=2**20)
        assert put(outbox, *["x" * 1000] * 500) == [True] * 500
        await turns()
        assert len(taker.writes) == 1
        assert len(taker.writes[0]) < 70_000

    run(test())


def test_a_fault_of_one_ends_its_task_and_the_others_depart() -> None:
    async def test() -> None:
        broken, sound = Taker(), Taker()
        broken.is_broken = True
        outboxes = [Outbox(each, frames=10, size=100) for each in (broken, sound)]
        sending = asyncio.create_task(outboxes[0].run())
        for outbox in outboxes:
            put(outbox, "a")
        with pytest.raises(ZeroDivisionError):
            await sending
        assert sound.writes == ["a"]

    run(test())


def test_many_departures_let_the_loop_do_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(departures, "_SLICE_SECONDS", -1)
        taker = Taker()
        put(Outbox(taker, frames=10, size=100), "a")
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()
        assert taker.writes == []
        monkeypatch.setattr(departures, "_SLICE_SECONDS", 1)
        await turns()
        assert taker.writes == ["a"]

    run(test())


# Twisted's connection, without its reactor


class Reactor:
    """Keeps who wants to be told that there is room to write."""

    def __init__(self) -> None:
        self.writers: list[Connection] = []

    def addWriter(self, connection: Connection) -> None:  # noqa: N802
        self.writers.append(connection)

    def removeWriter(self, connection: Connection) -> None:  # noqa: N802
        self.writers.remove(connection)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection of Twisted, and its peer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # Less than a test writes, on every system.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        ours.setblocking(False)
        connection = Connection(ours, None, Reactor())
        connection.connected = True
        yield connection, theirs


def test_twisted_has_what_writing_directly_needs(ends: tuple[Connection, socket.socket]) -> None:
    connection, peer = ends
    assert direct.connection_of(connection) is connection
    direct.write(connection, b"at once")
    assert peer.recv(100) == b"at once"
    assert connection.reactor.writers == []


def test_a_connection_with_tls_is_not_written_to_directly(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, _ = ends
    connection.TLS = True
    assert direct.connection_of(connection) is None
    assert direct.connection_of(object()) is None


def test_what_the_system_does_not_take_follows_in_order(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, peer = ends
    sent = [bytes([number]) * 50_000 for number in range(60)]
    for data in sent:
        direct.write(connection, data)
    assert connection.reactor.writers
    peer.settimeout(10)
    came = b""
    while len(came) < 60 * 50_000:
        came += peer.recv(1 << 20)
        connection.doWrite()
    assert came == b"".join(sent)


def test_a_broken_connection_is_left_to_twisted(ends: tuple[Connection, socket.socket]) -> None:
    connection, peer = ends
    peer.close()
    direct.write(connection, b"x")
    assert connection.reactor.writers
    assert isinstance(connection.doWrite(), Exception)
