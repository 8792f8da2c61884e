"""What bounds a WebSocket in both directions, without one: the bucket, the intake, the outbox."""

import asyncio

import pytest
from django.contrib.auth.models import AnonymousUser

from psqlmessages.relay.intake import MOST_WAITING, Bucket, Intake
from psqlmessages.relay.outbox import Outbox
from psqlmessages.relay.packets import Packet
from psqlmessages.relay.sockets import Socket
from psqlmessages.relay.transport import SCOPE_KEY, Transport, transport_of


class Recorder(Transport):
    """A server's WebSocket that takes what it is given when the test says so."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.is_held = self.is_aborted = False
        self.is_at_its_end = False
        self.may_write = asyncio.Event()

    async def send(self, packet: Packet) -> None:
        self.sent.append(packet.text)

    async def writable(self) -> None:
        await self.may_write.wait()

    def hold_reading(self, *, is_held: bool) -> None:
        self.is_held = is_held

    async def accept(self) -> None:
        self.sent.append("accepted")

    async def close(self, code: int, reason: str) -> None:
        self.sent.append(f"closed {code} {reason}")

    @property
    def is_ending(self) -> bool:
        return self.is_at_its_end

    def abort(self) -> None:
        self.is_aborted = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def turns() -> None:
    """Let the other tasks do all they can."""
    for _ in range(10):
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    bucket = Bucket(rate=2, burst=5, clock=clock)
    assert [bucket.take() for _ in range(6)] == [True] * 5 + [False]
    clock.now = 1.0
    assert [bucket.take() for _ in range(3)] == [True, True, False]
    clock.now = 1000.0
    assert [bucket.take() for _ in range(6)] == [True] * 5 + [False]


def test_an_outbox_is_full_by_number_and_by_bytes() -> None:
    async def fill() -> None:
        outbox = Outbox(Recorder(), frames=3, size=10)
        assert [outbox.put(Packet("x")) for _ in range(4)] == [True, True, True, False]
        outbox = Outbox(Recorder(), frames=100, size=10)
        assert [outbox.put(Packet("xxxx")) for _ in range(3)] == [True, True, False]
        outbox = Outbox(Recorder(), frames=100, size=10)
        assert [outbox.put(Packet("üü")) for _ in range(3)] == [True, True, False]

    asyncio.run(fill())


def test_one_frame_alone_may_be_larger_than_all_that_may_wait() -> None:
    async def fill() -> None:
        outbox = Outbox(Recorder(), frames=3, size=10)
        assert [outbox.put(Packet("x" * 1000)), outbox.put(Packet("x"))] == [True, False]

    asyncio.run(fill())


def test_an_outbox_sends_in_order_once_the_reader_takes_more() -> None:
    async def send() -> None:
        transport = Recorder()
        outbox = Outbox(transport, frames=3, size=10)
        sending = asyncio.create_task(outbox.run())
        for text in "abc":
            outbox.put(Packet(text))
        await turns()
        assert transport.sent == []
        transport.may_write.set()
        await turns()
        assert transport.sent == ["a", "b", "c"]
        assert [outbox.put(Packet(text)) for text in "def"] == [True] * 3
        sending.cancel()

    asyncio.run(send())


@pytest.mark.parametrize(("text", "most"), [("x", MOST_WAITING), ("x" * 100, 5)])
def test_a_peer_is_not_read_while_too_much_waits(text: str, most: int) -> None:
    async def take() -> None:
        transport = Recorder()
        intake = Intake(transport, per_second=1000, frame_bytes=100)
        for number in range(most):
            assert not transport.is_held, number
            assert intake.put(text)
        assert transport.is_held
        await intake.get()
        assert not transport.is_held

    asyncio.run(take())


def test_an_intake_that_ended_gives_nothing_more() -> None:
    async def take() -> None:
        intake = Intake(Recorder(), per_second=1000, frame_bytes=100)
        waiting = asyncio.create_task(intake.get())
        await turns()
        intake.end()
        assert await waiting is None
        intake.put("x")
        intake.end()
        assert await intake.get() is None

    asyncio.run(take())


def test_with_another_server_its_own_send_waits() -> None:
    sent = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)
        if message["type"] == "websocket.close":
            raise OSError("the peer has gone")

    async def use() -> None:
        transport = transport_of(send, 1000)
        assert type(transport) is Transport
        await transport.accept()
        await transport.writable()
        await transport.send(Packet("x"))
        transport.hold_reading(is_held=True)
        await transport.close(4408, "too slow")

    asyncio.run(use())
    assert sent == [
        {"type": "websocket.accept"},
        {"type": "websocket.send", "text": "x"},
        {"type": "websocket.close", "code": 4408, "reason": "too slow"},
    ]


def test_a_connection_whose_peer_does_not_take_the_rest_is_aborted() -> None:
    socket = Socket()
    socket._transport = transport = Recorder()
    transport.is_at_its_end = True
    socket.reap()
    # What was sent last may be on its way.
    assert not transport.is_aborted
    socket.reap()
    assert transport.is_aborted


def test_what_a_refused_peer_sends_is_not_worked() -> None:
    came = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": '{"op":"init","ident":"a"}'},
        {"type": "websocket.receive", "bytes": b"x"},
        {"type": "websocket.disconnect", "code": 4401},
    ]

    async def receive() -> dict[str, object]:
        return came.pop(0)

    async def knock() -> list[str]:
        transport = Recorder()
        await Socket()({"user": AnonymousUser(), SCOPE_KEY: transport}, receive, None)
        return transport.sent

    assert asyncio.run(knock()) == ["accepted", "closed 4401 log in first"]
    assert came == []
