"""WebSockets by hand, for bytes that no library sends; and what a neighbour feels meanwhile."""

import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from django.conf import settings
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from tests.django.waiting import wait_until
from tests.web.site import Site
from tests.web.sockets import Visitor

SECONDS = 60


def frame(opcode: Opcode, payload: bytes = b"", *, is_last: bool = True) -> bytes:
    return Frame(opcode, payload, is_last).serialize(mask=True)


def megabytes_of(site: Site) -> float:
    pages = int(Path(f"/proc/{site.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def handshake(site: Site, cookie: str = "", headers: Iterable[str] = ()) -> bytes:
    """The request of a browser that opens a node's WebSocket; `headers` are lines of it."""
    lines = [
        "GET /ws/node/ HTTP/1.1", f"Host: 127.0.0.1:{site.port}", f"Origin: {site.url}",
        f"Cookie: {settings.SESSION_COOKIE_NAME}={cookie}", "Upgrade: websocket",
        "Connection: Upgrade", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


class Attacker:
    """A connection that sends anything; `is_deaf`: with the smallest receive buffer."""

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
        """Make the handshake; the server's answer, as text."""
        self.send(handshake(site, cookie, headers))
        return self.answer()

    def answer(self) -> str:
        while b"\r\n\r\n" not in self._read and self._more():
            pass
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        return head.decode("latin1")

    def closed(self) -> str:
        """Read on until the server closes: its code; "ended" if it says none."""
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
        """Send the same until the server takes no more for a second, or closes: the bytes taken."""
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


class Neighbour:
    """Another user, who asks the same again and again: how late answers are, how much is held."""

    def __init__(self, site: Site, visitor: Visitor) -> None:
        self._site = site
        self._visitor = visitor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.slowest_seconds = 0.0
        # How much more the server held than before, at the worst moment.
        self.grown_megabytes = 0.0

    def until(self, answers: int) -> None:
        wait_until(lambda: self.answers >= answers)

    def _run(self) -> None:
        before = megabytes_of(self._site)
        # As often as its rate allows.
        while not self._stop.wait(0.03):
            began = monotonic()
            try:
                self._visitor.ok("topic_status", topic="ROOM")
            except ConnectionClosed:
                return
            self.answers += 1
            self.slowest_seconds = max(self.slowest_seconds, monotonic() - began)
            self.grown_megabytes = max(self.grown_megabytes, megabytes_of(self._site) - before)

    def __enter__(self) -> "Neighbour":
        self._visitor.ok("topic_status", topic="ROOM")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        # It is still there.
        self._visitor.ok("topic_status", topic="ROOM")
        self._visitor.close()
