"""A crowd: everything that talks to one PostgreSQL, and what each of it heard."""

import asyncio
import re
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

from psqlmessages import AsyncNode, Node, PubSub
from psqlmessages.exchanges.store import definitions, repository
from psqlmessages.models import WebIdentity
from psqlmessages.relay.frames import HubMessage
from psqlmessages.relay.hub import Hub
from psqlmessages.rest.auth import token_for
from tests.conftest import TestedServer
from tests.django.processes import start
from tests.exchanges.conftest import namespace
from tests.reliability.restarts import LONG, until
from tests.web.site import Site

SYNC, ASYNC, WEB = (
    [f"{kind}.{number}" for number in range(10)] for kind in ("SYNC", "ASYNC", "WEB")
)
LISTENERS = [*SYNC, *ASYNC, *WEB]
IDENTS = sorted([*LISTENERS, "worker"])
BUS = "BUS"
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT current_user, ident, type, dest, mode, 60 FROM (VALUES
        ('SYNC.*', 'Topic', 'T', 'RW'), ('ASYNC.*', 'Topic', 'T', 'RW'),
        ('WEB.*', 'Topic', 'T', 'RW'), ('SYNC.*', 'Topic', 'ORDERS', 'W'),
        ('worker', 'Topic', 'ORDERS', 'R'), ('wanda', 'Queue', '*', 'RW'),
        ('exchange.*', 'Queue', '*', 'RW')) AS v (ident, type, dest, mode)
"""
AT = {"ns": "default"}
EXCHANGE = {"src": AT | {"queue": "orders"}, "dst": [AT | {"queue": "shipped"}]}
# The idents of the crowd that are registered, and those that listen, each once.
PRESENT = """
    SELECT ARRAY(SELECT ident FROM psqlmessages_client WHERE ident = ANY (%(idents)s) ORDER BY 1),
           ARRAY(SELECT ident FROM messages.topics, unnest(listeners) AS ident
                 WHERE ident = ANY (%(idents)s) AND topic IN ('T', 'ORDERS') ORDER BY 1)
"""
BODIES = """
    SELECT coalesce(array_agg(e.body ORDER BY e.id), '{}') FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'shipped'
