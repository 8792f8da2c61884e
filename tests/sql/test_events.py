"""Events: which of them, who is told and who is not, in which order, and each exactly once."""

from typing import NamedTuple

import pytest

from tests.sql.conftest import Program, World

RULES = [
    "user1 SUBJECT Topic SHARED RW 10", "user1 SUBJECT Rpc CALLEE W 10",
    "user1 SECOND Topic SHARED RW 10", "user2 SHARER Topic SHARED R 10",
    "user2 PATTERN Topic SHA* W 10", "user2 WATCHER Topic SHARED O 10",
    "team MEMBER* Topic SHARED R 10", "user2 CALLEE Topic CALLEES W 10",
    "user2 CALLER Rpc SUBJECT W 10", "user2 PREFIX Rpc SUB* W 10",
    "user3 STRANGER Topic ELSEWHERE RW 10", "user3 STRANGER Rpc CALLEE W 10",
]  # fmt: skip
WITH_TOPIC = ["MEMBER1", "PATTERN", "SECOND", "SHARER", "WATCHER"]
RELATED = sorted([*WITH_TOPIC, "CALLEE", "CALLER", "PREFIX"])


class EventNodes(NamedTuple):
    """SUBJECT's connection, and everybody else, each on a connection of its own."""

    world: World
    subject: Program
    others: dict[str, Program]

    def heard(self) -> dict[str, list[str]]:
        """What each of the others heard; left out: who heard nothing."""
        heard = {ident: program.events() for ident, program in self.others.items()}
        return {ident: events for ident, events in heard.items() if events}


@pytest.fixture
def nodes(world: World) -> EventNodes:
    """All nodes but SUBJECT are registered."""
    world.rules(*RULES)
    roles = {"SECOND": "user1", "MEMBER1": "user3", "STRANGER": "user3"}
    idents = [*roles, "SHARER", "PATTERN", "WATCHER", "CALLEE", "CALLER", "PREFIX"]
    others = {ident: world.node(roles.get(ident, "user2"), ident) for ident in idents}
    nodes = EventNodes(world, world.program("user1"), others)
    world.forget()
    return nodes


def told(idents: list[str], *events: str) -> dict[str, list[str]]:
    return {ident: list(events) for ident in idents}


KINDS = "notify", "listen"
END_OF_ALL = [
    "topic_unlisten SUBJECT SHARED", "topic_none_listen SHARED", "topic_unnotify SUBJECT SHARED",
    "topic_none_notify SHARED",
]  # fmt: skip


@pytest.fixture
def active(nodes: EventNodes) -> EventNodes:
    """SUBJECT is registered, sends and listens to SHARED, the only one to do so."""
    nodes.subject.ok("init", "SUBJECT")
    for kind in KINDS:
        nodes.subject.ok(f"topic_{kind}", "SHARED")
    nodes.world.forget()
    return nodes


def test_nodes_with_a_shared_topic_or_rpc_rule_see_each_other_connect_and_leave(nodes: EventNodes):
    subject, second = nodes.subject, nodes.others["SECOND"]
    channel = subject.ok("init", "SUBJECT")["Channel"]
    assert nodes.heard() == told(RELATED, "connect SUBJECT")
    for kind in KINDS:
        subject.ok(f"topic_{kind}", "SHARED")
        assert nodes.heard() == told(WITH_TOPIC, f"topic_{kind} SUBJECT SHARED")
        second.ok(f"topic_{kind}", "SHARED")
        nodes.world.forget()
        subject.ok(f"topic_un{kind}", "SHARED")
        assert nodes.heard() == told(WITH_TOPIC, f"topic_un{kind} SUBJECT SHARED")
        assert subject.events() == []
        second.ok(f"topic_un{kind}", "SHARED")
        nodes.world.forget()
    for kind in KINDS:
        subject.ok(f"topic_{kind}", "SHARED")
        nodes.world.forget()
        subject.ok(f"topic_un{kind}", "SHARED")
        events = (f"topic_un{kind} SUBJECT SHARED", f"topic_none_{kind} SHARED")
        assert nodes.heard() == told(WITH_TOPIC, *events)
        assert subject.events() == [events[1]], "it hears itself of what nobody does any more"
    spy = nodes.world.program()
    spy.execute(f"LISTEN {channel}")
    subject.ok("deinit", "SUBJECT")
    assert nodes.heard() == told(RELATED, "disconnect SUBJECT")
    assert spy.events() == []


