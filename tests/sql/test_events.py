"""Events: which of them, who is told and who is not, in which order, and each exactly once."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.sql.conftest import Program, World

RULES = [
    "user1 SUBJECT Topic SHARED RW 10",
    "user1 SUBJECT Rpc CALLEE W 10",
    "user1 SECOND Topic SHARED RW 10",
    "user2 SHARER Topic SHARED R 10",
    "user2 PATTERN Topic SHA* W 10",
    "user2 WATCHER Topic SHARED O 10",
    "team MEMBER* Topic SHARED R 10",
    "user2 CALLEE Topic CALLEES W 10",
    "user2 CALLER Rpc SUBJECT W 10",
    "user2 PREFIX Rpc SUB* W 10",
    "user3 STRANGER Topic ELSEWHERE RW 10",
    "user3 STRANGER Rpc CALLEE W 10",
]
WITH_TOPIC = ["MEMBER1", "PATTERN", "SECOND", "SHARER", "WATCHER"]
RELATED = sorted([*WITH_TOPIC, "CALLEE", "CALLER", "PREFIX"])


class Stage(NamedTuple):
    """SUBJECT's connection, and everybody else, each on a connection of its own."""

    world: World
    subject: Program
    others: dict[str, Program]

    def forget(self) -> None:
        """Read what arrived so far."""
        for program in (self.subject, *self.others.values()):
            program.payloads()

    def heard(self) -> dict[str, list[str]]:
        """What each of the others heard; left out: who heard nothing."""
        heard = {ident: program.events() for ident, program in self.others.items()}
        return {ident: events for ident, events in heard.items() if events}


@pytest.fixture
def stage(world: World) -> Stage:
    """All nodes but SUBJECT are registered."""
    world.rules(*RULES)
    others = {
        ident: world.node(role, ident)
        for role, idents in {
            "user1": ["SECOND"],
            "user2": ["SHARER", "PATTERN", "WATCHER", "CALLEE", "CALLER", "PREFIX"],
            "user3": ["MEMBER1", "STRANGER"],
        }.items()
        for ident in idents
    }
    stage = Stage(world, world.program("user1"), others)
    stage.forget()
    return stage


@pytest.fixture
def active(stage: Stage) -> Stage:
    """SUBJECT is registered, sends and listens to SHARED, the only one to do so."""
    stage.subject.ok("init", "SUBJECT")
    stage.subject.ok("topic_notify", "SHARED")
    stage.subject.ok("topic_listen", "SHARED")
    stage.forget()
    return stage


def all_told(idents: list[str], *events: str) -> dict[str, list[str]]:
    return {ident: list(events) for ident in idents}


def in_order(heard: dict[str, list[str]]) -> dict[str, list[str]]:
    return dict(sorted(heard.items()))


def test_connect_is_told_to_who_shares_a_topic_or_has_an_rpc_rule_either_way(stage: Stage) -> None:
    stage.subject.ok("init", "SUBJECT")
    assert in_order(stage.heard()) == all_told(RELATED, "connect SUBJECT")
    assert stage.subject.events() == []


def test_disconnect_is_told_to_the_same_nodes(stage: Stage) -> None:
    channel = stage.subject.ok("init", "SUBJECT")["Channel"]
    stage.forget()
    spy = stage.world.program()
    spy.connection.execute(f"LISTEN {channel}")
    stage.subject.ok("deinit", "SUBJECT")
    assert in_order(stage.heard()) == all_told(RELATED, "disconnect SUBJECT")
    assert spy.events() == []


def test_crash_is_told_to_the_same_nodes(stage: Stage) -> None:
    stage.subject.ok("init", "SUBJECT")
    stage.forget()
    stage.world.kill(stage.subject)
    stage.others["STRANGER"].ok("evaluate")
    assert in_order(stage.heard()) == all_told(RELATED, "crash SUBJECT")


