"""The soak's actors: each is a process of its own with several threads, and counts what comes.

python -m tests.reliability.soak.actors NAME
"""

import asyncio
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import psycopg
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from psqlmessages import AsyncNode, AsyncPubSub, Message, Node, PubSub
from psqlmessages.exceptions import (
    MessagesError,
    NoListeners,
    ServerUnreachable,
    TopicNotExistent,
)
from tests.reliability.soak.acting import VARIABLE, Actor, InOrder, Outstanding, opened

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
PATIENCE = timedelta(seconds=30)
# Now and then more than a notification holds.
LARGE = "x" * 20_000


# Nodes that send, call and listen; one whose right comes and goes


def nodes() -> None:  # noqa: C901 - its threads are functions within it
    actor = Actor()
    alpha, beta, xray = (
        actor.node(ident, role)
        for ident, role in (("ALPHA", "user1"), ("BETA", "user2"), ("XRAY", "user3"))
    )
    for topic in ("TALK", "CHANGING"):
        alpha.topic_notify(topic)
    beta.topic_listen("TALK")
    beta.on_rpc(lambda message: message.body)

    def talked(message: Message) -> None:
        if message.sender == "ALPHA":
            actor.came("ALPHA", message.body["number"])

    def crashed(message: Message) -> None:
        # WebSockets break off, too.
        actor.counts["crashes heard"] += message.ident.startswith("MORTAL.")

    def send() -> None:
        for number in actor.every(0.05):
            # Counted before: the soak may end while it is sent.
            actor.counts["sent"] = number
            text = "small" if number % 20 else LARGE
            alpha.topic_send("TALK", {"number": number, "text": text})
            if number % 10 == 0:
                with suppress(NoListeners):
                    alpha.topic_send("CHANGING", number)

    def call() -> None:
        for number in actor.every(0.2):
            question = number if number % 10 else LARGE
            actor.counts["doubled"] += alpha.call("BETA", question, timeout=PATIENCE) != question
            actor.counts["calls"] += 1

    def listen_again() -> None:
        for _ in actor.every(0.3):
            try:
                actor.counts["listened again"] += xray.topic_listen("CHANGING")
            except MessagesError as error:
                if error.number not in (2, 3, 9):
                    raise
                actor.counts["refused"] += 1

    beta.on_topic("TALK")(talked)
    beta.on_event("crash")(crashed)
    actor.begin(send, call, beta.run, partial(pass_over, alpha), partial(pass_over, xray),
                listen_again)  # fmt: skip
    actor.run(left=lambda: actor.counts["sent"] - actor.senders["ALPHA"].came)


def pass_over(node: Node) -> None:
    """Take what comes, and count nothing."""
    for _ in node.messages():
        pass


# AsyncNodes that listen and call, and buses; one of each comes and goes


def crowd() -> None:  # noqa: C901 - its threads are functions within it
    actor = Actor()

    async def stay(ident: str) -> None:
        async with AsyncNode(ident, actor.places["user2"]) as node:
            await node.topic_listen("TALK")
            asked = asyncio.create_task(ask(node))
            async for message in node.messages():
                if message.sender == "ALPHA" and message.topic == "TALK":
                    actor.came(ident, message.body["number"])
            await asked

    async def ask(node: AsyncNode) -> None:
        while not actor.over.is_set():
            await pause(1)
            answer = await node.call("BETA", node.ident, timeout=PATIENCE)
            actor.counts["doubled"] += answer != node.ident
            actor.counts["calls"] += 1

    async def come_and_go() -> None:
        while not actor.over.is_set():
            # A first connection is not tried twice; a busy machine may need longer.
            with suppress(ServerUnreachable):
                async with AsyncNode("ASYNC.GUEST", actor.places["user2"]) as node:
                    await node.topic_listen("TALK")
                    async for message in node.messages(timeout=2 * SECOND):
                        if message.topic == "TALK":
                            break
                actor.counts["visits"] += 1

    async def all_nodes() -> None:
        await asyncio.gather(come_and_go(), *(stay(f"ASYNC.{number}") for number in range(5)))

    async def pause(seconds: float) -> None:
        await asyncio.to_thread(actor.over.wait, seconds)

    def threads_bus() -> None:
        with PubSub(actor.places["user1"]) as bus:
            bus.on("soak.a", lambda event: actor.came("bus a", event.payload["number"]))
            bus.subscribe("soak.a")
            for number in actor.every(0.1):
                bus.publish("soak.a", {"number": number, "text": "" if number % 10 else LARGE})
                if number % 10 == 0:
                    bus.subscribe("soak.now and then")
                    bus.unsubscribe("soak.now and then")

    async def tasks_bus() -> None:
        async with AsyncPubSub(actor.places["user2"]) as bus:
            bus.on("soak.b", lambda event: actor.came("bus b", event.payload))
            await bus.subscribe("soak.b")
            for number in count(1):
                if actor.over.is_set():
                    return
                await pause(0.1)
                await bus.publish("soak.b", number)

    actor.begin(
        lambda: asyncio.run(all_nodes()), threads_bus, lambda: asyncio.run(tasks_bus())
    )  # fmt: skip
    actor.run()


