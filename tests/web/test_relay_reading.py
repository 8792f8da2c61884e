"""What one peer's bytes may take of the loop: pieces, rests, and parts without end."""

import asyncio
import heapq
from time import thread_time
from typing import Any

import pytest

from psqlmessages.relay import reading
from psqlmessages.relay.reading import BURST_SECONDS, LEAST, PIECE_BYTES, SHARE, Reading, Share


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Protocol:
    """What Reading uses of autobahn's protocol; each piece takes so many seconds."""

    STATE_OPEN = state = 3

    def __init__(self, seconds: float = 0.0) -> None:
        self.pieces: list[bytes] = []
        self.message_data: list[bytes] | None = None
        self.closed_with: list[int] = []
        self._seconds = seconds

    def dataReceived(self, data: bytes) -> None:  # noqa: N802
        self.pieces.append(data)
        began = thread_time()
        while thread_time() - began < self._seconds:
            pass

    def sendCloseFrame(self, code: int, **_: Any) -> None:  # noqa: N802
        self.closed_with.append(code)
        self.state = 2


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_who_takes_little_never_rests(clock: Clock) -> None:
    share = Share(clock=clock)
    for _ in range(1000):
        clock.now += 0.1
        assert share.took(0.09 * LEAST) == 0


def test_who_takes_too_much_rests_until_it_is_earned(clock: Clock) -> None:
    share = Share(clock=clock)
    assert share.took(BURST_SECONDS) == 0
    rest = share.took(0.01)
    assert rest == pytest.approx(0.01 / SHARE)
    share.rest(is_resting=True)
    clock.now += rest
    share.rest(is_resting=False)
    assert share.took(0) == 0
    assert share.took(0.01) == pytest.approx(rest)


def test_who_rests_beside_others_rests_longer(clock: Clock) -> None:
    first, second = Share(clock=clock), Share(clock=clock)
    first.rest(is_resting=True)
    first.rest(is_resting=True)
    assert second.took(BURST_SECONDS + 0.01) == pytest.approx(2 * 0.01 / SHARE)
    first.rest(is_resting=False)
    assert second.took(0.01) == pytest.approx(0.02 / SHARE)


@pytest.mark.parametrize("number", [1, 2, 10, 100])
def test_all_who_take_too_much_share_the_tenth(clock: Clock, number: int) -> None:
    seconds, taken, began = 0.005, 0.0, clock.now
    # By turns, so that each has used up what it had at first.
    turns = [(clock.now, n, Share(clock=clock)) for n in range(number)]
    for share in (share for *_, share in turns):
        share.took(BURST_SECONDS)
    for _ in range(2000):
        due_at, n, share = heapq.heappop(turns)
        clock.now = max(clock.now, due_at)
        share.rest(is_resting=False)
        clock.now += seconds
        taken += seconds
        heapq.heappush(turns, (clock.now + share.took(seconds), n, share))
        share.rest(is_resting=True)
    for *_, share in turns:
        share.rest(is_resting=False)
    assert taken / (clock.now - began) == pytest.approx(SHARE, rel=0.2)


def taken(protocol: Protocol, *data: bytes, limit: int = 1000) -> list[bool]:
    """Hand data over, and wait until all of it was taken in: how often it began to rest, or not."""
    told: list[bool] = []

    async def test() -> None:
        changed = asyncio.Event()

        def tell() -> None:
            told.append(read.is_resting)
            changed.set()

        read = Reading(protocol, limit, tell)
        for each in data:
            protocol.dataReceived(each)
        async with asyncio.timeout(60):
            while read.is_resting:
                changed.clear()
                await changed.wait()
        assert sum(map(len, protocol.pieces)) == sum(map(len, data))

    asyncio.run(test())
    return told


def test_what_comes_is_taken_in_by_pieces_and_in_order() -> None:
    protocol = Protocol()
    data = bytes(range(256)) * 256
    taken(protocol, data, b"more")
    assert b"".join(protocol.pieces) == data + b"more"
    assert max(map(len, protocol.pieces)) == PIECE_BYTES


def test_a_frame_of_the_usual_size_is_taken_in_at_once() -> None:
    assert taken(Protocol(), b"x" * 200) == []


def test_while_it_rests_the_peer_is_not_read_and_nothing_is_lost() -> None:
    protocol = Protocol(seconds=0.03)
    told = taken(protocol, b"1" * PIECE_BYTES * 3, b"2" * PIECE_BYTES)
    assert told[0]
    assert not told[-1]
    assert b"".join(protocol.pieces) == b"1" * PIECE_BYTES * 3 + b"2" * PIECE_BYTES


def test_others_have_their_turn_between_two_long_pieces() -> None:
    turns: list[int] = []
    protocol = Protocol(seconds=reading.TURN_SECONDS)

    async def test() -> None:
        is_over = asyncio.Event()
        Reading(protocol, 1000, lambda: len(protocol.pieces) < 5 or is_over.set())
        loop = asyncio.get_running_loop()

        def turn() -> None:
            turns.append(len(protocol.pieces))
            if not is_over.is_set():
                loop.call_soon(turn)

        turn()
        protocol.dataReceived(b"x" * PIECE_BYTES * 5)
        async with asyncio.timeout(60):
            await is_over.wait()

    asyncio.run(test())
    assert set(turns) >= {1, 2, 3, 4}


@pytest.mark.parametrize(("parts", "closed"), [(1000, []), (1001, [1009])])
def test_a_message_in_more_parts_than_it_may_have_bytes_is_closed(
    parts: int, closed: list[int]
) -> None:
    protocol = Protocol()
    protocol.message_data = [b""] * parts
    taken(protocol, b"x", b"y")
    assert protocol.closed_with == closed
