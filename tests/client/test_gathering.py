"""Calls that wait at the same time: one statement for many, and for each its own result."""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from psqlmessages import AsyncNode, Element, Node, exceptions
from tests.client.nodes import QUICK, SOON, in_a_loop
from tests.sql.conftest import World

TASKS, CALLS = 20, 12
LARGE, TOO_LARGE = "x" * 9_000, "x" * 30_000
FUNCTIONS = ("send", "request", "publish", "push", "push with a key", "commit")
ELEMENTS = "SELECT id, body FROM messages.list_queued(ARRAY[%s]) ORDER BY id"
# Kills nothing if there is no connection at this moment.
KILLED = "application_name IN ('psqlmessages NODE1', 'psqlmessages NODE3')"


@pytest.fixture
def gathering(conversation: World) -> Iterator[World]:
    """NODE1 may also publish to and push to names that begin with N; bodies are limited."""
    topics = (f"user1 NODE* Topic N{n} RW 60" for n in (1, 2))
    others = (f"user1 NODE3 {right}" for right in ("Topic ORDERS RW 60", "Rpc NODE2 W 60"))
    conversation.rules(*topics, *others, "user1 NODE* Queue N* RW 60")
    conversation.execute("UPDATE messages._settings SET max_body_bytes = 20000")
    yield conversation
    conversation.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")


