"""Actors: AsyncNodes that listen and call, and buses; one of each comes and goes."""

import asyncio
from datetime import timedelta

from psqlmessages import AsyncNode, AsyncPubSub, PubSub
from psqlmessages.exceptions import ServerUnreachable
from tests.reliability.soak.acting import Actor

PATIENCE = timedelta(seconds=30)
LONG = "y" * 20_000


def main() -> None:
    actor = Actor()
    actor.begin(
        lambda: asyncio.run(nodes(actor)),
        lambda: threads_bus(actor),
        lambda: asyncio.run(tasks_bus(actor)),
    )
    actor.run()


async def nodes(actor: Actor) -> None:
    """Five that stay; another comes and goes."""
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(stay(actor, f"ASYNC.{number}"))
        group.create_task(come_and_go(actor))


async def stay(actor: Actor, ident: str) -> None:
    """Listen, and ask BETA now and then."""
    async with AsyncNode(ident, actor.places["user2"]) as node:
        await node.topic_listen("TALK")
        asked = asyncio.create_task(ask(actor, node))
        async for message in node.messages():
            if message.sender == "ALPHA" and message.topic == "TALK":
                actor.came(ident, message.body["number"])
        await asked


async def ask(actor: Actor, node: AsyncNode) -> None:
    """Ask BETA."""
    while not actor.over.is_set():
        await pause(actor, 1)
        if await node.call("BETA", node.ident, timeout=PATIENCE) != node.ident:
            actor.counts["doubled"] += 1
        actor.counts["calls"] += 1


async def come_and_go(actor: Actor) -> None:
    """Register, listen, leave."""
    while not actor.over.is_set():
        try:
            await visit(actor)
        except ServerUnreachable:
            # A first connection is not tried twice; a busy machine may need longer.
            actor.counts["visits in vain"] += 1


async def visit(actor: Actor) -> None:
    """Come and go once."""
    async with AsyncNode("ASYNC.GUEST", actor.places["user2"]) as node:
        await node.topic_listen("TALK")
        async for message in node.messages(timeout=timedelta(seconds=2)):
            if message.topic == "TALK":
                break
    actor.counts["visits"] += 1


def threads_bus(actor: Actor) -> None:
    """Publish and hear by a bus for threads; payloads of many segments among them."""
    with PubSub(actor.places["user1"]) as bus:
        bus.on("soak.a", lambda event: actor.came("bus a", event.payload["number"]))
        bus.subscribe("soak.a")
        for number in actor.every(0.1):
            bus.publish("soak.a", {"number": number, "text": LONG if number % 10 == 0 else ""})
            if number % 10 == 0:
                bus.subscribe("soak.now and then")
                bus.unsubscribe("soak.now and then")


async def tasks_bus(actor: Actor) -> None:
    """Publish and hear by a bus for tasks."""
    async with AsyncPubSub(actor.places["user2"]) as bus:
        bus.on("soak.b", lambda event: actor.came("bus b", event.payload))
        await bus.subscribe("soak.b")
        number = 0
        while not actor.over.is_set():
            await pause(actor, 0.1)
            number += 1
            await bus.publish("soak.b", number)


async def pause(actor: Actor, seconds: float) -> None:
    """Wait until the next one is due, or the soak is over."""
    await asyncio.to_thread(actor.over.wait, seconds)


if __name__ == "__main__":
    main()
