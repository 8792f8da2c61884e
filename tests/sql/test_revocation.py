"""Revocation wins: no open transaction of a node delays a save of rules or keeps a right alive."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from threading import Event
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.reliability.counts import size
from tests.sql.conftest import Program, World
from tests.sql.simultaneous import blocked, in_background

pytestmark = pytest.mark.versions
MOST_SECONDS = 2
# Evaluations of others after the last transaction that held anything up has ended.
EVALUATIONS = 3
RULES = (
    "user1 SENDER Topic T W 5", "user1 SENDER Queue Q W 5", "user1 SENDER Rpc BAD W 5",
    "user1 HEARER Topic T R 5",
    "user2 BAD Topic * RW 5", "user2 BAD* Topic * O 5", "user2 BAD Queue * RW 5",
    "user2 BAD Rpc * W 5",
    "user3 HELPER* Topic * RW 5", "user3 HELP* Topic * O 5", "user3 HELPER* Queue * RW 5",
)  # fmt: skip
CONNECTIONS = 20


class RevocationNodes:
    """BAD, whose rules go; SENDER and HEARER, which keep theirs; and HELPERs of another role."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.rules(*RULES)
        self.sender = world.node("user1", "SENDER", notify="T")
        self.hearer = world.node("user1", "HEARER", listen="T")
        self.bad = world.node("user2", "BAD", listen="T", notify="T")
        self.helper = world.node("user3", "HELPER", listen="T", notify="T")
        self.sender.ok("push", "SENDER", "Q", "element")
        self.sender.ok("evaluate")
        self.sender.ok("rpc", "BAD", "TOKEN", "question")
        self.question = self.bad.headers()[-1]["Token"]

    def sit(self, program: Program, *calls: Sequence[str]) -> None:
        """Have a program call something in a transaction that stays open."""
        program.execute("BEGIN")
        for call in calls:
            program.ok(*call)


Attack = Callable[[RevocationNodes], Iterator[None]]


def sitting(who: str, *calls: str, end: str = "ROLLBACK") -> Attack:
    """Make the attack of a program that calls, and leaves its transaction open for the save."""

    def act(nodes: RevocationNodes) -> Iterator[None]:
        program = getattr(nodes, who)
        nodes.sit(program, *(call.split() for call in calls))
        yield
        with suppress(psycopg.errors.IntegrityError):
            program.execute(end)

    return act


def turns(nodes: RevocationNodes) -> Iterator[None]:
    """One is always in a transaction that holds the topic."""
    both = [nodes.world.node("user3", f"HELPER{number}") for number in (1, 2)]
    nodes.sit(both[0], ("topic_listen", "T"))
    stop = Event()

    def alternate() -> None:
        for last, later in cycle((both, both[::-1])):
            later.execute("BEGIN")
            later.ok("topic_status", "T")
            with blocked(nodes.world, later, lambda node=later: node.ok("topic_notify", "T")):
                last.execute("ROLLBACK")
            if stop.wait(0.05):
                later.execute("ROLLBACK")
                return

    with in_background(alternate):
        yield
        stop.set()


def twenty(nodes: RevocationNodes) -> Iterator[None]:
    """Each has registered a node, and made a topic."""
    programs = [nodes.world.program("user3") for _ in range(CONNECTIONS)]
    for number, program in enumerate(programs):
        nodes.sit(program, ("init", f"HELPER{number}"), ("topic_listen", f"T{number}"))
    yield
    for program in programs:
        program.execute("COMMIT")


def savepoint(nodes: RevocationNodes) -> Iterator[None]:
    """What is not there for the save is there again after it."""
    nodes.bad.execute("BEGIN; SAVEPOINT before")
    nodes.bad.ok("topic_unnotify", "T")
    nodes.bad.ok("topic_unlisten", "T")
    yield
    nodes.bad.execute("ROLLBACK TO before")
    nodes.bad.call("topic_send", "T", "from BAD")
    nodes.bad.execute("COMMIT")


