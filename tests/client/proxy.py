"""A TCP proxy that can stop forwarding, as a network does that stalls: nothing is closed."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy:
    """Forwards connections to a server; `stall` freezes those there are, new ones still work."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wake, self._woken = socket.socketpair()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._frozen: list[socket.socket] = []
        self._is_stalling = self._is_refusing = self._is_ending = False
        self.port = self._listener.getsockname()[1]

    def stall(self) -> None:
        """Forward nothing more on the connections there are."""
        self._is_stalling = True
        self._wake.send(b"\0")

    def refuse(self) -> None:
        """Stall, and refuse new connections too."""
        self._is_refusing = True
        self.stall()

    @contextmanager
    def serve(self) -> Iterator[Proxy]:
        """Forward in a thread."""
        thread = threading.Thread(target=self._forward)
        thread.start()
        try:
            yield self
        finally:
            self._is_ending = True
            self._wake.send(b"\0")
            thread.join()
            for one in (*self._pairs, *self._frozen, self._listener, self._wake, self._woken):
                one.close()

    def _forward(self) -> None:
        while not self._is_ending:
            with selectors.DefaultSelector() as selector:
                for one in (self._listener, self._woken, *self._pairs):
                    if one.fileno() >= 0:
                        selector.register(one, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select()]
            for one in ready:
                if one is self._woken:
                    self._woken.recv(1)
                    self._freeze()
                elif one is self._listener:
                    self._accept()
                elif one in self._pairs:
                    self._pass_on(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        self._pairs[client], self._pairs[server] = server, client

    def _freeze(self) -> None:
        if self._is_stalling:
            self._is_stalling = False
            self._frozen += self._pairs
            self._pairs.clear()
        if self._is_refusing:
            self._listener.close()

    def _pass_on(self, one: socket.socket) -> None:
        other = self._pairs[one]
        try:
            data = one.recv(65536)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (one, other):
                del self._pairs[end]
                end.close()