def test_a_node_hears_of_another_where_their_rules_meet(world: World):
    wrong = []
    for subject, other, is_told in (
        ("Topic A W", "Topic A R", True), ("Topic A O", "Topic A O", True),
        ("Topic A* W", "Topic AB R", True), ("Topic AB W", "Topic A* R", True),
        ("Topic A* W", "Topic AB* R", True), ("Topic AB* W", "Topic A* R", True),
        ("Topic * W", "Topic A R", True), ("Topic A* W", "Topic B* R", False),
        ("Topic A W", "Topic AB R", False), ("Topic A W", "Topic a R", False),
        ("Rpc OTHER W", "Topic B R", True), ("Rpc OTH* W", "Topic B R", True),
        ("Rpc OTHERS W", "Topic B R", False), ("Topic A R", "Rpc SUBJECT W", True),
        ("Topic A R", "Rpc SUB* W", True), ("Topic A R", "Rpc A W", False),
        ("Topic OTHER R", "Topic SUBJECT R", False), ("Rpc THIRD W", "Rpc THIRD W", False),
    ):  # fmt: skip
        world.begin()
        world.rules(f"user1 SUB* {subject} 10", f"user2 OTHER {other} 10")
        program = world.node("user2", "OTHER")
        world.node("user1", "SUBJECT")
        if program.events() != (["connect SUBJECT"] if is_told else []):
            wrong.append((subject, other))
    assert not wrong


def test_a_change_without_effect_sends_no_event(active: EventNodes):
    active.world.rules("user1 ALL* Topic SHARED RW 10", "team ALL* Topic SHARED O 10")
    fresh = active.world.node("user3", "ALL2"), active.world.node("user1", "ALL1")
    active.world.forget()
    for call in (
        ("init", "SUBJECT"), ("topic_notify", "SHARED"), ("topic_listen", "SHARED"),
        ("topic_status", "SHARED"), ("topic_send", "SHARED", "to myself"), ("use", "SUBJECT"),
    ):  # fmt: skip
        active.subject.ok(*call)
    already = {"Err": "0", "Already": 1}
    assert fresh[0].ok("topic_unobserve", "SHARED") == already
    assert [fresh[1].ok(f"topic_un{kind}", "SHARED") for kind in KINDS] == [already] * 2
    active.others["WATCHER"].ok("topic_observe", "SHARED")
    active.others["WATCHER"].ok("topic_unobserve", "SHARED")
    with active.subject.connection.transaction(force_rollback=True):
        active.subject.ok("topic_unlisten", "SHARED")
        active.subject.ok("deinit", "SUBJECT")
    assert active.heard() == {}
    assert {header["Type"] for header in active.subject.headers()} == {"Topic"}


def test_events_for_topics_come_before_the_event_for_the_node(active: EventNodes):
    active.subject.ok("deinit", "SUBJECT")
    assert active.others["SHARER"].events() == [*END_OF_ALL, "disconnect SUBJECT"]


def test_a_crash_is_reported_once_and_never_to_an_ended_node(nodes: EventNodes):
    world, subject, topics = nodes.world, nodes.subject, [f"SHARED{number}" for number in range(5)]
    world.rules("user1 SUBJECT Topic SHARED* RW 10", "user2 SHARER Topic SHARED* RW 10")
    subject.ok("init", "SUBJECT")
    for topic in reversed(topics):
        subject.ok("topic_listen", topic)
    nodes.others["SHARER"].ok("topic_listen", "SHARED3")
    world.forget()
    world.kill(subject)
    assert [program.ok("evaluate")["Events"] for program in nodes.others.values()] == [10, *[0] * 8]
    pairs = [(f"topic_unlisten SUBJECT {topic}", f"topic_none_listen {topic}") for topic in topics]
    ends = [event for pair in pairs for event in pair if event != "topic_none_listen SHARED3"]
    heard = nodes.heard()
    assert heard["SHARER"] == [*ends, "crash SUBJECT"]
    assert sorted(heard) == RELATED
    assert heard["CALLEE"] == ["crash SUBJECT"]