@dataclass
class Outcome:
    done: defaultdict[tuple[str, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    ids: dict[tuple[str, str], int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def compare(self, function: str, rows: list[tuple[int, str]]) -> None:
        """Assert that these are the calls that succeeded, once, in each task's order."""
        bodies = [body for _, body in rows]
        assert [body for body, number in Counter(bodies).items() if number > 1] == []
        in_order = [each for (name, _), each in self.done.items() if name == function]
        done = {body for each in in_order for body in each}
        assert done <= set(bodies) <= done | self.unknown
        ids = {body: id_ for id_, body in rows}
        assert all(each == sorted(each, key=ids.__getitem__) for each in in_order)
        answered = {body: id_ for (name, body), id_ in self.ids.items() if name == function}
        assert answered.items() <= ids.items()


@dataclass
class NodeOfThreads:
    """A Node whose calls run in threads, with methods of an AsyncNode."""

    node: Node

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return partial(asyncio.to_thread, getattr(self.node, function))


@dataclass
class Tasks:
    """Tasks that share nodes, of which threads use one; some of their calls are refused."""

    node: AsyncNode
    threads: NodeOfThreads
    chance: random.Random
    leases: list[Element]
    # What to do before the call of a number, while others are running.
    acts: dict[int, Callable[[], Awaitable[object]]]
    calls: int = 0
    outcome: Outcome = field(default_factory=Outcome)

    def a_call(self, function: str, text: str) -> tuple[Any, str, bool]:
        """Create a call; return its body, too, and whether it must be refused."""
        is_refused, suffix = self.chance.random() < 0.2, self.chance.choice("12")
        node: Any = self.chance.choice([self.node, self.threads])
        if function == "commit":
            element = self.leases.pop()
            return self.node.commit("no" if is_refused else element), element.body, is_refused
        if is_refused and self.chance.random() < 0.5:
            suffix = "REFUSED*"
        else:
            text += TOO_LARGE if is_refused else self.chance.choice(["", LARGE])
        if function == "send":
            call: Any = node.topic_send("ORDERS" if len(suffix) == 1 else suffix, text)
        elif function == "request":
            call = node.rpc("NODE2" if len(suffix) == 1 else suffix, "token", text)
        elif function == "publish":
            call = node.publish(f"N{suffix}", text)
        else:
            key = text[:50] if function == "push with a key" else None
            call = node.push(f"N{function}.{suffix}", text, key=key)
        return call, text, is_refused

    async def run(self, task: int) -> None:
        for number in range(CALLS):
            function = self.chance.choice(FUNCTIONS)
            call, body, is_refused = self.a_call(function, f"{task}-{number}-")
            self.calls += 1
            if act := self.acts.get(self.calls):
                await act()
            try:
                async with asyncio.timeout(0.002 if self.chance.random() < 0.1 else None):
                    answer = await call
            except (TimeoutError, exceptions.ConnectionLost):
                self.outcome.unknown.add(body)
            except exceptions.MessagesError as error:
                if not is_refused:
                    self.outcome.wrong.append(f"{function} {body:.20}: {error}")
            else:
                if is_refused or (function == "commit" and not answer):
                    self.outcome.wrong.append(f"{function} {body:.20}: {answer}")
                self.outcome.done[function, task].append(body)
                if function not in {"send", "request", "commit"}:
                    self.outcome.ids[function, body] = getattr(answer, "id", answer)


@pytest.mark.parametrize(("seed", "kills"), [(1, 0), (2, 0), (3, 3), (4, 3)])
@in_a_loop
async def test_gathered_calls_answer_as_if_each_ran_alone(gathering: World, seed: int, kills: int):
    chance, url = random.Random(seed), gathering.server.url  # noqa: S311 - no secret
    for topic in "N1", "N2":
        gathering.program("user1").read("NODE1", topic, 3600)
    async with (
        AsyncNode("NODE2", url("user2")) as listener,
        AsyncNode("NODE1", url("user1"), options=QUICK) as node,
        AsyncExitStack() as closing,
    ):
        await listener.topic_listen("ORDERS")
        await node.topic_notify("ORDERS")
        threads = NodeOfThreads(Node("NODE3", url("user1"), options=QUICK))
        closing.push_async_callback(threads.close)
        await threads.open()
        await threads.topic_notify("ORDERS")
        bodies = [f"leased {n:03}" for n in range(TASKS * CALLS)]
        await node.push_many("NLEASED", bodies)
        leases = await node.reserve("NLEASED", TASKS * CALLS, SOON)
        kills_at = chance.sample(range(TASKS, TASKS * CALLS), kills)
        kill = partial(asyncio.to_thread, gathering.end_backends, KILLED)
        tasks = Tasks(node, threads, chance, leases, dict.fromkeys(kills_at, kill))
        async with asyncio.TaskGroup() as group:
            for task in range(TASKS):
                group.create_task(tasks.run(task))
        await node.topic_send("ORDERS", "last")
        received = [message async for message in until_last(listener)]
    assert tasks.outcome.wrong == []
    for function, kind in ("send", "Topic"), ("request", "Rpc"):
        of_kind = [message.body for message in received if message.type == kind]
        tasks.outcome.compare(function, list(enumerate(of_kind)))
    published = gathering.execute("SELECT id, payload FROM psqlmessages_streammessage ORDER BY id")
    tasks.outcome.compare("publish", published.fetchall())
    for function in "push", "push with a key":
        tasks.outcome.compare(function, gathering.execute(ELEMENTS, (f"N{function}.*",)).fetchall())
    left = {body for _, body in gathering.execute(ELEMENTS, ("NLEASED",))}
    removed = [(n, body) for n, body in enumerate(bodies[::-1]) if body not in left]
    tasks.outcome.compare("commit", removed)


async def until_last(listener: AsyncNode) -> Any:
    async for message in listener.messages(timeout=SOON):
        if message.body == "last":
            return
        if message.type in {"Topic", "Rpc"}:
            yield message
    raise AssertionError("the last message did not arrive")


@in_a_loop
async def test_calls_that_wait_together_are_one_statement(gathering: World):
    url, watcher = gathering.server.url, gathering.watcher
    for role in "user1", "user2":
        watcher.execute(f"ALTER ROLE {role} SET track_functions = 'all'")
    try:
        async with AsyncNode("NODE1", url("user1")) as node, AsyncNode("NODE2", url("user2")) as to:
            await node.topic_listen("ORDERS")
            await node.topic_notify("ORDERS")
            await node.push_many("N.1", range(100))
            elements = await node.reserve("N.1", 100)
            await asyncio.gather(
                *(node.topic_send("ORDERS", str(n)) for n in range(100)),
                *(node.rpc("NODE2", f"token {n}", n) for n in range(100)),
                *(node.publish("N1", str(n)) for n in range(100)),
                *(node.push("N.2", str(n)) for n in range(100)),
                *(node.commit(element) for element in elements),
            )
            requests = (m async for m in to.messages(timeout=SOON) if m.type == "Rpc")
            asked = [await anext(requests) for _ in range(100)]
            asked[7].token = "forged"
            replies = (to.reply(message, message.body) for message in asked)
            results = await asyncio.gather(*replies, return_exceptions=True)
            refused = [n for n, error in enumerate(results) if error is not None]
            assert (refused, type(results[7])) == ([7], exceptions.TokenMalformed)
            answers = (m async for m in node.messages(timeout=SOON) if m.type == "Return")
            bodies = [(await anext(answers)).body for _ in range(99)]
            assert bodies == [n for n in range(100) if n != 7]
    finally:
        for role in "user1", "user2":
            watcher.execute(f"ALTER ROLE {role} RESET track_functions")
    many = dict.fromkeys(("topic_send_many", "publish_many", "rpc_many", "commit"), 1)
    # One push_many was ours; return_many refused one answer and sent the others.
    counts = many | {"push_many": 2, "return_many": 1}
    gathering.wait_for(
        "SELECT jsonb_object_agg(funcname, calls) = %s::jsonb FROM pg_stat_user_functions"
        " WHERE schemaname = 'messages'"
        " AND funcname ~ '^(topic_send|rpc|return|publish|push|commit)'",
        json.dumps(counts),
    )


@in_a_loop
async def test_an_element_that_two_tasks_commit_is_removed_for_one(gathering: World):
    async with AsyncNode("NODE1", gathering.server.url("user1")) as node:
        await node.push_many("N.1", range(2))
        both = await node.reserve("N.1", 2)
        results = await asyncio.gather(*(node.commit(element) for element in both * 2))
        assert list(map(bool, results)) == [True, True, False, False]
        await node.push("N.1", 3)
        (late,) = await node.reserve("N.1", duration=0.001)
        (taken,) = await node.reserve("N.1", timeout=SOON)
        results = await asyncio.gather(node.commit(late), node.commit(taken))
        assert list(map(bool, results)) == [False, True]
