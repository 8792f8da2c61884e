"""Load: random calls and changes of rules from eight threads, and the state they leave behind."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from time import monotonic

import psycopg
import pytest

from tests.reliability.counts import size
from tests.sql.conftest import INSERT_RULE, World
from tests.sql.simultaneous import together

SECONDS, MOST_SECONDS = size(1, 30), 200
# What shows that enough happened.
EXPECTED = {"0", "2", "3", "8", "21", "50"}
IDENTS = ["N0", "N1", "N2", "M3", "M4", "M5"]
TOPICS = ["T1", "T2", "T3", "U1"]
PATTERNS = ["T*", "*", "U1", "T2"]

UPDATE = "UPDATE messages.auth SET timeout = %s, mode = %s WHERE ident = %s AND type = 'Topic'"
DELETE = "DELETE FROM messages.auth WHERE ident = %s AND dest = %s"

# What a send reads of a topic is kept step by step.
TOPICS_READ = """
    SELECT json_agg(json_build_array(name, listeners, subscriptions, ARRAY(
        SELECT c FROM unnest(channels) AS c ORDER BY c
    ), ARRAY(SELECT w FROM unnest(subscriber_channels) AS w ORDER BY w)) ORDER BY name)
    FROM psqlmessages_topic
"""
WRONG_MEMBERSHIPS = """
    SELECT c.ident, m.kind, t.name, m.timeout, r.timeout
    FROM psqlmessages_membership AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id
    JOIN psqlmessages_client AS c ON c.id = m.client_id
    JOIN psqlmessages_session AS s ON s.id = c.session_id
    CROSS JOIN LATERAL (
        SELECT max(a.timeout) AS timeout,
               bool_or(a.mode IN ('RW', CASE m.kind WHEN 'listen' THEN 'R' ELSE 'W' END)) AS may
        FROM psqlmessages_auth AS a
        WHERE a.type = 'Topic' AND a.role = c.role
          AND (a.ident = c.ident
              OR right(a.ident, 1) = '*' AND starts_with(c.ident, left(a.ident, -1)))
          AND (a.dest = t.name
              OR right(a.dest, 1) = '*' AND starts_with(t.name, left(a.dest, -1)))
    ) AS r
    WHERE r.may IS NOT TRUE OR m.timeout <> r.timeout
       OR (m.channel, m.pid, m.role) <> (s.channel, s.pid, s.role)
"""
WRONG_CLIENTS = """
    SELECT c.ident FROM psqlmessages_client AS c
    WHERE NOT EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE a.role = c.role AND (a.ident = c.ident
            OR right(a.ident, 1) = '*' AND starts_with(c.ident, left(a.ident, -1)))
    )
"""


def call_of(own: str, dice: random.Random) -> tuple[str, ...]:
    ident, topic = dice.choice([own, own, own, *IDENTS]), dice.choice(TOPICS)
    pattern, new = dice.choice(PATTERNS), dice.choice([topic, topic, "T-new"])
    return dice.choice([
        *[("init", ident)] * 4, ("deinit", ident), ("use", ident), ("evaluate",),
        *[("topic_listen", topic)] * 3, ("topic_unlisten", topic),
        *[("topic_notify", topic)] * 3, ("topic_unnotify", topic),
        *[("topic_send", topic, "x", "TOKEN")] * 5, ("topic_send_as", ident, topic, "x" * 9000),
        ("topic_status", topic), ("topic_observe", pattern), ("topic_unobserve", pattern),
        *[("subscribe", ident, topic)] * 4, *[("publish", ident, new, "x")] * 3,
        *[("unsubscribe", ident, topic)] * 2, ("subscription", ident, topic),
        ("connect_stream", ident), ("rpc", ident, "TOKEN", "x"),
    ])  # fmt: skip


def caller(world: World, number: int, answers: Counter[str]) -> Callable[[], None]:
    """Make the step of a program that calls at random, and crashes now and then."""
    role, own, dice = f"user{number % 3 + 1}", IDENTS[number], random.Random(number)  # noqa: S311
    program = world.program(role)

    def step() -> None:
        nonlocal program
        if dice.random() < 0.005:
            program.close()
            program = world.program(role)
        function, *arguments = call_of(own, dice)
        answers[program.call(function, *arguments)["Err"]] += 1

    return step


def administrator(world: World, seed: int) -> Callable[[], None]:
    """Make the step of the owner, who adds, changes and removes rules at random."""
    program, dice = world.program(), random.Random(seed)  # noqa: S311

    def step() -> None:
        role, ident = f"user{dice.randint(1, 3)}", dice.choice([*IDENTS, "N*", "*"])
        dest, timeout = dice.choice([*TOPICS, *PATTERNS]), dice.randint(1, 100)
        mode = dice.choice(["W", "R", "RW", "RW", "O"])
        with suppress(psycopg.errors.UniqueViolation):
            if dice.random() < 0.6:
                program.execute(INSERT_RULE, [role, ident, "Topic", dest, mode, timeout])
            elif dice.random() < 0.5:
                program.execute(UPDATE, [timeout, mode, ident])
            else:
                program.execute(DELETE, [ident, dest])

    return step


@pytest.mark.timeout(300)
def test_eight_threads_neither_deadlock_nor_leave_a_wrong_state(world: World):
    for ident in IDENTS:
        world.rules(*(f"user{n} {ident} Topic {topic} RW 5" for n in (1, 2, 3) for topic in TOPICS))
        world.rules(f"user1 {ident} Rpc N1 W 5", f"user2 {ident} Rpc N2 W 5")
    answers: Counter[str] = Counter()
    threads = [caller(world, number, answers) for number in range(6)]
    threads += [administrator(world, seed) for seed in (6, 7)]
    begun = monotonic()

    def run(step: Callable[[], None]) -> None:
        while (seconds := monotonic() - begun) < SECONDS or (
            seconds < MOST_SECONDS and not set(answers) >= EXPECTED
        ):
            step()

    together(*(partial(run, step) for step in threads))
    world.owner.ok("evaluate")
    assert set(answers) >= EXPECTED, f"too little happened: {answers}"
    # Who registers and subscribes at the same moment is woken from the next reading on.
    for role in "user1", "user2", "user3":
        program = world.program(role)
        for ident, topic in product(IDENTS, TOPICS):
            program.call("subscribe", ident, topic)
    for wrong in WRONG_MEMBERSHIPS, WRONG_CLIENTS:
        assert world.execute(wrong).fetchall() == []
    kept = world.owner.query(TOPICS_READ)
    world.execute("SELECT messages._rebuild_topics(ARRAY(SELECT id FROM psqlmessages_topic))")
    assert world.owner.query(TOPICS_READ) == kept
