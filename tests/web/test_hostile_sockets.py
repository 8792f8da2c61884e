"""WebSockets that are bombs: each meets a bound, the server holds little, a neighbour goes on."""

import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from time import monotonic

import psycopg
import pytest
from websockets.frames import Opcode

from tests.reliability.counts import report, size
from tests.sql.conftest import World
from tests.web.attackers import Attacker, Neighbour, frame, handshake
from tests.web.site import Site
from tests.web.sockets import Visitor
from tests.web.test_relay import WRONG

FAULT = "a hostile WebSocket"
# The bit of a frame's first byte.
COMPRESSED = 0x40
# So often a neighbour is answered while a flood lasts.
ANSWERS = size(4, 100)
# A message of a few parts is soon too long, and many frames may be sent.
TIGHT = {"NODE": "bombs", "RELAY_FRAME_BYTES": 4096, "RELAY_FRAMES_PER_SECOND": 10_000}

Enter = Callable[..., Visitor]
Open = Callable[..., Attacker]


@pytest.fixture
def tight(new_site: Callable[..., Site]) -> Site:
    return new_site(PSQLMESSAGES=TIGHT)


@pytest.fixture
def attack() -> Iterator[Open]:
    """Open a connection, which vanishes at the end."""
    with ExitStack() as opened:
        yield lambda *given, **options: opened.enter_context(closing(Attacker(*given, **options)))


@pytest.fixture
def cookie(enter: Enter) -> str:
    return enter("alice").cookie


@contextmanager
def beside(site: Site, enter: Enter, case: str) -> Iterator[tuple[Neighbour, dict]]:
    found: dict[str, object] = {}
    with Neighbour(site, enter("bob", "web.bob", at=site)) as felt:
        yield felt, found
        felt.until(felt.answers + 1)
    report(
        FAULT, case, **found, answers_to_another_user=felt.answers,
        slowest_answer_seconds=felt.slowest_seconds, memory_growth_megabytes=felt.grown_megabytes,
    )  # fmt: skip
    # A busy machine has a part in it.
    assert felt.slowest_seconds < 30
    assert felt.grown_megabytes < 32


def flood(attacker: Attacker, felt: Neighbour, data: bytes, answers: int = ANSWERS) -> int:
    """Send the same until a neighbour was answered so often; return how often that was sent."""
    sent, wanted = 0, felt.answers + answers
    while felt.answers < wanted and attacker.send(data):
        sent += 1
    felt.until(wanted)
    return sent


def test_connections_that_stay_half_open_are_closed(new_site: Callable[..., Site], enter: Enter):
    """Some say nothing, some half of a header, some a byte of it now and then."""
    number, limit = size(40, 1200), size(1, 10)
    site = new_site(PSQLMESSAGES={"NODE": "half", "REQUEST_SECONDS": limit})
    header = f"GET /ws/node/ HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\nX-More: ".encode()
    neighbour = enter("alice", "web.alice", at=site)
    began, pause = monotonic(), threading.Event()
    opened = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(number)]
    for one in opened:
        one.setblocking(False)
    for one in opened[::2]:
        one.send(header)
    is_open = dict.fromkeys(opened, True)
    while any(is_open.values()) and monotonic() - began < limit + 30:
        for one in opened[::4]:
            with suppress(OSError):
                one.send(b"a")
        for one in opened:
            with suppress(BlockingIOError):
                try:
                    is_open[one] = bool(one.recv(100)) and is_open[one]
                except ConnectionError:
                    is_open[one] = False
        pause.wait(0.2)
    seconds, left = monotonic() - began, sum(is_open.values())
    for one in opened:
        one.close()
    report(
        FAULT, f"connections that stay half open, limit {limit} s", connections_opened=number,
        left=left, closed_after_seconds=seconds,
    )  # fmt: skip
    assert left == 0
    # A request that has sent its header may take longer.
    neighbour.ok("topic_status", topic="ROOM")
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as slow:
        slow.sendall(header.replace(b"GET", b"POST") + b"\r\nContent-Length: 2\r\n\r\n")
        for _ in range(2):
            pause.wait(limit * 0.75)
            slow.sendall(b"x")
        assert slow.recv(100).startswith(b"HTTP/1.1 ")


def test_a_compressed_bomb_is_refused(enter: Enter, site: Site, attack: Open, cookie: str):
    packing = zlib.compressobj(9, zlib.DEFLATED, -15)
    megabytes = size(64, 1024)
    packed = b"".join(packing.compress(b"x" * 2**20) for _ in range(megabytes)) + packing.flush()
    bomb = bytearray(frame(Opcode.TEXT, packed))
    bomb[0] |= COMPRESSED
    offer = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
    with beside(site, enter, "compressed bombs") as (_, found):
        codes = []
        for _ in range(size(2, 10)):
            attacker = attack(site)
            assert "Extensions" not in attacker.open(site, cookie, [offer])
            attacker.send(bytes(bomb))
            codes.append(attacker.closed())
        found |= {"bombs": len(codes), "each_megabytes": megabytes, "closed_with": codes[0]}
    assert set(codes) == {"1002"}


def test_an_endless_message_closes_with_1009(enter: Enter, tight: Site, attack: Open, cookie: str):
    for part, described in ((b"", "empty"), (b"x", "one-byte")):
        attacker = attack(tight)
        attacker.open(tight, cookie)
        parts = frame(Opcode.CONT, part, is_last=False) * 1000
        case = f"an endless message of {described} fragments"
        with beside(tight, enter, case) as (felt, found):
            attacker.send(frame(Opcode.TEXT, part, is_last=False))
            # It sends on when it was closed, and reads the reason last.
            found["fragments_sent"] = 1000 * flood(attacker, felt, parts)
            found["closed_with"] = attacker.closed()
        assert found["closed_with"] == "1009", described


