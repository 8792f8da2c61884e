"""What a node is told late of what it had done before does not undo what it has done since."""

import asyncio
from collections.abc import Callable

import psycopg
import pytest

from psqlmessages import AsyncNode, Node
from tests.client.test_reconnect import QUICK, EndBackend, end_backend, next_event, node

__all__ = ["end_backend", "node"]


def flip_rules(owner: psycopg.Connection) -> None:
    """Take all rules for ORDERS away, and give them back."""
    owner.execute("UPDATE messages.auth SET dest = 'NOTHING' WHERE dest = 'ORDERS'")
    owner.execute("UPDATE messages.auth SET dest = 'ORDERS' WHERE dest = 'NOTHING'")


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_rule_ended_and_the_node_began_anew_comes_back_with_the_connection(
    node: Node, node2: Node, owner: psycopg.Connection, end_backend: EndBackend, times: int
) -> None:
    node.topic_listen("ORDERS")
    for _ in range(times):
        flip_rules(owner)
        # It has not read yet that the first one was ended.
        node.topic_listen("ORDERS")
    end_backend("NODE1")
    next_event(node, "reconnected")
    assert node2.topic_status("ORDERS").listeners == ("NODE1",)


def test_asyncio_keeps_what_it_began_anew_as_well(
    new_async_node: Callable[..., AsyncNode],
    node2: Node,
    owner: psycopg.Connection,
    end_backend: EndBackend,
) -> None:
    async def test() -> None:
        async with new_async_node("NODE1", QUICK) as node1:
            await node1.topic_listen("ORDERS")
            flip_rules(owner)
            await node1.topic_listen("ORDERS")
            end_backend("NODE1")
            async for message in node1.messages():
                if message.event == "reconnected":
                    break
            assert node2.topic_status("ORDERS").listeners == ("NODE1",)

    asyncio.run(test())


def test_what_a_rule_ended_stays_ended(
    node: Node, node2: Node, owner: psycopg.Connection, end_backend: EndBackend
) -> None:
    node.topic_listen("ORDERS")
    flip_rules(owner)
    node.topic_notify("ORDERS.A")
    end_backend("NODE1")
    next_event(node, "reconnected")
    assert node2.topic_status("ORDERS").listeners == ()
    assert node2.topic_status("ORDERS.A").notifiers == ("NODE1",)
