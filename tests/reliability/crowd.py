"""A crowd: everything that talks to one PostgreSQL, and what each of it heard."""

import asyncio
import subprocess
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import dj_database_url
import psycopg
from django.contrib.auth.models import User

from psqlmessages import AsyncNode, Node, Options, PubSub
from psqlmessages.graph import definitions, stored
from psqlmessages.models import WebIdentity
from psqlmessages.pubsub import Event
from psqlmessages.relay.frames import Frame
from psqlmessages.relay.hub import Hub
from psqlmessages.rest.tokens import token_for
from tests.conftest import TestedServer
from tests.django.processes import start
from tests.exchanges.conftest import namespace
from tests.reliability.restarts import LONG, until
from tests.web.site import Site

SYNC = [f"SYNC.{number}" for number in range(10)]
ASYNC = [f"ASYNC.{number}" for number in range(10)]
WEB = [f"WEB.{number}" for number in range(10)]
BUS = "BUS"
IDENTS = [*SYNC, *ASYNC, *WEB, "worker"]
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES
        (current_user, 'SYNC.*', 'Topic', 'T', 'RW', 60),
        (current_user, 'ASYNC.*', 'Topic', 'T', 'RW', 60),
        (current_user, 'WEB.*', 'Topic', 'T', 'RW', 60),
        (current_user, 'SYNC.*', 'Topic', 'ORDERS', 'W', 60),
        (current_user, 'worker', 'Topic', 'ORDERS', 'R', 60),
        (current_user, 'wanda', 'Queue', 'orders', 'RW', 60),
        (current_user, 'exchange.*', 'Queue', '*', 'RW', 60)
"""
EXCHANGE = {
    "src": {"ns": "default", "queue": "orders"},
    "dst": [{"ns": "default", "queue": "shipped"}],
}
REGISTERED = """
    SELECT array_agg(c.ident ORDER BY c.ident), count(DISTINCT s.id)
    FROM psqlmessages_client AS c JOIN psqlmessages_session AS s ON s.id = c.session_id
"""
LISTENERS = """
    SELECT coalesce(array_agg(ident), '{}')
    FROM (SELECT unnest(listeners) AS ident FROM messages.topics) AS listening
"""
BODIES = """
    SELECT coalesce(array_agg(e.body ORDER BY e.id), '{}') FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'shipped'
"""
# What a process says of how far it has come is no log.
PROGRESS = ("handled ", "routed ", "runs ", "worker has ")


class Ears:
    """How often each heard what."""

    def __init__(self) -> None:
        self._heard: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def hear(self, ident: str, what: object) -> None:
        with self._lock:
            self._heard[ident, str(what).rstrip()] += 1

    def counts(self, what: str) -> dict[str, int]:
        """Who heard something, and how often."""
        with self._lock:
            return {ident: times for (ident, of), times in self._heard.items() if of == what}

    def of(self, ident: str) -> Counter[str]:
        """What one heard, and how often."""
        with self._lock:
            return Counter({what: n for (who, what), n in self._heard.items() if who == ident})


class Ear:
    """A receiver of the hub."""

    def __init__(self, ident: str, ears: Ears) -> None:
        self._ident, self._ears = ident, ears

    def deliver(self, frame: Frame) -> None:
        self._ears.hear(self._ident, frame.header.get("Evt") or frame.body)


class Process:
    """A command that runs; what it says besides how far it has come."""

    def __init__(self, server: TestedServer, *arguments: str) -> None:
        self.said: list[str] = []
        self._process = start(server, "psqlmessages", *arguments)
        self._is_up = threading.Event()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith(PROGRESS):
                self._is_up.set()
            else:
                self.said.append(line.rstrip())

    def wait(self) -> None:
        """Wait until it runs."""
        assert self._is_up.wait(LONG), self.said

    def close(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._reading.join()
        self._process.communicate()


def write_exchange(server: TestedServer, name: str, definition: Mapping[str, Any]) -> None:
    """Store an exchange in the database of a server of a test's own."""
    (exchange,) = definitions.validated({"exchanges": {name: definition}})
    with namespace("own", **dj_database_url.parse(server.url())):
        stored.put(exchange, replace=True, using="own")


