"""Questions to a node that has gone and come back: it is the one there now that is asked."""

import asyncio
from collections.abc import Callable

import pytest

from psqlmessages import AsyncNode, Node
from psqlmessages.client.questions import Pending
from psqlmessages.exceptions import CalleeGone
from tests.client.test_node import SOON
from tests.client.test_rpc import running
from tests.conftest import TestedServer


def come_and_go(server: TestedServer, times: int) -> None:
    """Be there as NODE2 so many times, and go."""
    for _ in range(times):
        with Node("NODE2", server.url("user2")):
            pass


def echoing(server: TestedServer) -> Node:
    """NODE2, not yet there, which answers what it is asked."""
    node = Node("NODE2", server.url("user2"))
    node.on_rpc(lambda message: message.body)
    return node


@pytest.mark.parametrize("times", [1, 3])
def test_a_node_that_was_away_before_the_question_answers_it(
    node1: Node, server: TestedServer, times: int
) -> None:
    come_and_go(server, times)
    with echoing(server) as node2, running(node2):
        # Nobody has read yet what NODE1 was told of those before.
        assert node1.call("NODE2", "x", timeout=SOON) == "x"


def test_a_node_that_was_away_while_the_loop_did_something_else_answers(
    server: TestedServer, new_async_node: Callable[..., AsyncNode]
) -> None:
    async def test() -> None:
        async with new_async_node("NODE1") as node1:
            come_and_go(server, 1)
            with echoing(server) as node2, running(node2):
                assert await node1.call("NODE2", "x", timeout=SOON) == "x"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("before", "after", "is_over"),
    [
        ("", "", False),
        ("crash connect", "", False),
        ("disconnect", "", True),
        ("connect crash", "", True),
        ("", "crash", True),
        ("crash connect", "disconnect connect", True),
        ("", "connect", False),
    ],
)
def test_the_last_word_before_the_question_and_any_after_it_count(
    before: str, after: str, is_over: bool
) -> None:
    pending = Pending("token", "NODE2", lambda: None)
    for event in before.split():
        pending.heard(event)
    pending.was_put()
    for event in after.split():
        pending.heard(event)
    assert [type(answer) for answer in pending.answers] == [CalleeGone] * is_over
