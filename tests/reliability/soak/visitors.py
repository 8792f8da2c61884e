"""Actors: users of the site: WebSockets that stay, that come and go, and calls of the REST API."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.reliability.soak.acting import Actor
from tests.reliability.soak.tally import InOrder, Outstanding

NOT_FOUND, BUSY, NOTHING_CAME = 404, 503, 504
TRY_AGAIN_LATER = 1013


def main() -> None:
    actor = Actor()
    rest = Outstanding("rest", actor.counts)
    actor.begin(
        lambda: asyncio.run(sockets(actor)),
        lambda: push(actor, rest),
        lambda: take(actor, rest),
    )
    actor.run(left=lambda: rest.left)


async def sockets(actor: Actor) -> None:
    """Six that stay; another comes and goes."""
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(stay(actor, f"web.{number}"))
        group.create_task(come_and_go(actor))


def opened(actor: Actor) -> connect:
    """A WebSocket by a token."""
    return connect(
        f"ws://127.0.0.1:{actor.places['port']}/ws/node/",
        additional_headers={"Authorization": f"Bearer {actor.places['socket token']}"},
        compression=None, proxy=None, open_timeout=60,
    )  # fmt: skip


async def ask(socket: ClientConnection, **fields: Any) -> None:
    """Ask for an operation; its answer is found among what comes."""
    await socket.send(json.dumps(fields))


async def stay(actor: Actor, ident: str) -> None:
    """Listen to TALK, and send to ROOM what comes back to itself."""
    while not actor.drained.is_set():
        # What comes while it is away is lost, which is no fault: it counts anew.
        actor.senders[ident], actor.senders[f"{ident} to ROOM"] = InOrder(), InOrder()
        with told_to_try_later(actor):
            await stay_once(actor, ident)


async def stay_once(actor: Actor, ident: str) -> None:
    """Do it until the WebSocket is closed."""
    numbers = count(1)
    async with opened(actor) as socket:
        await ask(socket, op="init", ident=ident)
        await ask(socket, op="topic_listen", topic="TALK")
        await ask(socket, op="topic_notify", topic="ROOM")
        await ask(socket, op="topic_listen", topic="ROOM")
        async for frame in socket:
            told = json.loads(frame)
            if told.get("Err", "0") != "0":
                raise AssertionError(told)
            if told.get("To") == "TALK" and told["From"] == "ALPHA":
                number = json.loads(told["Body"])["number"]
                actor.came(ident, number)
                if number % 20 == 0:
                    await ask(socket, op="topic_send", topic="ROOM", body=str(next(numbers)))
            elif told.get("To") == "ROOM" and told["From"] == ident:
                actor.came(f"{ident} to ROOM", int(told["Body"]))


async def come_and_go(actor: Actor) -> None:
    """Come in, listen, and break off or leave."""
    while not actor.over.is_set():
        with told_to_try_later(actor):
            await visit(actor)


async def visit(actor: Actor) -> None:
    """Come, and break off or leave."""
    async with opened(actor) as socket:
        await ask(socket, op="init", ident="web.guest")
        await ask(socket, op="topic_listen", topic="TALK")
        async for frame in socket:
            if json.loads(frame).get("To") == "TALK":
                break
        actor.counts["socket visits"] += 1
        if actor.counts["socket visits"] % 2:
            socket.transport.abort()


@contextmanager
def told_to_try_later(actor: Actor) -> Iterator[None]:
    """Count that a site which was too busy to look who may be there closed a WebSocket."""
    try:
        yield
    except ConnectionClosed as error:
        if error.rcvd is None or error.rcvd.code != TRY_AGAIN_LATER:
            raise
        actor.counts["sockets closed by a site that was busy"] += 1


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


def push(actor: Actor, rest: Outstanding) -> None:
    """Push by REST."""
    for number in actor.every(0.5):
        rest.push(number)
        call(actor, "POST", f"q/default/rest?key={number}", str(number).encode())


def take(actor: Actor, rest: Outstanding) -> None:
    """Reserve by REST, waiting for what comes, and commit."""
    while not actor.drained.is_set():
        status, body, headers = call(
            actor, "GET", "q/default/rest?to=5&reserve=1&duration=10", fine=(NOTHING_CAME,)
        )
        if status != NOTHING_CAME:
            call(actor, "PATCH", f"q/default/rest/commit/{headers['x-ks-lease']}")
            rest.done(int(body))


if __name__ == "__main__":
    main()