def snapshot(nodes: RevocationNodes) -> Iterator[None]:
    """Its snapshot still has its rules."""
    nodes.bad.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    nodes.bad.ok("topic_status", "T")
    yield
    with suppress(psycopg.errors.SerializationFailure):
        nodes.bad.call("topic_listen", "OTHER")
    nodes.bad.execute("ROLLBACK")


def prepared(nodes: RevocationNodes) -> Iterator[None]:
    """It holds the topic without any session."""
    nodes.sit(nodes.helper, ("subscribe", "HELPER", "T"))
    nodes.helper.execute("PREPARE TRANSACTION 'held'")
    yield
    nodes.helper.execute("ROLLBACK PREPARED 'held'")


ATTACKS: dict[str, Attack] = {
    "it sits after joining another topic": sitting("bad", "topic_listen OTHER"),
    "it sits after leaving the topic": sitting("bad", "topic_unlisten T"),
    "it sits after deregistering": sitting("bad", "deinit BAD"),
    "it sits after observing": sitting("bad", "topic_observe *"),
    "a helper sits after leaving the topic": sitting("helper", "topic_unlisten T"),
    "a helper sits after observing all": sitting("helper", "topic_observe *"),
    "a helper sits after subscribing": sitting("helper", "subscribe HELPER T"),
    "a helper sits after pausing the queue": sitting("helper", "pause HELPER Q"),
    "a helper sits after making the topic of a new rule": sitting("helper", "topic_listen NEW"),
    "a helper evaluates in a transaction": sitting("helper", "topic_unnotify T", "evaluate"),
    "it comes back by what it did before": sitting(
        "bad", "deinit BAD", "init BAD", "topic_listen T", "topic_notify T", "topic_observe *",
        end="COMMIT",
    ),
    "two connections take turns": turns,
    "twenty connections sit in transactions": twenty,
    "it locks its own membership, and takes that back": savepoint,
    "it joins with an older snapshot": snapshot,
    "a transaction is prepared": prepared,
}  # fmt: skip
INSERT = "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES"
# The first one in full size only: each waits for a moment.
SAVES = (
    "UPDATE messages.auth SET timeout = 9 WHERE ident ^@ 'BAD'",
    f"{INSERT} ('user2', 'BAD', 'Topic', 'NEW', 'R', 5)",
    "DELETE FROM messages.auth WHERE ident ^@ 'BAD'",
)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_revoked_right_ends_despite_open_transactions(world: World, attack: Attack):
    nodes = RevocationNodes(world)
    with contextmanager(attack)(nodes):
        for save in SAVES[-size(2, 3) :]:
            began = monotonic()
            world.execute(save)
            assert monotonic() - began < MOST_SECONDS, save
        nodes.sender.ok("topic_send", "T", "secret")
        nodes.sender.ok("publish", "SENDER", "T", "secret")
    for _ in range(EVALUATIONS):
        nodes.sender.ok("evaluate")
    nodes.sender.ok("topic_send", "T", "secret")
    nodes.sender.call("rpc", "BAD", "TOKEN2", "secret")
    assert use(nodes.bad, nodes.question) == []
    assert not [payload for payload in nodes.bad.payloads() if "secret" in payload]
    heard = [parsed["Body"] for parsed in nodes.hearer.headers() if parsed["Type"] == "Topic"]
    assert heard == ["secret"] * 3
    assert world.owner.query("SELECT count(*) FROM psqlmessages_client WHERE ident = 'BAD'") == 0
    left = "SELECT (SELECT count(*) FROM messages._{}) + (SELECT count(*) FROM messages._{})"
    assert world.owner.query(left.format("recheck", "unfinished")) == 0
    # Sends trust the topics' rows again.
    world.wait_for("SELECT messages._rules_are_applied() FROM messages.evaluate()")