# Queues with keys, leases that run out and dead letters, and what exchanges move


def queues() -> None:  # noqa: C901 - its threads are functions within it
    actor = Actor()
    jobs, doomed, *copies = (
        Outstanding(name, actor.counts) for name in ("jobs", "doomed", "copies.a", "copies.b")
    )
    worker, clerk = actor.node("WORKER", "user2"), actor.node("CLERK", "user2")
    shop = actor.node("SHOP", "user1")

    def push() -> None:
        """Push with a key, some of them twice; every tenth fails at each try."""
        for number in actor.every(0.1):
            is_doomed = number % 10 == 0
            (doomed if is_doomed else jobs).push(number)
            for _ in range(1 + (number % 5 == 0)):
                shop.push("jobs", {"number": number, "doomed": is_doomed}, key=f"job {number}")

    def push_orders() -> None:
        """Push what an exchange copies to two queues, many at once and with delays."""
        for turn in actor.every(1):
            numbers = list(range(10 * turn, 10 * turn + 10))
            for number in numbers:
                for copy in copies:
                    copy.push(number)
            shop.push_many("orders", numbers, delay=None if turn % 5 else SECOND)

    def work() -> None:
        while True:
            for element in worker.reserve("jobs", 5, 30 * SECOND, timeout=timedelta.max):
                if element.body["doomed"]:
                    worker.rollback(element, delay=SECOND / 10)
                elif worker.commit(element):
                    jobs.done(element.body["number"])
                actor.counts["tries"] += 1

    def dawdle() -> None:
        """Reserve by a node that comes and goes, and do nothing: the lease runs out."""
        for _ in actor.every(2):
            with closing(opened("DAWDLER", actor.places["user2"])) as node:
                actor.counts["leases that ran out"] += len(node.reserve("jobs", 1, SECOND))

    def take(node: Node, queue: str, tally: Outstanding) -> None:
        while True:
            for element in node.pop(queue, 10, timeout=timedelta.max):
                tally.done(element.body["number"] if queue == "dead" else element.body)

    actor.begin(
        push, push_orders, work, dawdle, partial(take, worker, "dead", doomed),
        *(partial(take, clerk, copy.name, copy) for copy in copies),
    )  # fmt: skip
    actor.run(left=lambda: sum(each.left for each in (jobs, doomed, *copies)))


# A publisher, a reader, and short-lived subscriptions of short-lived topics


def streams() -> None:  # noqa: C901 - its threads are functions within it
    actor = Actor()
    publisher, reader = actor.node("PUB", "user1"), actor.node("READER", "user2")
    messages = reader.subscribe("LEDGER", timeout=10 * MINUTE, max_rows=50)

    def publish() -> None:
        number = 0
        for turn in actor.every(0.1):
            size = 1 if turn % 10 else 20
            bodies = [{"number": number + n, "text": "z" * 300} for n in range(1, size + 1)]
            number += size
            # Counted before: the soak may end while it is published.
            actor.counts["published"] = number
            publisher.publish_many("LEDGER", bodies)

    def read() -> None:
        for message in messages:
            actor.came("LEDGER", message.body["number"])

    def pass_by() -> None:
        for number in actor.every(1):
            # A busy machine may let it be removed before it was subscribed to, as nobody's.
            with suppress(TopicNotExistent):
                pass_one_by(f"TEMP.{number}", is_left=number % 2 == 0)

    def pass_one_by(topic: str, *, is_left: bool) -> None:
        """Subscribe to a topic of the moment, read what came, and leave it to time out."""
        with (
            closing(opened("TEMPPUB", actor.places["user1"])) as publisher,
            closing(opened("PASSER", actor.places["user2"])) as reader,
        ):
            publisher.publish(topic, "that there is the topic")
            # It ends where a busy machine let the subscription time out before it was read.
            found = reader.subscribe(topic, timeout=2 * SECOND, max_rows=10, idle=5 * SECOND)
            publisher.publish_many(topic, list(range(20)))
            for place, message in enumerate(found):
                if message.body != place and reader.subscription(topic).is_recovered:
                    actor.counts["lost"] += 1
                if place == 19:
                    break
            if not is_left:
                reader.unsubscribe(topic)
        actor.counts["short subscriptions"] += 1

    actor.begin(publish, read, pass_by)
    actor.run(left=lambda: actor.counts["published"] - actor.senders["LEDGER"].came)


