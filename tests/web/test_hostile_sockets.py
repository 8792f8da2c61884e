"""Hostile WebSockets: each meets a limit, memory stays small, and another user is served."""

import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from time import monotonic

import psycopg
import pytest
from django.conf import settings
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from tests.django.waiting import wait_until
from tests.reliability.counts import memory_megabytes, report, size
from tests.sql.conftest import World
from tests.web.site import Site
from tests.web.sockets import Enter, Visitor
from tests.web.test_relay import WRONG

FAULT = "a hostile WebSocket"
SECONDS = 60
COMPRESSED = 0x40
# The number of answers to another user while a flood lasts.
ANSWERS = size(4, 100)
TIGHT = {"NODE": "bombs", "RELAY_FRAME_BYTES": 4096, "RELAY_FRAMES_PER_SECOND": 10_000}


def frame(opcode: Opcode, payload: bytes = b"", *, is_last: bool = True) -> bytes:
    return Frame(opcode, payload, is_last).serialize(mask=True)


def handshake(site: Site, cookie: str = "", headers: Iterable[str] = ()) -> bytes:
    """Return the request of a browser that opens a node's WebSocket, with more header lines."""
    lines = [
        "GET /ws/node/ HTTP/1.1", f"Host: 127.0.0.1:{site.port}", f"Origin: {site.url}",
        f"Cookie: {settings.SESSION_COOKIE_NAME}={cookie}", "Upgrade: websocket",
        "Connection: Upgrade", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


class Attacker:
    """A connection that sends any bytes; `is_deaf`: with the smallest receive buffer."""

    def __init__(self, site: Site, *, is_deaf: bool = False) -> None:
        self._socket = socket.socket()
        if is_deaf:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        self._socket.settimeout(SECONDS)
        self._socket.connect(("127.0.0.1", site.port))
        self._read = b""

    def send(self, data: bytes) -> bool:
        try:
            self._socket.sendall(data)
        except (TimeoutError, ConnectionError):
            return False
        return True

    def open(self, site: Site, cookie: str, headers: Iterable[str] = ()) -> str:
        """Send the handshake; return the head of the response."""
        self.send(handshake(site, cookie, headers))
        return self.answer()

    def answer(self) -> str:
        while b"\r\n\r\n" not in self._read and self._more():
            pass
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        return head.decode("latin1")

    def closed(self) -> str:
        """Read until the server closes; return its code, or "ended" if it sends none."""
        protocol = ClientProtocol(parse_uri("ws://site"), state=State.OPEN, max_size=None)
        while protocol.close_rcvd is None:
            if not self._read and not self._more():
                return "ended"
            protocol.receive_data(self._read)
            self._read = b""
        return str(int(protocol.close_rcvd.code))

    def _more(self) -> bool:
        more = b""
        with suppress(ConnectionError):
            more = self._socket.recv(65536)
        self._read += more
        return bool(more)

    def read_on(self) -> None:
        while self._more():
            self._read = b""

    def until_full(self, data: bytes, *, most: int) -> int:
        """Send until the server takes nothing for a second or closes; return the bytes taken."""
        self._socket.settimeout(1)
        taken = 0
        try:
            while taken < most:
                taken += self._socket.send(data)
        except TimeoutError:
            self._socket.settimeout(SECONDS)
        except ConnectionError:
            return taken
        return taken

    def shut(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class OtherUser:
    """A user who sends requests all the time: measures the slowest answer and the memory growth."""

    def __init__(self, site: Site, visitor: Visitor) -> None:
        self._site = site
        self._visitor = visitor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.slowest_seconds = 0.0
        self.grown_megabytes = 0.0

    def wait_for(self, answers: int) -> None:
        wait_until(lambda: self.answers >= answers)

    def _run(self) -> None:
        before = memory_megabytes(self._site.pid)
        while not self._stop.wait(0.03):
            began = monotonic()
            try:
                self._visitor.ok("topic_status", topic="ROOM")
            except ConnectionClosed:
                return
            self.answers += 1
            self.slowest_seconds = max(self.slowest_seconds, monotonic() - began)
            grown = memory_megabytes(self._site.pid) - before
            self.grown_megabytes = max(self.grown_megabytes, grown)

    def __enter__(self) -> "OtherUser":
        self._visitor.ok("topic_status", topic="ROOM")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._visitor.ok("topic_status", topic="ROOM")
        self._visitor.close()


Open = Callable[..., Attacker]


@pytest.fixture
def tight(new_site: Callable[..., Site]) -> Site:
    return new_site(PSQLMESSAGES=TIGHT)


@pytest.fixture
def attack() -> Iterator[Open]:
    with ExitStack() as opened:
        yield lambda *given, **options: opened.enter_context(closing(Attacker(*given, **options)))


@pytest.fixture
def cookie(enter: Enter) -> str:
    return enter("alice").cookie


@contextmanager
def beside(site: Site, enter: Enter, case: str) -> Iterator[tuple[OtherUser, dict]]:
    found: dict[str, object] = {}
    with OtherUser(site, enter("bob", "web.bob", at=site)) as other:
        yield other, found
        other.wait_for(other.answers + 1)
    report(
        FAULT, case, **found, answers_to_another_user=other.answers,
        slowest_answer_seconds=other.slowest_seconds, memory_growth_megabytes=other.grown_megabytes,
    )  # fmt: skip
    assert other.slowest_seconds < 30
    assert other.grown_megabytes < 32


def flood(attacker: Attacker, other: OtherUser, data: bytes, answers: int = ANSWERS) -> int:
    """Send data until another user has got so many answers; return the number of sends."""
    sent, wanted = 0, other.answers + answers
    while other.answers < wanted and attacker.send(data):
        sent += 1
    other.wait_for(wanted)
    return sent


def test_connections_that_stay_half_open_are_closed(new_site: Callable[..., Site], enter: Enter):
    """Some send nothing, some half a header, and some a byte from time to time."""
    number, limit = size(40, 1200), size(1, 10)
    site = new_site(PSQLMESSAGES={"NODE": "half", "REQUEST_SECONDS": limit})
    header = f"GET /ws/node/ HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\nX-More: ".encode()
    other = enter("alice", "web.alice", at=site)
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
    # After its header, a request may take longer.
    other.ok("topic_status", topic="ROOM")
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
        with beside(tight, enter, f"an endless message of {described} fragments") as (other, found):
            attacker.send(frame(Opcode.TEXT, part, is_last=False))
            found["fragments_sent"] = 1000 * flood(attacker, other, parts)
            found["closed_with"] = attacker.closed()
        assert found["closed_with"] == "1009", described


def test_floods_of_pings_do_not_stop_others(enter: Enter, tight: Site, attack: Open, cookie: str):
    attacker, deaf = attack(tight), attack(tight, is_deaf=True)
    attacker.open(tight, cookie)
    reading = threading.Thread(target=attacker.read_on)
    with beside(tight, enter, "a flood of pings; their pongs are read") as (other, found):
        reading.start()
        found["pings_sent"] = 1000 * flood(attacker, other, frame(Opcode.PING) * 1000)
        attacker.shut()
        reading.join()
    deaf.open(tight, cookie)
    with beside(tight, enter, "a flood of pings; their pongs are not read") as (_, found):
        pings = frame(Opcode.PING, bytes(125)) * 500
        taken = deaf.until_full(pings, most=size(64, 100) * 2**20)
        found["accepted_megabytes"] = taken / 2**20
    assert taken < 50 * 2**20


def test_a_flood_after_the_close_delays_nobody(enter: Enter, site: Site, attack: Open, cookie: str):
    attackers, frames = [attack(site) for _ in range(size(3, 15))], frame(Opcode.TEXT, b"{}") * 1000
    with beside(site, enter, "WebSockets that send on after they were closed") as (other, found):
        for attacker in attackers:
            attacker.open(site, cookie)
        with ThreadPoolExecutor() as pool:
            for attacker in attackers:
                pool.submit(flood, attacker, other, frames)
        found |= {"flooding": len(attackers), "closed_with": "4429"}
        assert {attacker.closed() for attacker in attackers} == {"4429"}


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
    with beside(site, enter, "endless handshakes") as (other, found):
        found["handshakes"] = size(200, 800)
        for _ in range(size(200, 800)):
            attack(site).send(handshake(site)[:-4])
        other.wait_for(other.answers + 10)


def test_early_data_is_not_kept(enter: Enter, site: Site, attack: Open, relay: World, cookie: str):
    attacker = attack(site)
    with (
        beside(site, enter, "data before the handshake was answered") as (_, found),
        psycopg.connect(relay.server.url()) as owner,
    ):
        # The site cannot read the session for a while.
        owner.execute("LOCK TABLE django_session IN ACCESS EXCLUSIVE MODE")
        attacker.send(handshake(site, cookie))
        taken = attacker.until_full(b"x" * 2**16, most=size(64, 256) * 2**20)
        owner.rollback()
        answer = attacker.answer()
        found["accepted_megabytes"] = taken / 2**20
    assert answer.startswith("HTTP/1.1 101")
    # The buffers of the operating system.
    assert taken < 16 * 2**20


def test_frames_in_the_body_of_a_handshake_are_no_frames(enter: Enter, site: Site, attack: Open):
    attacker = attack(site)
    pings = frame(Opcode.PING) * size(100_000, 1_000_000)
    body = pings + frame(Opcode.CLOSE, (1000).to_bytes(2))
    with beside(site, enter, "frames in the body of a handshake") as (other, found):
        attacker.send(handshake(site, "", [f"Content-Length: {len(body)}"]) + body)
        found["sent_megabytes"] = len(body) / 2**20
        found["closed_with"] = attacker.answer() and attacker.closed()
        other.wait_for(other.answers + 10)
    assert found["closed_with"] == "4401"


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