"""
# What a process says of how far it has come is no log.
PROGRESS = ("handled ", "routed ", "running ", "worker has ")


class Ears:
    """How often each heard what."""

    def __init__(self) -> None:
        self._heard: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def hear(self, ident: str, what: object) -> None:
        with self._lock:
            self._heard[ident, str(what)] += 1

    def counts(self, what: str) -> dict[str, int]:
        """Who heard something, and how often."""
        with self._lock:
            return {ident: times for (ident, of), times in self._heard.items() if of == what}


class Ear:
    def __init__(self, ident: str, ears: Ears) -> None:
        self._ident, self._ears = ident, ears

    def deliver(self, frame: HubMessage) -> None:
        self._ears.hear(self._ident, frame.header.get("Evt") or frame.body)


class Process:
    """A command that runs; what it says besides how far it has come."""

    def __init__(self, server: TestedServer, *arguments: str) -> None:
        self.said: list[str] = []
        self._process = start(server, "psqlmessages", *arguments)
        self.pid = self._process.pid
        self._is_up = threading.Event()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        for line in self._process.stderr:
            if line.startswith(PROGRESS):
                self._is_up.set()
            else:
                self.said.append(line.rstrip())

    def wait(self) -> None:
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
        repository.put(exchange, replace=True, using="own")


class Crowd:
    """The nodes of threads and of asyncio, a hub's, a bus, a runner, an exchange and a site."""

    def __init__(self, server: TestedServer, folder: Path) -> None:
        self.server, self.ears, url = server, Ears(), server.url()
        self.nodes = [Node(ident, url) for ident in SYNC]
        self._async_nodes = [AsyncNode(ident, url) for ident in ASYNC]
        self.bus = PubSub(url)
        self.site = Site(server, folder, {})
        self._owner(RULES)
        self._token = self.write_definitions()
        self.processes: dict[str, Process] = {}
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(node,)) for node in self.nodes]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._of_asyncio())))

    def _owner(self, statement: str, arguments: Any = None) -> Any:
        with psycopg.connect(self.server.url(), autocommit=True) as owner:
            cursor = owner.execute(statement, arguments)
            return cursor.fetchone() if cursor.description else None

    def write_definitions(self) -> str:
        """Write the exchange and the user of the site; return the user's token."""
        write_exchange(self.server, "ship", EXCHANGE)
        with namespace("own", **dj_database_url.parse(self.server.url())):
            user, _ = User.objects.using("own").get_or_create(username="wanda")
            WebIdentity.objects.using("own").get_or_create(user=user, ident="wanda")
            return token_for(user, timedelta(hours=1))

    def _read(self, node: Node) -> None:
        with node:
            node.topic_listen("T")
            node.topic_notify("T")
            for message in node.messages():
                self.ears.hear(node.ident, message.event or message.body)

    async def _of_asyncio(self) -> None:
        hub = Hub(self.server.url())
        async with asyncio.TaskGroup() as tasks:
            for node in self._async_nodes:
                tasks.create_task(self._read_async(node))
            for ident in WEB:
                ear = Ear(ident, self.ears)
                assert (await hub.init(ident, ear))["Err"] == "0"
                assert (await hub.run(ident, ear, "topic_listen", "T"))["Err"] == "0"
            await asyncio.to_thread(self._is_over.wait)
            for node in self._async_nodes:
                node.stop()
        await hub.close()

    async def _read_async(self, node: AsyncNode) -> None:
        async with node:
            await node.topic_listen("T")
            await node.topic_notify("T")
            async for message in node.messages():
                self.ears.hear(node.ident, message.event or message.body)

    def open(self) -> None:
        """Start all, one process after the other, and wait until they are registered."""
        self.site.start()
        for arguments in (("run", "worker"), ("exchange", "run")):
            process = self.processes[" ".join(arguments)] = Process(self.server, *arguments)
            process.wait()
        self.bus.subscribe("A")
        self.bus.on("A", lambda event: self.ears.hear(BUS, event.payload))
        for thread in self._threads:
            thread.start()
        self.wait_for_registration()
        self.nodes[0].topic_notify("ORDERS")

    def close(self) -> None:
        self._is_over.set()
        for node in self.nodes:
            node.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(LONG)
        self.bus.close()
        for process in self.processes.values():
            process.close()
        self.site.stop()

    def wait_for_registration(self) -> None:
        """Wait until each ident is registered once and listens."""

        def all_are() -> bool:
            self._owner("SELECT messages.evaluate()")
            return self._owner(PRESENT, {"idents": IDENTS}) == (IDENTS, IDENTS)

        until(all_are)

    def exercise(self, word: str) -> None:
        """Let everything work once more, each once."""
        self.nodes[0].topic_send("T", word)
        until(lambda: self.ears.counts(word) == dict.fromkeys(LISTENERS, 1))
        self.nodes[0].topic_send("ORDERS", word)
        until(lambda: self.bus.is_healthy)
        self.bus.publish("A", f"bus {word}")
        until(lambda: self.ears.counts(f"bus {word}") == {BUS: 1})
        assert self.post(word) == 201
        assert self.site.get("/healthz")[0] == 200
        until(lambda: word in self._owner(BODIES)[0])
        handled = "SELECT count(*) FROM auth_group WHERE name = %s"
        until(lambda: self._owner(handled, [word]) == (1,))
        self._owner("SELECT messages.drain('wanda', 'shipped')")

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
        of_site = self.site.log().splitlines()
        return Counter(said | {"site": sum(not re.search('"(GET|POST) ', li) for li in of_site)})


@contextmanager
def crowd(server: TestedServer, folder: Path) -> Iterator[Crowd]:
    made = Crowd(server, folder)
    try:
        made.open()
        yield made
    finally:
        made.close()
