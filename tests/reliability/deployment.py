"""A deployment: clients of all kinds on one PostgreSQL, which record the messages they receive."""

import asyncio
import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from tests.reliability.faults import TIMEOUT_SECONDS, until
from tests.rest.callers import Caller
from tests.web.receivers import ok, opened
from tests.web.site import Site

SYNC, ASYNC, WEB = (
    [f"{kind}.{number}" for number in range(10)] for kind in ("SYNC", "ASYNC", "WEB")
)
LISTENERS = [*SYNC, *ASYNC, *WEB]
IDENTS = sorted([*LISTENERS, "worker"])
RULES = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT current_user, ident, type, dest, mode, 60 FROM (VALUES
        ('SYNC.*', 'Topic', 'T', 'RW'), ('ASYNC.*', 'Topic', 'T', 'RW'),
        ('WEB.*', 'Topic', 'T', 'RW'), ('SYNC.*', 'Topic', 'ORDERS', 'W'),
        ('worker', 'Topic', 'ORDERS', 'R'), ('wanda', 'Queue', '*', 'RW'),
        ('exchange.*', 'Queue', '*', 'RW')) AS v (ident, type, dest, mode)
"""
DEFAULT = {"ns": "default"}
EXCHANGE = {"src": DEFAULT | {"queue": "orders"}, "dst": [DEFAULT | {"queue": "shipped"}]}
# The registered nodes, and the listening nodes: each node has one row.
REGISTERED = """
    SELECT ARRAY(SELECT ident FROM psqlmessages_client WHERE ident = ANY (%(idents)s) ORDER BY 1),
           ARRAY(SELECT ident FROM messages.topics, unnest(listeners) AS ident
                 WHERE ident = ANY (%(idents)s) AND topic IN ('T', 'ORDERS') ORDER BY 1)
"""
SHIPPED = """
    SELECT coalesce(array_agg(e.body ORDER BY e.id), '{}') FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'shipped'
