"""A crowd: everything that talks to one PostgreSQL, and what each of it heard."""

import asyncio
import re
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import dj_database_url
import psycopg
from django.contrib.auth.models import User

from psqlmessages import AsyncNode, Node, PubSub
from psqlmessages.exchanges.store import definitions, repository
from psqlmessages.models import WebIdentity
from psqlmessages.relay.frames import HubMessage
from psqlmessages.rest.auth import token_for
from tests.conftest import TestedServer
from tests.django.processes import start
from tests.exchanges.conftest import namespace
from tests.reliability.faults import LONG, until
from tests.web.receivers import ok, opened
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
# Lines about progress, not about problems.
PROGRESS = ("handled ", "routed ", "running ", "worker has ")


class Listeners:
    """Nodes in threads, in asyncio and in a hub; `heard`: who, what, whose event, and when."""

    def __init__(
        self, url: str, *, sync: Sequence[str] = (), asynchronous: Sequence[str] = (),
        web: Sequence[str] = (), topic: str | None = None,
    ) -> None:  # fmt: skip
        self.idents = [*sync, *asynchronous, *web]
        self.heard: list[tuple[str, str, str | None, float]] = []
        self.nodes = [Node(ident, url) for ident in sync]
        self._async_nodes = [AsyncNode(ident, url) for ident in asynchronous]
        self._url, self._web, self._topic = url, web, topic
        self._is_open, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()))

    def open(self) -> None:
        self._thread.start()
        assert self._is_open.wait(LONG)

    def close(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(LONG)

    def counts(self, what: object) -> Counter[str]:
        """How often each listener heard an event or a body."""
        return Counter(listener for listener, heard, *_ in self.heard if heard == str(what))

    def crashes(self) -> Counter[tuple[str, str | None]]:
        return Counter((who, ident) for who, what, ident, _ in self.heard if what == "crash")

    def wait_for_crashes(self, number: int) -> float:
        """Wait until this many crashes were heard by all together; return the time of the last."""
        until(lambda: self.crashes().total() >= number)
        return max(at for _, what, _, at in self.heard if what == "crash")

    async def _listen(self) -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            try:
                await self._open_all(stack, tasks)
                self._is_open.set()
                await asyncio.to_thread(self._is_over.wait)
            finally:
                for each in (*self.nodes, *self._async_nodes):
                    each.stop()

    async def _open_all(self, stack: AsyncExitStack, tasks: asyncio.TaskGroup) -> None:
        for node in self.nodes:
            stack.enter_context(node)
            if self._topic:
                node.topic_listen(self._topic)
            stack.callback(self._reading(node).join, LONG)
        for other in self._async_nodes:
            await stack.enter_async_context(other)
            if self._topic:
                await other.topic_listen(self._topic)
            tasks.create_task(self._read_async(other))
        if self._web:
            hub = await stack.enter_async_context(opened(self._url))
            for ident in self._web:
                receiver = self._receiver(ident)
                await ok(hub.init(ident, receiver))
                if self._topic:
                    await ok(hub.run(ident, receiver, "topic_listen", self._topic))

    def _hear(self, who: str, event: str | None, body: object, ident: str | None) -> None:
        self.heard.append((who, str(event or body), ident if event else None, monotonic()))

    def _reading(self, node: Node) -> threading.Thread:
        def read() -> None:
            for message in node.messages():
                self._hear(node.ident, message.event, message.body, message.ident)

        thread = threading.Thread(target=read)
        thread.start()
        return thread

    async def _read_async(self, node: AsyncNode) -> None:
        async for message in node.messages():
            self._hear(node.ident, message.event, message.body, message.ident)

    def _receiver(self, who: str) -> SimpleNamespace:
        def deliver(frame: HubMessage) -> None:
            self._hear(who, frame.header.get("Evt"), frame.body, frame.header.get("Ident"))

        return SimpleNamespace(deliver=deliver)


class Process:
    """A command that runs; `said`: the lines that are not about progress."""

    def __init__(self, server: TestedServer, *arguments: str) -> None:
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115 - closed with the process
        self._process = start(server, "psqlmessages", *arguments, stderr=self._log)
        self.pid = self._process.pid
        until(lambda: any(line.startswith(PROGRESS) for line in self._lines()))

    def _lines(self) -> list[str]:
        if not self._log.closed:
            self._log.seek(0)
            self._read = self._log.read().splitlines()
        return self._read

    @property
    def said(self) -> list[str]:
        return [line for line in self._lines() if not line.startswith(PROGRESS)]

    def close(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()
        self._lines()
        self._log.close()


def write_exchange(server: TestedServer, name: str, definition: Mapping[str, Any]) -> None:
    """Store an exchange in the database of a server of a test's own."""
    (exchange,) = definitions.parse_document({"exchanges": {name: definition}})
    with namespace("own", **dj_database_url.parse(server.url())):
        repository.store(exchange, replace=True, using="own")


class Crowd:
    """Nodes of all kinds, a bus, a process of handlers, an exchange and a site."""

    def __init__(self, server: TestedServer, folder: Path) -> None:
        self.server, url = server, server.url()
        self.listeners = Listeners(url, sync=SYNC, asynchronous=ASYNC, web=WEB, topic="T")
        self.bus = PubSub(url)
        self.site = Site(server, folder, {})
        self._owner(RULES)
        self._token = self.write_definitions()
        self.processes: dict[str, Process] = {}

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

    def open(self) -> None:
        """Start all, one process after the other, and wait until they are registered."""
        self.site.start()
        for arguments in (("run", "worker"), ("exchange", "run")):
            self.processes[" ".join(arguments)] = Process(self.server, *arguments)
        self.bus.subscribe("A")
        self._of_bus = Counter[str]()
        self.bus.on("A", lambda event: self._of_bus.update([event.payload]))
        self.listeners.open()
        self.wait_for_registration()
        for topic in ("T", "ORDERS"):
            self.listeners.nodes[0].topic_notify(topic)

    def close(self) -> None:
        self.listeners.close()
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
        """Use everything once, and wait until each listener has heard the word once."""
        sender = self.listeners.nodes[0]
        sender.topic_send("T", word)
        until(lambda: self.listeners.counts(word) == dict.fromkeys(LISTENERS, 1))
        sender.topic_send("ORDERS", word)
        until(lambda: self.bus.is_healthy)
        self.bus.publish("A", word)
        until(lambda: self._of_bus[word] == 1)
        assert self.post(word) == 201
        assert self.site.get("/healthz")[0] == 200
        until(lambda: word in self._owner(BODIES)[0])
        handled = "SELECT count(*) FROM auth_group WHERE name = %s"
        until(lambda: self._owner(handled, [word]) == (1,))
        self._owner("SELECT messages.drain('wanda', 'shipped')")

    def post(self, body: str) -> int:
        """Push by the REST API; return the status."""
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
        """How many lines the processes have written, and the site besides its requests."""
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
