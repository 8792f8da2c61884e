"""Crowd: many WebSockets in a process of their own, which counts what comes and how late.

The cheapest client there is, so that it measures the server: blocking sockets on one epoll, and of
a frame nothing is read but its length and the time that its sender put into it.
"""

from __future__ import annotations

import base64
import os
import select
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import monotonic, monotonic_ns
from typing import Any, Self

MARK, DIGITS = b"at=", 20
AT_ONCE = 16
WAIT_SECONDS = 60
_READ_BYTES = 1 << 18
_FINAL, _TEXT, _CLOSE, _PING, _PONG = 0x80, 1, 8, 9, 10
_SHORT, _LONGER = 125, 126


@dataclass(frozen=True)
class Place:
    """Where to connect, and what to say there; ``hellos`` are frames, each waits for its answer."""

    port: int
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    hellos: Sequence[str] = ()


def body_of(size: int) -> str:
    """Make a body of a size in bytes that says when it was made."""
    return f"{MARK.decode()}{monotonic_ns():0{DIGITS}d}".ljust(size, "x")


class Crowd:
    """The process, from outside."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, inner = context.Pipe()
        self._process = context.Process(target=_serve, args=(inner,), daemon=True)
        self._open: dict[str, int] = {}
        self._received = 0

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Where it has failed it says so before it ends.
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join(WAIT_SECONDS)

    def open(self, side: str, sockets: int, place: Callable[[int], Place]) -> None:
        """Open WebSockets of a side until it has so many; ``place`` says where each one is."""
        places = [place(number) for number in range(self._open.get(side, 0), sockets)]
        self._open[side] = sockets
        self._pipe.send(("open", places))
        self._answer()

    def begin(self, side: str) -> None:
        """Count anew what comes to a side; the process tells of each message that all have."""
        self._received = 0
        self._pipe.send(("begin", self._open[side]))
        self._answer()

    def wait(self, received: int) -> None:
        """Wait until so many have come since `begin`."""
        deadline = monotonic() + WAIT_SECONDS
        while self._received < received:
            if not self._pipe.poll(max(0.0, deadline - monotonic())):
                raise TimeoutError(f"{received - self._received} messages are lost")
            self._note(self._pipe.recv())

    def latencies(self) -> list[float]:
        """Return in seconds how late each came since `begin`, sorted."""
        self._pipe.send(("latencies",))
        return sorted(late / 1e9 for late in self._answer())

    def _answer(self) -> Any:
        while isinstance(answer := self._pipe.recv(), int):
            self._note(answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _note(self, told: Any) -> None:
        if isinstance(told, Exception):
            raise told
        self._received = told


class _Reader:
    """The process, from inside: all WebSockets, and what came since `begin`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._poll = select.epoll()
        self._poll.register(pipe.fileno(), select.EPOLLIN)
        self._sockets: dict[int, socket.socket] = {}
        self._rests: dict[int, bytes] = {}
        self._late = array("q")
        self._step = self._tell_at = 1

    def run(self) -> None:
        """Read until the other end says that it is enough."""
        commands = self._pipe.fileno()
        while True:
            for number, _ in self._poll.poll():
                if number != commands:
                    self._read(number)
                elif not self._obey(self._pipe.recv()):
                    return
            if len(self._late) >= self._tell_at:
                self._tell_at = len(self._late) // self._step * self._step + self._step
                self._pipe.send(len(self._late))

    def _obey(self, command: tuple[Any, ...] | None) -> bool:
        match command:
            case ("open", places):
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    for opened in pool.map(connected, places):
                        self._sockets[opened.fileno()] = opened
                        self._rests[opened.fileno()] = b""
                        self._poll.register(opened.fileno(), select.EPOLLIN)
                self._pipe.send("opened")
            case ("begin", step):
                self._late = array("q")
                self._step = self._tell_at = step
                self._pipe.send("begun")
            case ("latencies",):
                self._pipe.send(self._late)
            case _:
                return False
        return True

    def _read(self, number: int) -> None:
        data = self._sockets[number].recv(_READ_BYTES)
        now = monotonic_ns()
        if not data:
            raise ConnectionError("the server has ended a WebSocket")
        if rest := self._rests[number]:
            data = rest + data
        at, end = 0, len(data)
        while end - at >= 4:
            length, begin = data[at + 1], at + 2
            if length == _LONGER:
                length, begin = data[at + 2] << 8 | data[at + 3], at + 4
            if begin + length > end:
                break
            if data[at] & 15 == _TEXT:
                marked = data.find(MARK, begin, begin + length) + len(MARK)
                self._late.append(now - int(data[marked : marked + DIGITS]))
            else:
                self._answer(number, data[at] & 15, data[begin : begin + length])
            at = begin + length
        self._rests[number] = data[at:]

    def _answer(self, number: int, kind: int, payload: bytes) -> None:
        if kind == _CLOSE:
            raise ConnectionError(f"the server has closed a WebSocket: {payload!r}")
        if kind == _PING:
            self._sockets[number].sendall(_frame(_PONG, payload))


def _serve(pipe: Connection) -> None:
    try:
        _Reader(pipe).run()
    except (OSError, ValueError) as error:
        pipe.send(error)


def connected(place: Place) -> socket.socket:
    """Open a WebSocket, and say what is to be said there."""
    opened = socket.create_connection(("127.0.0.1", place.port), timeout=WAIT_SECONDS)
    key = base64.b64encode(os.urandom(16)).decode()
    fields = {
        "Host": f"127.0.0.1:{place.port}",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": key,
        "Sec-WebSocket-Version": "13",
        **place.headers,
    }
    lines = [f"GET {place.path} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
    opened.sendall("\r\n".join([*lines, "", ""]).encode())
    # Nothing follows the handshake, nor an answer, before we say more.
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += opened.recv(_READ_BYTES)
    if b" 101 " not in answer.partition(b"\r\n")[0]:
        raise ConnectionError(f"{place.path}: {answer[:200]!r}")
    for hello in place.hellos:
        opened.sendall(_frame(_TEXT, hello.encode()))
        answer = opened.recv(_READ_BYTES)
        if b'"Err":"0"' not in answer:
            raise ConnectionError(f"{hello}: {answer!r}")
    return opened


def _frame(kind: int, payload: bytes) -> bytes:
    """Frame what a client says: masked, by a mask that changes nothing."""
    size = len(payload)
    length = bytes([0x80 | size]) if size <= _SHORT else struct.pack("!BH", 0x80 | _LONGER, size)
    return bytes([_FINAL | kind]) + length + bytes(4) + payload