def use(bad: Program, question: str) -> list[tuple[str, ...]]:
    attempts = [
        ("init", "BAD"), ("topic_listen", "T"), ("topic_notify", "T"), ("topic_observe", "T"),
        ("topic_send", "T", "from BAD"), ("topic_send_as", "BAD", "T", "from BAD"),
        ("publish", "BAD", "T", "from BAD"), ("subscribe", "BAD", "T"), ("pop", "BAD", "Q"),
        ("reserve", "BAD", "Q"), ("push", "BAD", "Q", "x"), ("queue_listen", "BAD", "Q"),
        ("pause", "BAD", "Q"), ("rpc", "SENDER", "TOKEN", "x"), ("return", "SENDER", question, "x"),
    ]  # fmt: skip
    return [attempt for attempt in attempts if bad.call(*attempt)["Err"] == "0"]


@pytest.mark.parametrize(
    "call", [
        ("subscribe", "BAD", "T", 60), ("subscribe_from", "BAD", ["T"], [0], 60),
        ("push", "BAD", "NEW", "from BAD"), ("queue_listen", "BAD", "NEW"),
        ("push", "BAD", "Q", "from BAD", None, None, None, None, 0, "key"),
        ("publish_staged", "BAD", "T", "query", 1, [UUID(int=1)], 1),
        ("push_staged", "BAD", "Q", "query", 1, [UUID(int=1)], 1),
    ], ids=lambda call: " ".join(map(str, call[:3:2])),
)  # fmt: skip
def test_a_call_that_lost_its_right_waiting_is_refused(world: World, call: tuple[Any, ...]):
    world.rules("user1 SENDER Topic T W 5", "user2 BAD Topic T RW 5", "user2 BAD Queue * RW 5")
    sender, bad, other = world.program("user1"), world.program("user2"), world.program("user2")
    assert bad.read("BAD", "T") == []
    stage = "INSERT INTO messages.staged (staging, place, bodies) VALUES (%s, 0, '{from BAD}')"
    bad.execute(stage, [UUID(int=1)])
    other.execute("BEGIN")
    other.ok(*call)
    with blocked(world, bad, lambda: refused(bad, call)) as answer:
        world.execute("DELETE FROM messages.auth WHERE role = 'user2'")
        sender.ok("publish", "SENDER", "T", "secret")
        other.execute("ROLLBACK")
    assert answer.result() == "PM016"
    assert world.owner.query("SELECT count(*) FROM psqlmessages_element") == 0
    published = world.owner.query("SELECT array_agg(payload) FROM psqlmessages_streammessage")
    assert published == ["secret"]
    world.execute("DELETE FROM messages.staged")


def test_rights_of_a_left_group_end_despite_an_open_evaluation(world: World):
    superuser = world.superuser()
    superuser.execute("GRANT team TO user2")
    try:
        world.rules("team BAD Topic T RW 5", *(rule for rule in RULES if "BAD" not in rule))
        sender = world.node("user1", "SENDER", notify="T")
        helper = world.node("user3", "HELPER", listen="T")
        bad = world.node("user2", "BAD", listen="T")
        sender.ok("evaluate")
    finally:
        superuser.execute("REVOKE team FROM user2")
    helper.execute("BEGIN")
    helper.ok("topic_unlisten", "T")
    helper.ok("evaluate")
    sender.ok("evaluate")
    bad.payloads()
    sender.call("topic_send", "T", "secret")
    assert bad.payloads() == []
    helper.execute("ROLLBACK")
    for _ in range(EVALUATIONS):
        sender.ok("evaluate")
    assert bad.error("init", "BAD")[0] == 5
    idents = world.owner.query("SELECT array_agg(ident ORDER BY ident) FROM psqlmessages_client")
    assert idents == ["HELPER", "SENDER"]


def refused(program: Program, call: tuple[Any, ...]) -> str | None:
    """Return the SQLSTATE of an error, even if the call answers it and does not raise it."""
    try:
        [(answer,)] = program.elements(*call)
    except psycopg.Error as raised:
        return raised.sqlstate
    return f"PM{int(answer['Err']):03}"