def test_floods_of_pings_do_not_stop_others(enter: Enter, tight: Site, attack: Open, cookie: str):
    attacker, deaf = attack(tight), attack(tight, is_deaf=True)
    attacker.open(tight, cookie)
    reading = threading.Thread(target=attacker.read_on)
    with beside(tight, enter, "a flood of pings; their pongs are read") as (felt, found):
        reading.start()
        found["pings_sent"] = 1000 * flood(attacker, felt, frame(Opcode.PING) * 1000)
        attacker.shut()
        reading.join()
    deaf.open(tight, cookie)
    with beside(tight, enter, "a flood of pings; their pongs are not read") as (_, found):
        pings = frame(Opcode.PING, bytes(125)) * 500
        taken = deaf.until_full(pings, most=size(64, 100) * 2**20)
        found["accepted_megabytes"] = taken / 2**20
    assert taken < 50 * 2**20


def test_a_flood_after_the_close_delays_no_other_client(
    enter: Enter, site: Site, attack: Open, cookie: str
):
    attackers, frames = [attack(site) for _ in range(size(3, 15))], frame(Opcode.TEXT, b"{}") * 1000
    with beside(site, enter, "WebSockets that send on after they were closed") as (felt, found):
        for attacker in attackers:
            attacker.open(site, cookie)
        with ThreadPoolExecutor() as pool:
            for attacker in attackers:
                pool.submit(flood, attacker, felt, frames)
        found |= {"flooding": len(attackers), "closed_with": "4429"}
        assert {attacker.closed() for attacker in attackers} == {"4429"}


# Handshakes

OPENED, REFUSED, TOO_LARGE = (f"HTTP/1.1 {status}" for status in (101, 400, 431))
PROTOCOL = "Sec-WebSocket-Protocol"
HEADERS = {
    "a header of 1 MB": (["X-Long: " + "x" * 2**20], (TOO_LARGE,)),
    "10,000 headers": ([f"X-{n}: {'x' * 100}" for n in range(10_000)], (TOO_LARGE,)),
    "2,000 subprotocols": ([f"{PROTOCOL}: {','.join(f'p{n}' for n in range(2000))}"], (OPENED,)),
    "the same subprotocol 2,000 times": ([f"{PROTOCOL}: {','.join(['p'] * 2000)}"], (REFUSED,)),
}


def test_giant_or_partial_handshakes_are_cheap(enter: Enter, site: Site, attack: Open, cookie: str):
    for what, (headers, expected) in HEADERS.items():
        with beside(site, enter, what) as (_, found):
            answers = {attack(site).open(site, cookie, headers)[:12] for _ in range(size(2, 5))}
            found["answer"] = " or ".join(sorted(answer or "none" for answer in answers))
        assert answers <= set(expected), what
    with beside(site, enter, "endless handshakes") as (felt, found):
        found["handshakes"] = size(200, 800)
        for _ in range(size(200, 800)):
            attack(site).send(handshake(site)[:-4])
        felt.until(felt.answers + 10)


def test_early_data_is_not_kept(enter: Enter, site: Site, attack: Open, relay: World, cookie: str):
    attacker = attack(site)
    with (
        beside(site, enter, "data before the handshake was answered") as (_, found),
        psycopg.connect(relay.server.url()) as owner,
    ):
        # Who comes in cannot be found out for a while.
        owner.execute("LOCK TABLE django_session IN ACCESS EXCLUSIVE MODE")
        attacker.send(handshake(site, cookie))
        taken = attacker.until_full(b"x" * 2**16, most=size(64, 256) * 2**20)
        owner.rollback()
        answer = attacker.answer()
        found["accepted_megabytes"] = taken / 2**20
    assert answer.startswith("HTTP/1.1 101")
    # What the system keeps of a connection.
    assert taken < 16 * 2**20


def test_frames_in_the_body_of_a_handshake_are_no_frames(enter: Enter, site: Site, attack: Open):
    attacker = attack(site)
    # They would be taken in before any bound is there, each after all others were moved.
    pings = frame(Opcode.PING) * size(100_000, 1_000_000)
    body = pings + frame(Opcode.CLOSE, (1000).to_bytes(2))
    with beside(site, enter, "frames in the body of a handshake") as (felt, found):
        # Whoever has not logged in may do this.
        attacker.send(handshake(site, "", [f"Content-Length: {len(body)}"]) + body)
        found["sent_megabytes"] = len(body) / 2**20
        found["closed_with"] = attacker.answer() and attacker.closed()
        felt.until(felt.answers + 10)
    assert found["closed_with"] == "4401"


# Texts

TEXTS = {
    "objects in objects": '{"a":' * 50_000,
    "an integer of 200,000 digits": '{"op":"deinit","ref":' + "9" * 200_000 + "}",
    "the same key 20,000 times": "{" + ",".join(['"op":"x"'] * 20_000) + "}",
    "15,000 keys": json.dumps({"op": "deinit", **{str(n): n for n in range(15_000)}}),
    "a lone surrogate as key": '{"op":"deinit","\\ud800":1}',
    "quotes": '"' * 200_000,
    "escapes": '{"op":"' + "\\u0041" * 30_000 + '"}',
}


def test_each_hostile_text_is_answered_with_57_and_the_socket_stays(enter: Enter, site: Site):
    alice = enter("alice", "web.alice")
    with beside(site, enter, "hostile texts") as (_, found):
        answers = {}
        for what, text in {**TEXTS, **{text: text for text in WRONG}}.items():
            alice.connection.send(text)
            answers[what] = alice.refusal()["Err"]
        alice.ok("topic_status", topic="ROOM")
        found |= {"texts": len(answers), "answered_with_error": "57"}
    assert set(answers.values()) == {"57"}