class Crowd:
    """The nodes of threads and of asyncio, a hub's, a bus, a runner, an exchange and a site."""

    def __init__(self, server: TestedServer, folder: Path) -> None:
        self.server = server
        self.ears = Ears()
        url = server.url()
        self.nodes = [Node(ident, url, options=Options()) for ident in SYNC]
        self.bus = PubSub(url)
        self.site = Site(server, folder, {})
        with psycopg.connect(url, autocommit=True) as owner:
            owner.execute(RULES)
        self._token = self.write_definitions()
        self.processes: dict[str, Process] = {}
        self._threads = [
            threading.Thread(target=self._read, args=(node,), name=node.ident)
            for node in self.nodes
        ]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._of_asyncio())))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = asyncio.Event()

    def write_definitions(self) -> str:
        """Write the exchange and the user of the site; return the user's token."""
        write_exchange(self.server, "ship", EXCHANGE)
        with namespace("own", **dj_database_url.parse(self.server.url())):
            user, _ = User.objects.using("own").get_or_create(username="wanda")
            WebIdentity.objects.using("own").get_or_create(user=user, ident="wanda")
            return token_for(user, timedelta(hours=1))

    # The nodes

    def _read(self, node: Node) -> None:
        with node:
            node.topic_listen("T")
            node.topic_notify("T")
            for message in node.messages():
                self.ears.hear(node.ident, message.event or message.body)

    async def _of_asyncio(self) -> None:
        self._loop = asyncio.get_running_loop()
        hub = Hub(self.server.url(), options=Options())
        async with asyncio.TaskGroup() as tasks:
            nodes = [AsyncNode(ident, self.server.url()) for ident in ASYNC]
            for node in nodes:
                tasks.create_task(self._read_async(node))
            for ident in WEB:
                ear = Ear(ident, self.ears)
                assert (await hub.init(ident, ear))["Err"] == "0"
                assert (await hub.run(ident, ear, "topic_listen", "T"))["Err"] == "0"
            await self._is_over.wait()
            for node in nodes:
                node.stop()
        await hub.close()

    async def _read_async(self, node: AsyncNode) -> None:
        async with node:
            await node.topic_listen("T")
            await node.topic_notify("T")
            async for message in node.messages():
                self.ears.hear(node.ident, message.event or message.body)

    # Life

    def open(self) -> None:
        """Start all, one process after the other, and wait until they are registered."""
        self.site.start()
        for arguments in (("run", "worker"), ("exchange", "run")):
            process = self.processes[" ".join(arguments)] = Process(self.server, *arguments)
            process.wait()
        self.bus.subscribe("A")
        self.bus.on("A", self._hear_bus)
        for thread in self._threads:
            thread.start()
        self.wait_for_registration()
        self.nodes[0].topic_notify("ORDERS")

    def _hear_bus(self, event: Event) -> None:
        self.ears.hear(BUS, event.payload)

    def close(self) -> None:
        for node in self.nodes:
            node.stop()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._is_over.set)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(LONG)
        self.bus.close()
        for process in self.processes.values():
            process.close()
        self.site.stop()

    # What they do

    def wait_for_registration(self) -> None:
        """Wait until each ident is registered once, with no session besides, and listens."""
        with psycopg.connect(self.server.url(), autocommit=True) as owner:

            def all_are() -> bool:
                owner.execute("SELECT messages.evaluate()")
                idents, _ = owner.execute(REGISTERED).fetchone() or ([], 0)
                (listeners,) = owner.execute(LISTENERS).fetchone() or ([],)
                return idents == sorted(IDENTS) and sorted(listeners) == sorted(IDENTS)

            until(all_are)

    def exercise(self, word: str) -> None:
        """Let everything work once more, each once."""
        self.nodes[0].topic_send("T", word)
        until(lambda: self.ears.counts(word) == dict.fromkeys([*SYNC, *ASYNC, *WEB], 1))
        self.nodes[0].topic_send("ORDERS", word)
        until(lambda: self.bus.is_healthy)
        self.bus.publish("A", f"bus {word}")
        until(lambda: self.ears.counts(f"bus {word}") == {BUS: 1})
        assert self.post(word) == 201
        assert self.site.get("/healthz")[0] == 200
        with psycopg.connect(self.server.url(), autocommit=True) as owner:
            until(lambda: word in (owner.execute(BODIES).fetchone() or ([],))[0])
            handled = "SELECT count(*) FROM auth_group WHERE name = %s"
            until(lambda: owner.execute(handled, [word]).fetchone() == (1,))

    def post(self, body: str) -> int:
        """Push by the API; the status."""
        request = urllib.request.Request(  # noqa: S310
            f"{self.site.url}/api/q/default/orders", body.encode(),
            {"Authorization": f"Bearer {self._token}", "Content-Type": "text/plain"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def lines(self) -> Counter[str]:
        """How many lines the processes have said, and the site besides its requests."""
        said = {name: len(process.said) for name, process in self.processes.items()}
        of_site = [line for line in self.site.log().splitlines() if '"GET ' not in line]
        return Counter(said | {"site": len([li for li in of_site if '"POST ' not in li])})


@contextmanager
def crowd(server: TestedServer, folder: Path) -> Iterator[Crowd]:
    """A crowd at work on a migrated server."""
    made = Crowd(server, folder)
    try:
        made.open()
        yield made
    finally:
        made.close()
