"""Notifications forged to the known channel of a node: what it believes, and that it lives on."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Thread

import pytest

from psqlmessages import Node
from psqlmessages.exceptions import CalleeGone, MessagesError
from tests.reliability.counts import memory_megabytes, report, size
from tests.sql.conftest import Program, World

FAULT = "forged notifications"
SOON = timedelta(seconds=20)
LAST = "the last one"
# A number makes each payload unique: PostgreSQL drops duplicates.
FLOOD = (
    '{{"Type":"Sys","Evt":"published","Topic":"{n} {pad}"}}',
    '{{"Type":"Sys","Evt":"topic_listen","Ident":"NODE1","Topic":"{n} {pad}"}}',
    '{{"Type":"Sys","Evt":"crash","Ident":"N{n} {pad}"}}', '{{"Type":"Sys","Evt":"{n}"}}',
    '{{"Type":"Sys","Evt":"moved","Queue":"Q","Topic":"{n}"}}',
    '{{"Type":"Topic","Size":1,"To":"T{n}","From":"{pad}","Id":{n}}}\nx',
    '{{"Type":"Return","Size":1,"To":"NODE1","From":"X","Token":"{n}","Id":{n}}}\nx',
    '{{"Type":"Probe","Token":"{n}"}}', "{n} {pad}", '{{"Type":{n}}}', "[[[[[{n}",
)  # fmt: skip
ROUND = 500
NOTIFY = "SELECT pg_notify(%s, p) FROM unnest(%s::text[]) AS v (p)"


@pytest.fixture
def node(world: World) -> Iterator[Node]:
    world.rules(
        "user1 NODE1 Topic ORDERS RW 60", "user2 NODE2 Topic ORDERS RW 60",
        "user1 NODE1 Rpc NODE2 W 60",
    )  # fmt: skip
    with Node("NODE1", world.server.url("user1")) as node:
        node.topic_listen("ORDERS")
        yield node


def forge(program: Program, node: Node, **header: object) -> None:
    """Notify the channel of a node, which the attacker knows."""
    text = json.dumps({name.capitalize(): value for name, value in header.items()})
    program.connection.execute("SELECT pg_notify(%s, %s)", (node.channel, text))


def read_to_the_last(node: Node, bodies: list[str]) -> None:
    """Collect the real messages until the last one."""
    for message in node.messages(timeout=SOON):
        if message.type == "Topic" and message.topic == "ORDERS":
            bodies.append(message.body)
            if message.body == LAST:
                return


@pytest.mark.timeout(300)
def test_a_flood_of_forged_notifications_changes_and_costs_nothing(world: World, node: Node):
    hostile, sender = world.program("hostile"), world.node("user2", "NODE2")
    sender.ok("topic_notify", "ORDERS")
    known = node._state.registration.joins()
    bodies: list[str] = []
    reader = Thread(target=read_to_the_last, args=(node, bodies))
    reader.start()
    before, forged = memory_megabytes(), 0
    for number in range(size(5_000, 100_000) // ROUND):
        payloads = [
            FLOOD[each % len(FLOOD)].format(n=number * ROUND + each, pad="x" * (each % 2 * 2_000))
            for each in range(ROUND)
        ]
        hostile.connection.execute(NOTIFY, (node.channel, payloads))
        sender.ok("topic_send", "ORDERS", f"true {number}")
        forged += ROUND
    sender.ok("topic_send", "ORDERS", LAST)
    reader.join(200)
    true = [f"true {number}" for number in range(forged // ROUND)]
    grown = memory_megabytes() - before
    report(
        FAULT, "a flood to the channel of a node that reads", forged=forged,
        real_messages=len(true) + 1, lost=len(true) + 1 - len(bodies),
        rejected_as_malformed=node.counters.malformed, lost_connections=node.counters.reconnects,
        memory_growth_megabytes=grown,
    )  # fmt: skip
    assert bodies == [*true, LAST]
    assert node._state.registration.joins() == known
    assert node.counters.reconnects == 0
    assert grown < 60


def test_a_forged_call_gets_no_answer(world: World, node: Node):
    forge(
        world.program("hostile"), node,
        type="Rpc", size=1, to="NODE1", id=1, token=f"{'0' * 32} 60 t", **{"from": "NODE2"},
    )  # fmt: skip
    message = next(m for m in node.messages(timeout=SOON) if m.type == "Rpc")
    with pytest.raises(MessagesError):
        node.reply(message, "an answer")


def test_settings_of_the_client_are_not_trusted(world: World, node: Node):
    hostile = world.program("hostile")
    for event in ("reconnected", "connection_lost"):
        forge(hostile, node, type="Sys", evt=event)
    forge(hostile, node, type="Sys", evt="crash", ident="NODE2")
    message = next(iter(node.messages(timeout=SOON)))
    assert (message.event, node.counters.malformed) == ("crash", 2)


def test_a_forged_crash_of_the_callee_ends_the_call_as_documented(world: World, node: Node):
    callee = world.node("user2", "NODE2")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(node.call, "NODE2", "?", timeout=SOON)
        callee.payloads(1)
        forge(world.program("hostile"), node, type="Sys", evt="crash", ident="NODE2")
        assert isinstance(asking.exception(20), CalleeGone)


def test_a_forged_end_deceives_the_node_but_not_the_server_as_documented(world: World, node: Node):
    forge(
        world.program("hostile"), node,
        type="Sys", evt="topic_unlisten", ident="NODE1", topic="ORDERS",
    )  # fmt: skip
    assert next(iter(node.messages(timeout=SOON))).event == "topic_unlisten"
    assert node._state.registration.joins() == []
    sender = world.node("user2", "NODE2")
    sender.ok("topic_notify", "ORDERS")
    sender.ok("topic_send", "ORDERS", "still")
    assert next(m for m in node.messages(timeout=SOON) if m.type == "Topic").body == "still"