@pytest.mark.parametrize(
    ("subject", "other", "is_told"),
    [
        ("Topic A W", "Topic A R", True),
        ("Topic A O", "Topic A O", True),
        ("Topic A* W", "Topic AB R", True),
        ("Topic AB W", "Topic A* R", True),
        ("Topic A* W", "Topic AB* R", True),
        ("Topic AB* W", "Topic A* R", True),
        ("Topic * W", "Topic A R", True),
        ("Topic A* W", "Topic B* R", False),
        ("Topic A W", "Topic AB R", False),
        ("Topic A W", "Topic a R", False),
        ("Rpc OTHER W", "Topic B R", True),
        ("Rpc OTH* W", "Topic B R", True),
        ("Rpc OTHERS W", "Topic B R", False),
        ("Topic A R", "Rpc SUBJECT W", True),
        ("Topic A R", "Rpc SUB* W", True),
        ("Topic A R", "Rpc A W", False),
        ("Topic OTHER R", "Topic SUBJECT R", False),
        ("Rpc THIRD W", "Rpc THIRD W", False),
    ],
)
def test_a_node_hears_of_another_where_their_rules_meet(
    world: World, subject: str, other: str, is_told: bool
) -> None:
    world.rules(f"user1 SUB* {subject} 10", f"user2 OTHER {other} 10")
    program = world.node("user2", "OTHER")
    world.node("user1", "SUBJECT")
    assert program.events() == (["connect SUBJECT"] if is_told else [])


@pytest.mark.parametrize("kind", ["notify", "listen"])
def test_a_node_that_begins_is_told_to_all_with_a_rule_for_the_topic(
    stage: Stage, kind: str
) -> None:
    stage.subject.ok("init", "SUBJECT")
    stage.forget()
    stage.subject.ok(f"topic_{kind}", "SHARED")
    assert in_order(stage.heard()) == all_told(WITH_TOPIC, f"topic_{kind} SUBJECT SHARED")
    assert stage.subject.events() == []


@pytest.mark.parametrize("kind", ["notify", "listen"])
def test_a_node_that_ends_as_the_last_one_is_followed_by_none_told_to_itself_too(
    active: Stage, kind: str
) -> None:
    active.subject.ok(f"topic_un{kind}", "SHARED")
    events = (f"topic_un{kind} SUBJECT SHARED", f"topic_none_{kind} SHARED")
    assert in_order(active.heard()) == all_told(WITH_TOPIC, *events)
    assert active.subject.events() == [f"topic_none_{kind} SHARED"]


@pytest.mark.parametrize("kind", ["notify", "listen"])
def test_a_node_that_ends_while_another_goes_on_is_followed_by_nothing(
    active: Stage, kind: str
) -> None:
    second = active.others["SECOND"]
    second.ok(f"topic_{kind}", "SHARED")
    active.forget()
    active.subject.ok(f"topic_un{kind}", "SHARED")
    assert in_order(active.heard()) == all_told(WITH_TOPIC, f"topic_un{kind} SUBJECT SHARED")
    assert active.subject.events() == []


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("init", ["SUBJECT"]),
        ("topic_notify", ["SHARED"]),
        ("topic_listen", ["SHARED"]),
        ("topic_status", ["SHARED"]),
        ("topic_send", ["SHARED", "to myself"]),
        ("use", ["SUBJECT"]),
    ],
)
def test_a_call_that_changes_nothing_is_told_to_nobody(
    active: Stage, function: str, arguments: list[str]
) -> None:
    active.subject.ok(function, *arguments)
    assert active.heard() == {}


@pytest.mark.parametrize("function", ["topic_unnotify", "topic_unlisten", "topic_unobserve"])
def test_an_end_of_what_never_began_is_told_to_nobody(stage: Stage, function: str) -> None:
    stage.world.rules("user1 ALL* Topic SHARED RW 10", "team ALL* Topic SHARED O 10")
    node = stage.world.node("user1" if function != "topic_unobserve" else "user3", "ALL1")
    stage.forget()
    assert node.ok(function, "SHARED") == {"Err": "0", "Already": 1}
    assert stage.heard() == {}


def test_observing_is_told_to_nobody(active: Stage) -> None:
    active.others["WATCHER"].ok("topic_observe", "SHARED")
    active.others["WATCHER"].ok("topic_unobserve", "SHARED")
    assert (active.heard(), active.subject.events()) == ({}, [])


