"""A TCP proxy that can stop forwarding, as a network does that stalls: nothing is closed."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

# What a stalled network loses: requests of clients, answers of servers, or both.
Lost = Literal["requests", "answers", "all"]
# Linux: a socket in repair mode is closed without a packet to the other end.
TCP_REPAIR = 19
_SECONDS = 60


class Proxy:
    """Forwards connections to a server; `stall` freezes the existing ones, new ones still work."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wake, self._woken = socket.socketpair()
        self._clients: dict[socket.socket, socket.socket] = {}
        self._servers: dict[socket.socket, socket.socket] = {}
        self._frozen: set[socket.socket] = set()
        self._orders: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._is_stalling_new = self._is_ending = False
        self.accepted = 0
        self.port = self._listener.getsockname()[1]

    def stall(self, lost: Lost = "all", *, new: bool = False) -> None:
        """Stop forwarding on existing connections, with `new` on later ones too."""
        self._do(lambda: self._freeze(lost, new=new))

    def forget(self) -> None:
        """Let new connections work; existing ones stay stalled, as behind a firewall."""
        self._do(lambda: setattr(self, "_is_stalling_new", False))

    def heal(self) -> None:
        """Forward again, also the delayed data, as TCP does."""
        self._do(self._thaw)

    def refuse(self) -> None:
        """Stall, and refuse new connections too."""
        self._do(lambda: (self._freeze("all", new=False), self._listener.close()))

    def vanish(self) -> None:
        """Act like a host that loses its power: send no FIN or RST. Needs CAP_NET_ADMIN."""
        self._do(self._leave_silently)

    @contextmanager
    def serve(self) -> Iterator[Proxy]:
        thread = threading.Thread(target=self._forward)
        thread.start()
        try:
            yield self
        finally:
            self._is_ending = True
            self._wake.send(b"\0")
            thread.join()
            ends = (*self._clients, *self._servers)
            for one in (*ends, self._listener, self._wake, self._woken):
                one.close()

    def _do(self, order: Callable[[], object]) -> None:
        is_done = threading.Event()
        self._orders.append((order, is_done))
        self._wake.send(b"\0")
        assert is_done.wait(_SECONDS)

    def _freeze(self, lost: Lost, *, new: bool) -> None:
        self._is_stalling_new = new
        if lost != "answers":
            self._frozen.update(self._clients)
        if lost != "requests":
            self._frozen.update(self._servers)

    def _thaw(self) -> None:
        self._is_stalling_new = False
        self._frozen.clear()

    def _leave_silently(self) -> None:
        for server in self._servers:
            server.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        for one in (*self._servers, *self._clients):
            one.close()
        self._servers.clear()
        self._clients.clear()

    def _forward(self) -> None:
        while not self._is_ending:
            with selectors.DefaultSelector() as selector:
                ends = {*self._clients, *self._servers} - self._frozen
                for one in (self._listener, self._woken, *ends):
                    if one.fileno() >= 0:
                        selector.register(one, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select()]
            for one in ready:
                if one is self._woken:
                    self._woken.recv(1)
                    while self._orders:
                        order, is_done = self._orders.popleft()
                        order()
                        is_done.set()
                elif one is self._listener:
                    self._accept()
                elif one not in self._frozen:
                    self._pass_on(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.accepted += 1
        server = socket.create_connection(self._target)
        self._clients[client], self._servers[server] = server, client
        if self._is_stalling_new:
            self._frozen |= {client, server}

    def _pass_on(self, one: socket.socket) -> None:
        other = self._clients.get(one) or self._servers.get(one)
        if other is None:
            return
        try:
            data = one.recv(65536)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (one, other):
                self._clients.pop(end, None)
                self._servers.pop(end, None)
                self._frozen.discard(end)
                end.close()
