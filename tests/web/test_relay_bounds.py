"""Hostile WebSockets: each meets a bound, is told so, and the others do not notice."""

import asyncio
import json
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Event

import pytest
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


@pytest.fixture
def tight(new_site: Callable[..., Site]) -> Site:
    """A site with tight bounds."""
    return new_site(PSQLMESSAGES={"NODE": "tight", **TIGHT})


@pytest.fixture
def alice(enter: Enter, tight: Site) -> Visitor:
    """The node web.alice, at the tight site."""
    return enter("alice", "web.alice", at=tight)


# Frames


def test_a_frame_of_the_limit_is_read(alice: Visitor) -> None:
    frame = json.dumps({"op": "topic_status", "topic": "ROOM", "ref": 1})
    alice.connection.send(frame.ljust(TIGHT["RELAY_FRAME_BYTES"]))
    assert alice.answer_to(1)["Err"] == "0"


def test_a_giant_frame_closes_with_1009(alice: Visitor) -> None:
    alice.connection.send("x" * (TIGHT["RELAY_FRAME_BYTES"] + 1))
    code, reason = alice.closed()
    assert code == 1009
    assert "exceeds payload limit of 4096" in reason


def test_a_giant_frame_in_small_parts_closes_with_1009(alice: Visitor) -> None:
    # It may be closed before it has sent them all.
    with suppress(ConnectionClosed):
        alice.connection.send("x" * 100 for _ in range(100))
    assert alice.closed()[0] == 1009


def test_a_giant_frame_is_refused_by_its_header_alone(enter: Enter, tight: Site) -> None:
    # The first frame of a WebSocket that was sent nothing yet.
    visitor = enter("alice", at=tight)
    gigabytes = struct.pack("!BBQ", 0x81, 0x80 | 127, 8 * 2**30) + b"mask"
    visitor.connection.socket.sendall(gigabytes)
    assert "exceeds payload limit of 4096" in visitor.closed()[1]


def test_a_binary_frame_closes_with_1003(alice: Visitor) -> None:
    alice.connection.send(b'{"op":"deinit"}')
    assert alice.closed() == (1003, "frames are text")


def test_text_that_is_not_utf8_closes_with_1007(alice: Visitor) -> None:
    alice.connection.send(b"\xff\xff", text=True)
    assert alice.closed()[0] == 1007


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not JSON"),
        ("[" * 4000, "it is nested too deep"),
        ('{"op":"drop"}', 'unknown op "drop"'),
        ('{"op":"topic_listen","topic":{"a":1}}', "topic is an object, not text"),
        ('{"op":"topic_listen","topic":"a\\u0000"}', "topic has a NUL character"),
        ('{"op":"topic_send","topic":"ROOM","body":"\\ud800"}', "body has a lone surrogate"),
    ],
)
def test_a_malformed_frame_is_answered_and_the_socket_stays(
    alice: Visitor, text: str, said: str
) -> None:
    alice.connection.send(text)
    answer = alice.frame()
    assert answer["Err"] == "57"
    assert said in answer["Errstr"]
    alice.ok("topic_status", topic="ROOM")


# How many


def test_a_flood_closes_with_4429_and_others_go_on(
    enter: Enter, tight: Site, alice: Visitor, relay: World
) -> None:
    bob = enter("bob", "web.bob", at=tight)
    frame = json.dumps({"op": "topic_status", "topic": "ROOM"})
    # It may be closed before it has sent them all.
    with suppress(ConnectionClosed):
        for _ in range(5000):
            alice.connection.send(frame)
    assert alice.closed() == (4429, "more than 20 frames a second")
    bob.ok("topic_status", topic="ROOM")


def test_a_burst_of_a_page_that_opens_is_no_flood(alice: Visitor) -> None:
    for number in range(60):
        alice.connection.send(json.dumps({"op": "topic_status", "topic": "ROOM", "ref": number}))
    for number in range(60):
        assert alice.answer_to(number)["Err"] == "0"


def test_more_topics_than_allowed_are_refused(alice: Visitor) -> None:
    for function in ("topic_listen", "topic_notify"):
        for number in range(3):
            alice.ok(function, topic=f"WEB.{number}")
        assert alice.error(function, topic="WEB.3") == (58, "more than 3 topics")
        assert alice.call(function, topic="WEB.2")["Already"] == 1
    alice.ok("topic_unlisten", topic="WEB.0")
    alice.ok("topic_listen", topic="WEB.3")


def test_a_topic_that_was_revoked_makes_room(alice: Visitor, relay: World) -> None:
    for topic in ("ROOM", "WEB.1", "WEB.2"):
        alice.ok("topic_listen", topic=topic)
    relay.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    alice.event("topic_unlisten")
    alice.ok("topic_listen", topic="WEB.3")


@pytest.mark.timeout(600)
def test_a_thousand_sockets_of_one_user_are_five(enter: Enter, tight: Site) -> None:
    cookie = enter("alice", at=tight).cookie
    codes = Counter(asyncio.run(open_many(tight, cookie, 1000)))
    assert codes == {"open": 4, 4429: 996}
    enter("bob", "web.bob", at=tight)


async def open_many(site: Site, cookie: str, number: int) -> list[str | int]:
    """Open many WebSockets at once: of each the code that closed it, or "open"."""
    few_at_once = asyncio.Semaphore(50)
    are_known = asyncio.Barrier(number)

    async def open_one() -> str | int:
        async with few_at_once:
            opening = connect(
                f"{site.ws_url}/ws/node/",
                origin=site.url,
                additional_headers={"Cookie": f"sessionid={cookie}"},
                proxy=None,
                open_timeout=300,
                ping_interval=None,
            )
            opened = await opening.__aenter__()
            try:
                await opened.send('{"op":"deinit"}')
                await opened.recv()
                found = "open"
            except ConnectionClosed as error:
                found = error.rcvd.code if error.rcvd else "broken"
        await are_known.wait()
        await opening.__aexit__(None, None, None)
        return found

    return await asyncio.gather(*(open_one() for _ in range(number)))


def test_one_socket_too_many_closes_with_4429(enter: Enter, tight: Site, alice: Visitor) -> None:
    others = [enter("alice", at=tight) for _ in range(4)]
    assert enter("alice", at=tight).closed() == (4429, "more than 5 WebSockets of one user")
    enter("bob", "web.bob", at=tight)
    others[0].close()
    enter("alice", "web.alice.2", at=tight)


# Slow readers


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
    Event().wait(2)
    assert slow.closed() == (4408, "frames are read too slowly")