END_OF_ALL = [
    "topic_unlisten SUBJECT SHARED",
    "topic_none_listen SHARED",
    "topic_unnotify SUBJECT SHARED",
    "topic_none_notify SHARED",
]


def test_deinit_ends_listening_and_sending_before_it_disconnects(active: Stage) -> None:
    active.subject.ok("deinit", "SUBJECT")
    assert active.others["SHARER"].events() == [*END_OF_ALL, "disconnect SUBJECT"]


def test_a_crash_ends_listening_and_sending_too(active: Stage) -> None:
    active.world.kill(active.subject)
    answer = active.others["STRANGER"].ok("evaluate")
    heard = active.heard()
    assert answer == {"Err": "0", "Events": 5}
    assert heard["SHARER"] == [*END_OF_ALL, "crash SUBJECT"]
    assert heard["CALLER"] == ["crash SUBJECT"]
    assert "STRANGER" not in heard


def test_a_crash_of_several_topics_tells_each_none_after_its_own_end(world: World) -> None:
    topics = [f"T{number}" for number in range(5)]
    world.rules("user1 SUBJECT Topic T* RW 10", "user2 SHARER Topic T* R 10")
    subject, sharer = world.node("user1", "SUBJECT"), world.node("user2", "SHARER")
    for topic in reversed(topics):
        subject.ok("topic_listen", topic)
    sharer.ok("topic_listen", "T3")
    sharer.payloads()
    world.kill(subject)
    sharer.ok("evaluate")
    ends = [
        event
        for topic in topics
        for event in (f"topic_unlisten SUBJECT {topic}", f"topic_none_listen {topic}")
        if event != "topic_none_listen T3"
    ]
    assert sharer.events() == [*ends, "crash SUBJECT"]


def test_the_second_of_two_nodes_that_crash_together_is_the_last_listener(world: World) -> None:
    world.rules("user1 A Topic T R 10", "user1 B Topic T R 10", "user2 SHARER Topic T W 10")
    gateway, sharer = world.gateway("user1", "A", "B"), world.node("user2", "SHARER")
    for ident in ("A", "B"):
        gateway.ok("use", ident)
        gateway.ok("topic_listen", "T")
    sharer.payloads()
    world.kill(gateway)
    sharer.ok("evaluate")
    assert sharer.events() == [
        "topic_unlisten A T", "crash A", "topic_unlisten B T", "topic_none_listen T", "crash B",
    ]  # fmt: skip


FIELDS = {
    "init": ("connect", {"Ident"}),
    "topic_notify": ("topic_notify", {"Ident", "Topic"}),
    "topic_listen": ("topic_listen", {"Ident", "Topic"}),
    "topic_unlisten": ("topic_unlisten", {"Ident", "Topic"}),
    "topic_unnotify": ("topic_unnotify", {"Ident", "Topic"}),
    "deinit": ("disconnect", {"Ident"}),
}


def test_an_event_has_its_fields_and_no_others(stage: Stage) -> None:
    for function in FIELDS:
        stage.subject.ok(function, "SHARED" if "topic" in function else "SUBJECT")
    headers = stage.others["SHARER"].headers()
    named = {header["Evt"]: set(header) - {"Type", "Evt", "Id"} for header in headers}
    assert named == {**dict(FIELDS.values()), "topic_none_listen": {"Topic"},
                     "topic_none_notify": {"Topic"}}  # fmt: skip
    assert {header["Type"] for header in headers} == {"Sys"}


def test_equal_events_of_one_transaction_all_arrive_with_ids_of_their_own(stage: Stage) -> None:
    with stage.subject.connection.transaction():
        for function in ("init", "deinit", "init"):
            stage.subject.ok(function, "SUBJECT")
    headers = stage.others["CALLER"].headers()
    assert [header["Evt"] for header in headers] == ["connect", "disconnect", "connect"]
    assert len({header["Id"] for header in headers}) == 3


def test_events_of_a_rolled_back_transaction_are_told_to_nobody(stage: Stage) -> None:
    stage.subject.connection.execute("BEGIN")
    stage.subject.ok("init", "SUBJECT")
    stage.subject.ok("topic_listen", "SHARED")
    stage.subject.connection.execute("ROLLBACK")
    assert stage.heard() == {}


