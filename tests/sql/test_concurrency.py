"""Races: two sessions at once, many rounds each, in threads that start from the same moment."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.reliability.counts import size
from tests.sql.conftest import Pair, Program, World
from tests.sql.simultaneous import begins_with, blocked, together

ROUNDS = range(size(5, 20))
DELETE = "DELETE FROM messages.auth WHERE ident IN ('A', 'C') AND dest = 'T' RETURNING id"


@pytest.fixture
def watcher(world: World) -> Program:
    world.rules("user1 WATCHER Topic T RW 5", "user1 A Topic T RW 5", "user2 B Topic T RW 5")
    return world.node("user1", "WATCHER")


@pytest.fixture
def nodes(world: World, watcher: Program) -> Pair:
    return world.node("user1", "A"), world.node("user2", "B")


def channels(world: World) -> tuple[int, int]:
    """How many listeners and how many channels topic T has, as a send reads them."""
    counts = "SELECT ARRAY[listeners, cardinality(channels)] FROM psqlmessages_topic"
    return tuple(world.owner.query(f"{counts} WHERE name = 'T'"))


@pytest.mark.parametrize("is_back", [False, True], ids=["two evaluate", "one comes back"])
def test_a_crash_is_reported_once(world: World, watcher: Program, nodes: Pair, is_back: bool):
    world.rules("user3 VICTIM Topic T RW 5")
    events = ["topic_unlisten VICTIM T", "topic_none_listen T", "crash VICTIM"]
    for _ in ROUNDS:
        world.kill(world.node("user3", "VICTIM", listen="T"))
        returned = world.program("user3")
        watcher.payloads()
        second = (returned, "init", "VICTIM") if is_back else (nodes[1], "evaluate")
        acts = (nodes[0], "evaluate"), second
        answers = together(*(lambda p=p, call=call: p.ok(*call) for p, *call in acts))
        assert watcher.events() == events + ["connect VICTIM"] * is_back
        if is_back:
            returned.ok("deinit", "VICTIM")
        else:
            # Each counts what it finds; the commit that comes first sends it.
            assert max(answer["Events"] for answer in answers) == 3


def test_listeners_come_and_go(world: World, watcher: Program, nodes: Pair):
    for _ in ROUNDS:
        together(*(lambda p=p: p.ok("topic_listen", "T") for p in nodes))
        assert channels(world) == (2, 2)
        watcher.payloads()
        together(*(lambda p=p: p.ok("topic_unlisten", "T") for p in nodes))
        *left, last = watcher.events()
        assert [event.split()[0] for event in left] == ["topic_unlisten"] * 2
        assert (last, channels(world)) == ("topic_none_listen T", (0, 0))


@pytest.mark.parametrize(("other", "number"), [("user1", 8), ("user2", 7)])
def test_of_two_inits_one_wins(world: World, watcher: Program, other: str, number: int):
    world.rules("user1 ONE Topic T R 5", "user2 ONE Topic T R 5")
    rivals = [world.program("user1"), world.program(other)]
    for _ in ROUNDS:
        answers = together(*(lambda p=p: p.call("init", "ONE") for p in rivals))
        assert sorted(answer["Err"] for answer in answers) == ["0", str(number)]
        assert watcher.events() == ["connect ONE"]
        winner, loser = rivals if answers[0]["Err"] == "0" else reversed(rivals)
        assert loser.error("use", "ONE")[0] == 50
        left = "SELECT count(*) FROM psqlmessages_session WHERE pid = %s"
        assert world.owner.query(left, loser.pid) == 0
        winner.ok("deinit", "ONE")
        watcher.payloads()


@pytest.mark.parametrize(
    "call",
    [
        ("topic_send", "OTHER", "x"), ("topic_send_many", "OTHER", ["x", "y"]),
        ("rpc", "B", "TOKEN", "x"), ("topic_status", "T"), ("topic_listen", "OTHER"), ("init", "A"),
        ("evaluate",),
    ],
)  # fmt: skip
def test_an_open_evaluation_holds_no_node(world: World, nodes: Pair, call: tuple[str, ...]):
    world.rules(
        "user1 A Topic OTHER RW 5", "user2 B Topic OTHER R 5", "user1 A Rpc B W 5",
        "user3 VICTIM Topic T RW 5", "user3 VICTIM Topic T* O 5",
    )  # fmt: skip
    nodes[0].ok("topic_notify", "OTHER")
    nodes[1].ok("topic_listen", "OTHER")
    world.kill(world.node("user3", "VICTIM", listen="T"))
    nodes[0].query("SELECT set_config('messages.housekeeping_at', '', false)")
    returned = world.program("user3")
    for waiting in returned, world.owner:
        waiting.execute("SET lock_timeout = '30s'")
    with nodes[0].connection.transaction():
        nodes[0].ok(*call)
        if "send" in call[0]:
            # A send does not block the saving of rules either.
            world.rules("user3 NEW Topic T R 5")
        returned.ok("init", "VICTIM")
        returned.ok("topic_listen", "T")
        if call == ("evaluate",):
            returned.ok("topic_observe", "T*")
            world.rules("user3 NEW Topic T R 5")


@pytest.mark.parametrize("call", [("topic_listen", "T"), ("topic_notify", "T"), ("init", "C")])
def test_changes_await_each_other(world: World, nodes: Pair, call: tuple[str, str]):
    world.rules("user1 A Topic OTHER R 5", "user1 C Topic T R 5")
    node = nodes[0]
    node.execute("BEGIN")
    node.ok(*call)
    with blocked(world, world.owner, lambda: world.owner.query(DELETE)):
        node.execute("COMMIT")
    assert world.owner.query("SELECT count(*) FROM psqlmessages_membership") == 0
    assert channels(world) == (0, 0)
    if call[0] == "topic_listen":
        assert "topic_unlisten A T" in node.events()
    assert node.ok("init", "A")["Already"] == 1
    world.rules("user1 A Topic T RW 5", "user1 C Topic T R 5")
    world.execute("BEGIN")
    world.owner.query(DELETE)
    with blocked(world, node, lambda: node.error(*call)) as refused:
        world.execute("COMMIT")
    assert refused.result()[0] == (5 if call[0] == "init" else 2)


@pytest.fixture
def pause(world: World) -> Iterator[None]:
    """Make sends wait, between two looks at the rules, for whoever holds advisory lock 77."""
    with begins_with(world, "_content_error", "PERFORM pg_advisory_xact_lock_shared(77);"):
        yield


@pytest.mark.usefixtures("pause")
# A short request is sent by one statement, which looks once.
@pytest.mark.parametrize(
    "call", [("topic_send_as", "A", "T", "x"), ("rpc", "B", "token", "x" * 9000),
             ("publish_many", "A", "T", ["x"])],
)  # fmt: skip
def test_no_rule_no_send(world: World, nodes: Pair, call: tuple[Any, ...]):
    nodes[1].ok("topic_listen", "T")
    world.rules("user1 A Rpc B W 5")
    world.owner.query("SELECT pg_advisory_lock(77)::text")
    with blocked(world, nodes[0], lambda: nodes[0].error(*call)) as refused:
        world.execute("DELETE FROM messages.auth WHERE ident = 'A'")
        world.owner.query("SELECT pg_advisory_unlock(77)")
    assert refused.result()[0] == 2
