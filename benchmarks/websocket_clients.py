"""Many WebSocket clients in one process, which counts messages and measures their latencies.

The clients need as little CPU time as possible, so that the server is measured: blocking sockets
with one epoll object, which read only the length of a frame and the time in its body.
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

TIME_PREFIX, TIME_DIGITS = b"at=", 20
PARALLEL_HANDSHAKES = 16
WAIT_SECONDS = 60
_READ_BYTES = 1 << 18
_FINAL, _TEXT, _CLOSE, _PING, _PONG = 0x80, 1, 8, 9, 10
_SHORT, _LONGER = 125, 126


@dataclass(frozen=True)
class Endpoint:
    """An address of WebSockets; ``requests`` are frames to send first, each with an answer."""

    port: int
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    requests: Sequence[str] = ()


def timed_body(size: int) -> str:
    """Return a body with this number of bytes, which contains the present time."""
    return f"{TIME_PREFIX.decode()}{monotonic_ns():0{TIME_DIGITS}d}".ljust(size, "x")


class WebSocketClients:
    """Controls the process of the clients."""

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
        # If the process has failed, it has sent its error and ended.
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join(WAIT_SECONDS)

    def open(self, side: str, sockets: int, endpoint: Callable[[int], Endpoint]) -> None:
        """Open more WebSockets of a side, until the side has this number of them."""
        endpoints = [endpoint(number) for number in range(self._open.get(side, 0), sockets)]
        self._open[side] = sockets
        self._pipe.send(("open", endpoints))
        self._read_answer()

    def begin(self, side: str) -> None:
        """Reset the count. The process reports the count after one message per WebSocket each."""
        self._received = 0
        self._pipe.send(("begin", self._open[side]))
        self._read_answer()

    def wait(self, received: int) -> None:
        """Wait until this number of messages has been received since `begin`."""
        deadline = monotonic() + WAIT_SECONDS
        while self._received < received:
            if not self._pipe.poll(max(0.0, deadline - monotonic())):
                raise TimeoutError(f"{received - self._received} messages are lost")
            self._set_received(self._pipe.recv())

    def latencies(self) -> list[float]:
        """Return the latencies in seconds of all messages since `begin`, sorted."""
        self._pipe.send(("latencies",))
        return sorted(nanoseconds / 1e9 for nanoseconds in self._read_answer())

    def _read_answer(self) -> Any:
        while isinstance(answer := self._pipe.recv(), int):
            self._set_received(answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _set_received(self, count: Any) -> None:
        if isinstance(count, Exception):
            raise count
        self._received = count


class _Reader:
    """Runs in the process: reads all WebSockets, and stores the latencies since `begin`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._poll = select.epoll()
        self._poll.register(pipe.fileno(), select.EPOLLIN)
        self._sockets: dict[int, socket.socket] = {}
        self._rests: dict[int, bytes] = {}
        self._latencies = array("q")
        self._step = self._report_at = 1

    def run(self) -> None:
        """Read until the command None arrives."""
        commands = self._pipe.fileno()
        while True:
            for number, _ in self._poll.poll():
                if number != commands:
                    self._read(number)
                elif not self._run_command(self._pipe.recv()):
                    return
            received = len(self._latencies)
            if received >= self._report_at:
                self._report_at = received // self._step * self._step + self._step
                self._pipe.send(received)

    def _run_command(self, command: tuple[Any, ...] | None) -> bool:
        match command:
            case ("open", endpoints):
                with ThreadPoolExecutor(PARALLEL_HANDSHAKES) as pool:
                    for opened in pool.map(connect_websocket, endpoints):
                        self._sockets[opened.fileno()] = opened
                        self._rests[opened.fileno()] = b""
                        self._poll.register(opened.fileno(), select.EPOLLIN)
                self._pipe.send("opened")
            case ("begin", step):
                self._latencies = array("q")
                self._step = self._report_at = step
                self._pipe.send("begun")
            case ("latencies",):
                self._pipe.send(self._latencies)
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
                time = data.find(TIME_PREFIX, begin, begin + length) + len(TIME_PREFIX)
                self._latencies.append(now - int(data[time : time + TIME_DIGITS]))
            else:
                self._answer_control(number, data[at] & 15, data[begin : begin + length])
            at = begin + length
        self._rests[number] = data[at:]

    def _answer_control(self, number: int, opcode: int, payload: bytes) -> None:
        if opcode == _CLOSE:
            raise ConnectionError(f"the server has closed a WebSocket: {payload!r}")
        if opcode == _PING:
            self._sockets[number].sendall(_frame(_PONG, payload))


def _serve(pipe: Connection) -> None:
    try:
        _Reader(pipe).run()
    except (OSError, ValueError) as error:
        pipe.send(error)


def connect_websocket(endpoint: Endpoint) -> socket.socket:
    """Open a WebSocket, and send the requests of the endpoint."""
    opened = socket.create_connection(("127.0.0.1", endpoint.port), timeout=WAIT_SECONDS)
    key = base64.b64encode(os.urandom(16)).decode()
    fields = {
        "Host": f"127.0.0.1:{endpoint.port}",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": key,
        "Sec-WebSocket-Version": "13",
        **endpoint.headers,
    }
    lines = [f"GET {endpoint.path} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
    opened.sendall("\r\n".join([*lines, "", ""]).encode())
    # The server sends nothing else before the next request.
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += opened.recv(_READ_BYTES)
    if b" 101 " not in answer.partition(b"\r\n")[0]:
        raise ConnectionError(f"{endpoint.path}: {answer[:200]!r}")
    for request in endpoint.requests:
        opened.sendall(_frame(_TEXT, request.encode()))
        answer = opened.recv(_READ_BYTES)
        if b'"Err":"0"' not in answer:
            raise ConnectionError(f"{request}: {answer!r}")
    return opened


def _frame(opcode: int, payload: bytes) -> bytes:
    """Return a frame of a client, with a mask of zeros."""
    size = len(payload)
    length = bytes([0x80 | size]) if size <= _SHORT else struct.pack("!BH", 0x80 | _LONGER, size)
    return bytes([_FINAL | opcode]) + length + bytes(4) + payload
