"""The bounds of a WebSocket: each is told in a close code or an answer, and others go on."""

import asyncio
import json
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Event

import pytest
from django.contrib.auth.models import User
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.sql.conftest import World
from tests.web.site import Site
from tests.web.sockets import Visitor

Enter = Callable[..., Visitor]

# As small as the settings let them be, so that the bounds are met soon.
TIGHT = {
    "RELAY_FRAME_BYTES": 4096,
    "RELAY_TOPICS": 3,
    "RELAY_SOCKETS": 5,
    # However slowly frames are read, a flood is one.
    "RELAY_FRAMES_PER_SECOND": 20,
    "RELAY_QUEUE_FRAMES": 50,
    "RELAY_QUEUE_BYTES": 256 * 1024,
}
STATUS = {"op": "topic_status", "topic": "ROOM"}


@pytest.fixture
def tight(new_site: Callable[..., Site]) -> Site:
    """A site with tight bounds."""
    return new_site(PSQLMESSAGES={"NODE": "tight", **TIGHT})


@pytest.fixture
def alice(enter: Enter, tight: Site) -> Visitor:
    """The node web.alice, at the tight site."""
    return enter("alice", "web.alice", at=tight)


def test_frames_that_are_too_long_or_no_text_close(enter: Enter, tight: Site) -> None:
    longest = TIGHT["RELAY_FRAME_BYTES"]
    visitor = enter("alice", "web.alice", at=tight)
    visitor.connection.send(json.dumps({**STATUS, "ref": 1}).ljust(longest))
    assert visitor.answer_to(1)["Err"] == "0"
    visitor.connection.send("x" * (longest + 1))
    code, reason = visitor.closed()
    assert code == 1009
    assert "exceeds payload limit of 4096" in reason
    visitor = enter("alice", at=tight)
    # It may be closed before it has sent them all.
    with suppress(ConnectionClosed):
        visitor.connection.send("x" * 100 for _ in range(100))
    assert visitor.closed()[0] == 1009
    # By its header alone, as the first frame.
    visitor = enter("alice", at=tight)
    gigabytes = struct.pack("!BBQ", 0x81, 0x80 | 127, 8 * 2**30) + b"mask"
    visitor.connection.socket.sendall(gigabytes)
    assert visitor.closed()[0] == 1009
    visitor = enter("alice", at=tight)
    visitor.connection.send(b'{"op":"deinit"}')
    assert visitor.closed() == (1003, "frames are text")
    visitor = enter("alice", at=tight)
    visitor.connection.send(b"\xff\xff", text=True)
    assert visitor.closed()[0] == 1007


def test_a_burst_is_answered_and_a_flood_closes_with_4429(
    enter: Enter, tight: Site, alice: Visitor
) -> None:
    bob = enter("bob", "web.bob", at=tight)
    for number in range(60):
        alice.connection.send(json.dumps({**STATUS, "ref": number}))
    for number in range(60):
        assert alice.answer_to(number)["Err"] == "0"
    # It may be closed before it has sent them all.
    with suppress(ConnectionClosed):
        for _ in range(5000):
            alice.connection.send(json.dumps(STATUS))
    assert alice.closed() == (4429, "more than 20 frames a second")
    bob.ok("topic_status", topic="ROOM")


def test_more_topics_than_allowed_are_refused(alice: Visitor, relay: World) -> None:
    for function in ("topic_listen", "topic_notify"):
        for topic in ("ROOM", "WEB.1", "WEB.2"):
            alice.ok(function, topic=topic)
        assert alice.error(function, topic="WEB.3") == (58, "more than 3 topics")
        assert alice.call(function, topic="WEB.2")["Already"] == 1
    alice.ok("topic_unlisten", topic="WEB.1")
    alice.ok("topic_listen", topic="WEB.3")
    # A topic that was revoked makes room too.
    relay.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    alice.event("topic_unlisten")
    alice.ok("topic_listen", topic="WEB.4")


def test_a_user_has_few_sockets_however_many_are_opened(enter: Enter, tight: Site) -> None:
    first = enter("alice", at=tight)
    codes = Counter(asyncio.run(open_many(tight, first.cookie, 100)))
    assert codes == {"open": 4, 4429: 96}
    others = [enter("alice", at=tight) for _ in range(4)]
    User.objects.update(is_superuser=True, is_staff=True)
    # Pages of the monitor count too.
    for path in ("/ws/node/", "/ws/monitor/"):
        refused = enter("alice", at=tight, path=path).closed()
        assert refused == (4429, "more than 5 WebSockets of one user")
    enter("bob", "web.bob", at=tight)
    others[0].close()
    enter("alice", "web.alice.2", at=tight)


async def open_many(site: Site, cookie: str, number: int) -> list[str | int]:
    """Open many WebSockets at the same time: of each the code that closed it, or "open"."""
    are_known = asyncio.Barrier(number)

    async def open_one() -> str | int:
        opening = connect(
            f"{site.ws_url}/ws/node/",
            origin=site.url,
            additional_headers={"Cookie": f"sessionid={cookie}"},
            proxy=None,
            open_timeout=100,
            ping_interval=None,
        )
        async with opening as opened:
            try:
                await opened.send('{"op":"deinit"}')
                await opened.recv()
                found = "open"
            except ConnectionClosed as error:
                found = error.rcvd.code if error.rcvd else "broken"
            await are_known.wait()
        return found

    return await asyncio.gather(*(open_one() for _ in range(number)))


def test_a_reader_that_stops_is_closed_with_4408_and_others_do_not_notice(
    enter: Enter, tight: Site, relay: World
) -> None:
    # It reads one frame ahead and then no more: nobody takes the frames out.
    slow = enter("alice", at=tight, max_queue=1)
    reader = enter("bob", "web.bob", at=tight)
    slow.ok("init", ident="web.slow", events=False)
    for visitor in (slow, reader):
        visitor.ok("topic_listen", topic="ROOM")
    other = relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    sent = 0
    while "crash web.slow" not in other.events():
        assert sent < 10_000, "it was never closed"
        other.ok("topic_send_many", "ROOM", ["x" * 4000] * 20)
        # The other one has read them all before the next are sent.
        assert [reader.message()["Body"] for _ in range(20)] == ["x" * 4000] * 20
        sent += 20
    # By itself Daphne would cut the connection after a second, and the reason with it.
    Event().wait(1.5)
    assert slow.closed() == (4408, "frames are read too slowly")