def test_a_session_with_several_nodes_hears_an_event_once(stage: Stage) -> None:
    gateway = stage.world.gateway("user3", "MEMBER2", "MEMBER3", "MEMBER4")
    gateway.payloads()
    stage.subject.ok("init", "SUBJECT")
    [header] = gateway.headers()
    assert header["Nodes"] == ["MEMBER2", "MEMBER3", "MEMBER4"]


def test_a_crash_is_told_once_however_many_sessions_evaluate(active: Stage) -> None:
    active.world.kill(active.subject)
    events = [program.ok("evaluate")["Events"] for program in active.others.values()]
    assert sum(events) == 5
    assert active.heard()["PREFIX"] == ["crash SUBJECT"]


def test_a_node_that_is_back_at_once_is_told_as_crashed_and_then_connected(active: Stage) -> None:
    active.world.kill(active.subject)
    active.world.node("user1", "SUBJECT")
    assert active.others["CALLER"].events() == ["crash SUBJECT", "connect SUBJECT"]


CALLS: dict[str, Callable[[Program], object]] = {
    **{
        function: lambda node, function=function: node.ok(function, "SHARED")
        for function in (
            "topic_auth", "topic_status", "topic_notify", "topic_unnotify",
            "topic_listen", "topic_unlisten",
        )
    },
    "init": lambda node: node.ok("init", "SECOND"),
    "deinit": lambda node: node.ok("deinit", "SECOND"),
    "evaluate": lambda node: node.ok("evaluate"),
    "a refused call": lambda node: node.error("topic_listen", "ELSEWHERE"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_crash_is_found_by_any_call(active: Stage, name: str) -> None:
    second = active.others["SECOND"]
    second.ok("evaluate")
    active.world.kill(active.subject)
    CALLS[name](second)
    assert "crash SUBJECT" in active.others["CALLER"].events()


SENDS = {
    "topic_send": ["SHARED", "body"],
    "topic_send_many": ["SHARED", ["body"]],
    "topic_send_as": ["SENDER", "SHARED", "body"],
    "rpc": ["WATCHER", "TOKEN", "body"],
    "return": ["WATCHER", "0" * 32 + " 5 TOKEN", "body"],
    "get_data": ['{"Dkey":"junk"}'],
}


def test_a_crash_is_found_by_a_send_when_a_second_has_passed(world: World) -> None:
    world.rules(
        "user1 SENDER* Topic SHARED RW 10",
        "user1 SENDER* Rpc WATCHER W 10",
        "user2 VICTIM* Topic SHARED R 10",
        "user3 WATCHER Topic SHARED R 10",
    )
    watcher = world.node("user3", "WATCHER")
    watcher.ok("topic_listen", "SHARED")
    senders = {function: world.node("user1", f"SENDER_{function}") for function in SENDS}
    victims = {function: world.node("user2", f"VICTIM_{function}") for function in SENDS}
    for sender in senders.values():
        sender.ok("topic_notify", "SHARED")
        sender.ok("evaluate")
    watcher.query("SELECT pg_sleep(1.01)")
    for function, sender in senders.items():
        watcher.payloads()
        world.kill(victims[function])
        sender.call(function, *SENDS[function])
        words = [header.get("Evt") for header in watcher.headers()]
        assert "crash" in words, function


SECOND = "SELECT date_part('epoch', clock_timestamp())::bigint"


def test_a_crash_is_not_looked_for_twice_within_a_second(active: Stage) -> None:
    sender, victim = active.subject, active.others["CALLER"]
    # The clock's seconds count, from half to half: from the beginning of one, there is time enough.
    sender.query("SELECT pg_sleep(1 - mod(extract(epoch FROM clock_timestamp()) + 0.499, 1))")
    begun = sender.query(SECOND)
    sender.ok("evaluate")
    active.world.kill(victim)
    sender.ok("topic_send", "SHARED", "body")
    told = [header["Evt"] for header in sender.headers() if header["Type"] == "Sys"]
    assert told == [] or sender.query(SECOND) > begun