# Users of the site: WebSockets that stay, that come and go, and calls of the REST API

BUSY, NOTHING_CAME, NOT_FOUND, TRY_AGAIN_LATER = 503, 504, 404, 1013


def visitors() -> None:  # noqa: C901, PLR0915 - as above
    actor = Actor()
    rest = Outstanding("rest", actor.counts)

    async def ask(socket: ClientConnection, **fields: Any) -> None:
        await socket.send(json.dumps(fields))

    async def stay(ident: str) -> None:
        """Listen to TALK, and send to ROOM what comes back to itself."""
        numbers = count(1)
        # What comes while it is away is lost, which is no fault: it counts anew.
        actor.senders[ident], actor.senders[f"{ident} to ROOM"] = InOrder(), InOrder()
        async with socket_of(actor) as socket:
            await ask(socket, op="init", ident=ident)
            await ask(socket, op="topic_listen", topic="TALK")
            await ask(socket, op="topic_notify", topic="ROOM")
            await ask(socket, op="topic_listen", topic="ROOM")
            async for frame in socket:
                told = json.loads(frame)
                assert told.get("Err", "0") == "0", told
                if told.get("To") == "TALK" and told["From"] == "ALPHA":
                    number = json.loads(told["Body"])["number"]
                    actor.came(ident, number)
                    if number % 20 == 0:
                        await ask(socket, op="topic_send", topic="ROOM", body=str(next(numbers)))
                elif told.get("To") == "ROOM" and told["From"] == ident:
                    actor.came(f"{ident} to ROOM", int(told["Body"]))

    async def visit() -> None:
        """Come, and break off or leave."""
        async with socket_of(actor) as socket:
            await ask(socket, op="init", ident="web.guest")
            await ask(socket, op="topic_listen", topic="TALK")
            async for frame in socket:
                if json.loads(frame).get("To") == "TALK":
                    break
            actor.counts["socket visits"] += 1
            if actor.counts["socket visits"] % 2:
                socket.transport.abort()

    async def again(act: Any, over: threading.Event) -> None:
        while not over.is_set():
            try:
                await act()
            except ConnectionClosed as error:
                if error.rcvd is None or error.rcvd.code != TRY_AGAIN_LATER:
                    raise
                actor.counts["sockets closed by a site that was busy"] += 1

    async def sockets() -> None:
        staying = (again(partial(stay, f"web.{number}"), actor.drained) for number in range(6))
        await asyncio.gather(again(visit, actor.over), *staying)

    def push() -> None:
        for number in actor.every(0.5):
            rest.push(number)
            call(actor, "POST", f"q/default/rest?key={number}", str(number).encode())

    def take() -> None:
        """Reserve, waiting for what comes, and commit."""
        while not actor.drained.is_set():
            path = "q/default/rest?to=5&reserve=1&duration=10"
            status, body, headers = call(actor, "GET", path, fine=(NOTHING_CAME,))
            if status != NOTHING_CAME:
                call(actor, "PATCH", f"q/default/rest/commit/{headers['x-ks-lease']}")
                rest.done(int(body))

    actor.begin(lambda: asyncio.run(sockets()), push, take)
    actor.run(left=lambda: rest.left)


def socket_of(actor: Actor) -> connect:
    """A WebSocket by a token."""
    return connect(
        f"ws://127.0.0.1:{actor.places['port']}/ws/node/",
        additional_headers={"Authorization": f"Bearer {actor.places['socket token']}"},
        compression=None, proxy=None, open_timeout=60,
    )  # fmt: skip