"""
# Log lines that report no problem begin with one of these.
PROGRESS = ("handled ", "routed ", "running ", "worker has ")
OF_PSYCOPG = "error ignored terminating "


class Received(NamedTuple):
    """An event or a body that a listener received; ``ident``: the node that the event is about."""

    listener: str
    content: str
    ident: str | None
    at: float


class Listeners:
    def __init__(
        self, url: str, *, sync: Sequence[str] = (), asynchronous: Sequence[str] = (),
        web: Sequence[str] = (), topic: str | None = None,
    ) -> None:  # fmt: skip
        self.idents = [*sync, *asynchronous, *web]
        self.received: list[Received] = []
        self.nodes = [Node(ident, url) for ident in sync]
        self._async_nodes = [AsyncNode(ident, url) for ident in asynchronous]
        self._url, self._web, self._topic = url, web, topic
        self._is_open, self._must_close = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()))

    def open(self) -> None:
        self._thread.start()
        assert self._is_open.wait(TIMEOUT_SECONDS)

    def close(self) -> None:
        self._must_close.set()
        if self._thread.ident is not None:
            self._thread.join(TIMEOUT_SECONDS)

    def counts(self, content: object) -> Counter[str]:
        return Counter(each.listener for each in self.received if each.content == str(content))

    def crashes(self) -> Counter[tuple[str, str | None]]:
        return Counter((e.listener, e.ident) for e in self.received if e.content == "crash")

    def wait_for_crashes(self, number: int) -> float:
        """Wait for this number of crash events in all; return the time of the last one."""
        until(lambda: self.crashes().total() >= number)
        return max(each.at for each in self.received if each.content == "crash")

    async def _listen(self) -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            try:
                await self._open_all(stack, tasks)
                self._is_open.set()
                await asyncio.to_thread(self._must_close.wait)
            finally:
                for each in (*self.nodes, *self._async_nodes):
                    each.stop()

    async def _open_all(self, stack: AsyncExitStack, tasks: asyncio.TaskGroup) -> None:
        for node in self.nodes:
            stack.enter_context(node)
            if self._topic:
                node.topic_listen(self._topic)
            thread = threading.Thread(target=self._read, args=(node,))
            thread.start()
            stack.callback(thread.join, TIMEOUT_SECONDS)
        for other in self._async_nodes:
            await stack.enter_async_context(other)
            if self._topic:
                await other.topic_listen(self._topic)
            tasks.create_task(self._read_async(other))
        if self._web:
            hub = await stack.enter_async_context(opened(self._url))
            for ident in self._web:
                receiver = SimpleNamespace(deliver=partial(self._record_frame, ident))
                await ok(hub.init(ident, receiver))
                if self._topic:
                    await ok(hub.run(ident, receiver, "topic_listen", self._topic))

    def _record(self, listener: str, event: str | None, body: object, ident: str | None) -> None:
        content = str(event or body)
        self.received.append(Received(listener, content, ident if event else None, monotonic()))

    def _record_frame(self, listener: str, frame: HubMessage) -> None:
        header = frame.header
        self._record(listener, header.get("Evt"), frame.body, header.get("Ident"))

    def _read(self, node: Node) -> None:
        for message in node.messages():
            self._record(node.ident, message.event, message.body, message.ident)

    async def _read_async(self, node: AsyncNode) -> None:
        async for message in node.messages():
            self._record(node.ident, message.event, message.body, message.ident)


class CommandProcess:
    def __init__(self, server: TestedServer, *arguments: str) -> None:
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115 - closed with the process
        self._process = start(server, "psqlmessages", *arguments, stderr=self._log)
        self.pid = self._process.pid
        until(lambda: any(line.startswith(PROGRESS) for line in self._read_log()))

    def _read_log(self) -> list[str]:
        if not self._log.closed:
            self._log.seek(0)
            self._lines = self._log.read().splitlines()
        return self._lines

    @property
    def problems(self) -> list[str]:
        """The log lines that are neither about progress nor psycopg's own."""
        return [line for line in self._read_log() if not line.startswith((*PROGRESS, OF_PSYCOPG))]

    def close(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()
        self._read_log()
        self._log.close()


def write_exchange(server: TestedServer, name: str, definition: Mapping[str, Any]) -> None:
    (exchange,) = definitions.parse_document({"exchanges": {name: definition}})
    with namespace("own", **dj_database_url.parse(server.url())):
        repository.store(exchange, replace=True, using="own")


class Deployment:
    """Nodes of all kinds, a bus, a handler worker, an exchange worker and a site."""

    def __init__(self, server: TestedServer, folder: Path) -> None:
        self.server, url = server, server.url()
        self.listeners = Listeners(url, sync=SYNC, asynchronous=ASYNC, web=WEB, topic="T")
        self.bus = PubSub(url)
        self.site = Site(server, folder, {})
        self._query(RULES)
        self._token = self.write_definitions()
        self.processes: dict[str, CommandProcess] = {}

    def _query(self, statement: str, arguments: Any = None) -> Any:
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
        """Start the parts one after the other, and wait until all nodes are registered."""
        self.site.start()
        for arguments in (("run", "worker"), ("exchange", "run")):
            self.processes[" ".join(arguments)] = CommandProcess(self.server, *arguments)
        self.bus.subscribe("A")
        self._bus_payloads = Counter[str]()
        self.bus.on("A", lambda event: self._bus_payloads.update([event.payload]))
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
        """Wait until each node is registered once and listens."""

        def are_registered() -> bool:
            self._query("SELECT messages.evaluate()")
            return self._query(REGISTERED, {"idents": IDENTS}) == (IDENTS, IDENTS)

        until(are_registered)

    def use_everything(self, body: str) -> None:
        """Use each part once, and wait until each listener has received the body once."""
        sender = self.listeners.nodes[0]
        sender.topic_send("T", body)
        until(lambda: self.listeners.counts(body) == dict.fromkeys(LISTENERS, 1))
        sender.topic_send("ORDERS", body)
        until(lambda: self.bus.is_healthy)
        self.bus.publish("A", body)
        until(lambda: self._bus_payloads[body] == 1)
        assert self.post(body) == 201
        assert self.site.get("/healthz")[0] == 200
        until(lambda: body in self._query(SHIPPED)[0])
        handled = "SELECT count(*) FROM auth_group WHERE name = %s"
        until(lambda: self._query(handled, [body]) == (1,))
        self._query("SELECT messages.drain('wanda', 'shipped')")

    def post(self, body: str) -> int:
        """Push by the REST API; return the status."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "text/plain"}
        with closing(Caller(self.site, headers)) as caller:
            return caller.call("POST", "q/default/orders", body.encode()).status

    def count_problems(self) -> Counter[str]:
        """Count the log lines of each process that are not about progress or requests."""
        counts = {name: len(process.problems) for name, process in self.processes.items()}
        site_lines = self.site.log().splitlines()
        counts["site"] = sum(not re.search('"(GET|POST) ', line) for line in site_lines)
        return Counter(counts)


@contextmanager
def run_deployment(server: TestedServer, folder: Path) -> Iterator[Deployment]:
    deployment = Deployment(server, folder)
    try:
        deployment.open()
        yield deployment
    finally:
        deployment.close()