def test_an_event_has_its_fields_and_an_id_of_its_own(nodes: EventNodes):
    acts = [f"topic_{act}" for act in ("notify", "listen", "unlisten", "unnotify")]
    for function in "init", *acts, "deinit":
        nodes.subject.ok(function, "SHARED" if function in acts else "SUBJECT")
    headers = nodes.others["SHARER"].headers()
    assert {header["Evt"]: set(header) - {"Type", "Evt", "Id"} for header in headers} == {
        "connect": {"Ident"}, "disconnect": {"Ident"}, **{act: {"Ident", "Topic"} for act in acts},
        "topic_none_listen": {"Topic"}, "topic_none_notify": {"Topic"},
    }  # fmt: skip
    assert {header["Type"] for header in headers} == {"Sys"}
    gateway = nodes.world.node("user3", "MEMBER2", "MEMBER3", "MEMBER4")
    nodes.world.forget()
    with nodes.subject.connection.transaction():
        for function in ("init", "deinit", "init"):
            nodes.subject.ok(function, "SUBJECT")
    headers = gateway.headers()
    assert [header["Evt"] for header in headers] == ["connect", "disconnect", "connect"]
    assert len({header["Id"] for header in headers}) == 3
    # A session with several nodes hears an event once.
    assert headers[0]["Nodes"] == ["MEMBER2", "MEMBER3", "MEMBER4"]


SENDS = {
    "topic_send": ["SHARED", "body"], "topic_send_many": ["SHARED", ["body"]],
    "topic_send_as": ["SENDER", "SHARED", "body"], "rpc": ["WATCHER", "TOKEN", "body"],
    "return": ["WATCHER", "0" * 32 + " 5 TOKEN", "body"], "get_data": ['{"Dkey":"junk"}'],
}  # fmt: skip
# These look each time, whatever they answer.
OTHERS = {
    **{f"topic_{do}": ["SHARED"] for do in ("auth", "status", "notify", "unnotify", "listen")},
    "topic_unlisten": ["SHARED"],
    "init": ["SENDER_init"], "deinit": ["SENDER_deinit"], "evaluate": [], "topic_observe": ["NONE"],
}  # fmt: skip


def test_a_crash_is_found_by_any_call_and_by_a_send_when_a_second_has_passed(world: World):
    world.rules(
        "user1 SENDER* Topic SHARED RW 10", "user1 SENDER* Rpc WATCHER W 10",
        "user2 VICTIM* Topic SHARED R 10", "user3 WATCHER Topic SHARED R 10",
    )  # fmt: skip
    watcher = world.node("user3", "WATCHER", listen="SHARED")
    calls = SENDS | OTHERS
    senders = {function: world.node("user1", f"SENDER_{function}") for function in calls}
    for function in SENDS:
        senders[function].ok("topic_notify", "SHARED")
        senders[function].ok("evaluate")
    victims = {function: world.node("user2", f"VICTIM_{function}") for function in calls}
    missed = []
    watcher.query("SELECT pg_sleep(1.01)")
    for function, sender in senders.items():
        if function in OTHERS:
            sender.ok("evaluate")
        watcher.payloads()
        # That is how a session is known to live; a kill would cost a backend each.
        victims[function].query("SELECT pg_advisory_unlock_all()")
        heard: set[str | None] = set()
        for _ in range(3 if function in SENDS else 1):
            sender.call(function, *calls[function])
            heard |= {header.get("Evt") for header in watcher.headers()}
            if "crash" in heard:
                break
            # Another session, such as a hub, does the housekeeping, or did it within this second.
            watcher.query("SELECT pg_sleep(1.01)")
            heard |= {header.get("Evt") for header in watcher.headers()}
        if "crash" not in heard:
            missed.append(function)
    assert not missed, watcher.query("SELECT json_agg(a) FROM pg_stat_activity AS a")