def call(
    actor: Actor, method: str, path: str, body: bytes | None = None, *, fine: tuple[int, ...] = ()
) -> tuple[int, bytes, Any]:
    """Call the REST API; again, as its document says, where the server is too busy."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{actor.places['port']}/api/{path}", body, method=method,
        headers={
            "Authorization": f"Bearer {actor.places['rest token']}",
            "Content-Type": "application/json",
        },
    )  # fmt: skip
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
                return response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                if error.code in fine:
                    return error.code, b"", error.headers
                if error.code != BUSY:
                    raise
            actor.counts["calls when the site was busy"] += 1
            # What was asked may have been done: then a lease holds no more.
            fine = (*fine, NOT_FOUND)


# Changes of rules all the time: of a topic that is listened to, and of nobody's

CHANGES = (
    """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES ('user3', 'XRAY', 'Topic', 'CHANGING', 'R', 5)
    """,
    """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT 'user3', 'NOBODY', 'Topic', 'NOTHING.' || n, 'RW', 5 FROM generate_series(1, 50) AS n
    """,
    "DELETE FROM messages.auth WHERE ident = 'XRAY' AND type = 'Topic'",
    "DELETE FROM messages.auth WHERE ident = 'NOBODY'",
)


def ruler() -> None:
    actor = Actor()

    def rule() -> None:
        with psycopg.connect(actor.places["owner"], autocommit=True) as connection:
            for number in actor.every(0.7):
                connection.execute(CHANGES[number % len(CHANGES)])
                actor.counts["rules changed"] += 1

    actor.begin(rule)
    actor.run()


# One that grows in every way, to show that the soak finds it


def leaker() -> None:
    actor = Actor()

    def leak() -> None:
        kept: list[object] = []
        for number in actor.every(0.3):
            connection = psycopg.connect(
                actor.places["owner"], autocommit=True, application_name="leaker"
            )
            kept += [connection, bytearray(os.urandom(1024 * 1024)), os.open("/dev/null", 0)]
            threading.Thread(target=actor.drained.wait, daemon=True).start()
            connection.execute("CREATE TABLE IF NOT EXISTS soak_leak (text text)")
            connection.execute(
                "INSERT INTO soak_leak SELECT repeat('x', 1000) FROM generate_series(1, 2000)"
            )
            connection.execute("SELECT pg_advisory_lock_shared(4711)")
            actor.counts["LISTENs"] = number
            actor.counts["lost"] = 1

    actor.begin(leak)
    actor.run()


# Those that are killed: nodes, or a reader that books what it reads in its own transaction

MORTAL_NODES = 3
BOOKS = """
    CREATE TABLE soak_books (came bigint, last bigint, lost bigint, doubled bigint);
    INSERT INTO soak_books VALUES (0, 0, 0, 0);
    GRANT SELECT, UPDATE ON soak_books TO user2
"""
READ = "SELECT payload::json ->> 'number' FROM messages.subscribe('BOOK', 'LEDGER', 600, 100)"
BOOK = """
    UPDATE soak_books SET came = came + %(came)s, last = %(last)s,
        lost = lost + %(lost)s, doubled = doubled + %(doubled)s
"""


def mortal_nodes() -> None:
    places = json.loads(os.environ[VARIABLE])
    alive = [opened(f"MORTAL.{number}", places["user3"]) for number in range(MORTAL_NODES)]
    for node in alive:
        node.topic_listen("TALK")
        node.topic_notify("TALK")
    print("alive", flush=True)
    pass_over(alive[0])


def mortal_reader() -> None:
    url = json.loads(os.environ[VARIABLE])["user2"]
    with (
        psycopg.connect(url, autocommit=True) as connection,
        closing(opened("BOOK", url)) as node,
    ):
        print("alive", flush=True)
        while True:
            with connection.transaction():
                found = connection.execute("SELECT last FROM soak_books FOR UPDATE").fetchone()
                last = found[0]
                numbers = [int(number) for (number,) in connection.execute(READ)]
                entry = {"came": len(numbers), "lost": 0, "doubled": 0}
                for number in numbers:
                    entry["doubled"] += number <= last
                    entry["lost"] += max(0, number - last - 1)
                    last = max(last, number)
                if numbers:
                    connection.execute(BOOK, {**entry, "last": last})
            if not numbers:
                node.wait_published("LEDGER")


ACTORS = {
    act.__name__: act for act in (streams, nodes, crowd, queues, visitors, ruler)
}  # fmt: skip
OTHERS = {"leaker": leaker, "mortal nodes": mortal_nodes, "mortal reader": mortal_reader}

if __name__ == "__main__":
    (ACTORS | OTHERS)[sys.argv[1]]()
