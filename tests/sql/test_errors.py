"""Every error of the protocol: its number, its text and its WARNING, and which comes first."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, groupby
from operator import attrgetter
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from psqlmessages.client.refused_calls import needed_rule
from psqlmessages.exceptions import error_for
from tests.conftest import TestedServer
from tests.sql.conftest import Program, World

pytestmark = pytest.mark.versions
# The table of the documentation.
DOCS = Path(__file__).parents[2] / "docs/reference/errors.md"
ROW = re.compile(r"^\| (\d+) \| (.*?) \|", re.MULTILINE)
TEXTS = {int(number): text for number, text in ROW.findall(DOCS.read_text())}

RULES = [
    "user1 ME Rpc OTHER W 5", "user1 ME Rpc ABSENT W 5", "user1 ME Topic BOTH RW 1000",
    "user1 ME Topic WRITE W 10", "user1 ME Topic QUIET W 10", "user1 ME Topic READ R 10",
    "user1 ME Topic WATCH O 10", "user1 AWAY Topic BOTH W 10", "user1 AWAY Topic QUIET W 10",
    "user1 AWAY Topic READ R 10", "user2 ME Topic BOTH R 10", "user2 OTHER Topic BOTH RW 10",
    "user2 OTHER Topic WRITE R 10", "user2 OTHER Topic READ W 10",
    "user2 OTHER Topic ELSEWHERE RW 10", "user2 ABSENT Topic ELSEWHERE R 10",
    "user3 ASKER* Rpc OTHER W 10", "user1 ME Queue QBOTH A 10", "user1 ME Queue QREAD R 10",
    "user1 ME Queue QWRITE W 10", "user1 ME Queue QUNUSED RW 10", "user1 ME Queue QNONE A 10",
    "user2 OTHER Queue QELSE RW 10",
    # They would allow names that are too long, and patterns as names.
    "user1 x* Topic BOTH RW 10", "user1 ME Topic x* RW 10", "user1 ME Rpc x* W 10",
    "user1 x* Queue QBOTH A 10", "user1 ME Queue x* A 10",
]  # fmt: skip
STATE = (
    "auth", "session", "client", "topic", "membership", "observation", "subscription", "queue",
    "element",
)  # fmt: skip
# The last ones would write into a header.
ENCS = ["gzip", "JSON", 'b64"', "b64\n", 'json","From":"OTHER']

LONG = "x" * 101
LONG_TOKEN = "x" * 1001
BIG = "x" * 8193
FORGED = "0" * 32 + " 5 TOKEN"
EXPIRED = f"5.0.1000000000000.{'0' * 32}"
UNKNOWN = f"5.0.999999999999999.{'0' * 32}"
TOO_BIG = {"size": 8193, "max": 8192}
LEASE = "5.00000000-0000-0000-0000-000000000000"
MAX_TRIES = "-1: 1 or more are needed, or 0 for no maximum"
SAME_QUEUE = "another queue than QBOTH is needed"
DELAY = "0 to 1,000,000,000 seconds are needed"
TIMES = "infinity", "-infinity", "0001-01-01", "20000-01-01"
TIME = "a delay of 0 to 1,000,000,000 seconds, or a mature from 1970 to 9000, is needed"
HEADERS = "a JSON object of at most 64 KiB is needed"

# Arguments that are right: of functions that have a topic, of those that have a queue, of others.
WITH_TOPIC: dict[str, tuple[Any, ...]] = {
    **{f"topic_{name}": ("BOTH",) for name in (
        "auth", "status", "notify", "unnotify", "listen", "unlisten", "observe", "unobserve",
    )},
    "topic_send": ("BOTH", "body"), "topic_send_many": ("BOTH", ["body"]),
    "topic_send_as": ("ME", "BOTH", "body"), "topic_status_as": ("ME", "BOTH"),
    "publish": ("ME", "BOTH", "body"), "publish_many": ("ME", "BOTH", ["body"]),
    "subscribe": ("ME", "BOTH", 60, 10), "unsubscribe": ("ME", "BOTH"),
    "subscription": ("ME", "BOTH"), "stream_horizons": ("ME", ["BOTH"]),
    "subscribe_from": ("ME", ["BOTH"], [0], 60),
    "publish_staged": ("ME", "BOTH", "query", 0, [], 0), "read_stream": ("ME", "BOTH"),
}  # fmt: skip
WITH_QUEUE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["pause", "resume", "drain", "sizes", "queue_listen"], ("ME", "QBOTH")),
    **dict.fromkeys(["remove_queue", "peek"], ("ME", "QBOTH")),
    "configure_queue": ("ME", "QBOTH", 5, "QBOTH", 60), "push": ("ME", "QBOTH", "body"),
    "push_many": ("ME", "QBOTH", ["body"]), "pop": ("ME", "QBOTH", 1),
    "reserve": ("ME", "QBOTH", 1, 60.0), "take": ("ME", "QBOTH", 1), "remove": ("ME", "QBOTH", 1),
    "remove_elements": ("ME", "QBOTH", [1]), "move_elements": ("ME", "QBOTH", "QWRITE", [1]),
    "deliver": ("ME", "QBOTH", *[[]] * 10), "renew": ("ME", "QBOTH", 5.0, LEASE),
    "push_staged": ("ME", "QBOTH", "query", 0, [], 0),
}  # fmt: skip
OTHERS: dict[str, tuple[Any, ...]] = {
    "rpc": ("OTHER", "TOKEN", "body"), "return": ("OTHER", FORGED, "body"),
    "return_error": ("OTHER", FORGED, "body"),
    **dict.fromkeys(("init", "deinit", "crash", "use", "connect_stream"), ("ME",)),
    "get_data": ('{"Dkey":"junk"}',),
    "audience": ('{"Type":"Sys","Evt":"connect","Ident":"OTHER"}',), "commit": ("ME", LEASE),
    "rollback": ("ME", None, LEASE), "release": ("ME", LEASE),
}  # fmt: skip
RIGHT = WITH_TOPIC | WITH_QUEUE | OTHERS
AS_NODE = [name for name, arguments in WITH_TOPIC.items() if arguments[0] == "ME"]
SENDS = ["topic_send", "topic_send_many", "topic_send_as"]
PUBLISHES = ["publish", "publish_many"]
ANSWERS = ["return", "return_error"]
ASKING = ["rpc", *ANSWERS]
PUSHES, TAKES = ["push", "push_many"], ["pop", "reserve", "take"]
ENDS = ["commit", "rollback", "release"]
NO_PATTERN = {*WITH_TOPIC} - {"topic_observe", "topic_unobserve", "stream_horizons"}
# Which functions need which mode; `RW`: both.
MODES = {
    "W": [*SENDS, *PUBLISHES, "topic_notify", "topic_unnotify", "publish_staged"],
    "R": ["topic_listen", "topic_unlisten", "subscribe", "subscription", "stream_horizons",
          "subscribe_from", "read_stream"],
    "O": ["topic_observe", "topic_unobserve"],
}  # fmt: skip
QUEUE_MODES = {
    "W": [*PUSHES, "push_staged"],
    "R": [*TAKES, "peek", "queue_listen", "deliver", "renew"],
    "RW": ["remove", "pause", "resume", "drain"],
    "A": ["configure_queue", "remove_queue", "remove_elements", "move_elements"],
}


class Case(NamedTuple):
    """A call that must be refused; `values` fill the text of the error."""

    number: int
    function: str
    arguments: tuple[Any, ...]
    values: Mapping[str, Any] = MappingProxyType({})
    caller: str = "me"

    @property
    def text(self) -> str:
        return Template(TEXTS[self.number]).substitute(self.values)

    def __repr__(self) -> str:
        arguments = ",".join(str(argument)[:12] for argument in self.arguments)
        return f"{self.number}-{self.function}({arguments})"


FUNCTION = attrgetter("function")
# In the values of a text: what was given.
GIVEN = object()


def wrong(
    number: int, names: Iterable[str], place: Any, *given: Any, caller: str = "me", **values: Any
) -> list[Case]:
    """Make cases of functions, with something wrong at one place: its number, or what is right."""
    cases = []
    for name in names:
        right = RIGHT[name]
        # A place is an index, or the right argument there, or the element of an array there.
        index = place
        if not isinstance(place, int):
            index = [argument in (place, [place]) for argument in right].index(True)
        for value in given:
            arguments = [*right, *[None] * (index + 1 - len(right))]
            is_array = isinstance(arguments[index], list) and not isinstance(value, list)
            arguments[index] = [value] if is_array else value
            told = {key: value if text is GIVEN else text for key, text in values.items()}
            cases.append(Case(number, name, tuple(arguments), told, caller))
    return cases


CASES = [
    *wrong(1, WITH_TOPIC, "BOTH", "", None),
    *wrong(1, WITH_QUEUE, "QBOTH", "", None),
    *wrong(1, ["stream_horizons", "subscribe_from"], 1, []),
    Case(1, "stream_horizons", ("ME", None)),
    Case(1, "subscribe_from", ("ME", None, [], 60)),
    *wrong(2, WITH_TOPIC, "BOTH", "ELSEWHERE", type="Topic", dest=GIVEN),
    *wrong(2, WITH_QUEUE, "QBOTH", "QELSE", type="Queue", dest=GIVEN),
    *wrong(2, ["rpc"], 0, "ME", type="Rpc", dest=GIVEN),
    *wrong(3, MODES["W"], "BOTH", "READ", "WATCH", mode="W", type="Topic", dest=GIVEN),
    *wrong(3, MODES["R"], "BOTH", "WRITE", "WATCH", mode="R", type="Topic", dest=GIVEN),
    *wrong(3, MODES["O"], "BOTH", "BOTH", mode="O", type="Topic", dest=GIVEN),
    *wrong(3, QUEUE_MODES["W"], "QBOTH", "QREAD", mode="W", type="Queue", dest=GIVEN),
    *wrong(3, QUEUE_MODES["R"], "QBOTH", "QWRITE", mode="R", type="Queue", dest=GIVEN),
    *wrong(3, QUEUE_MODES["RW"], "QBOTH", "QREAD", "QWRITE", mode="RW", type="Queue", dest=GIVEN),
    *wrong(3, QUEUE_MODES["A"], 1, "QUNUSED", mode="A", type="Queue", dest=GIVEN),
    *wrong(3, ["configure_queue"], 3, "QREAD", mode="W", type="Queue", dest=GIVEN),
    *wrong(3, ["move_elements"], 2, "QREAD", mode="W", type="Queue", dest=GIVEN),
    *wrong(4, ["init", "connect_stream"], 0, "", None),
    *wrong(5, ["init", "connect_stream"], 0, "NOBODY", "OTHER", ident=GIVEN),
    *wrong(9, WITH_TOPIC, "BOTH", "NOWHERE", "both", "100% 'of'\n$topic", topic=GIVEN),
    *wrong(9, ["subscribe_from"], 1, "BO*", topic=GIVEN),
    *wrong(9, NO_PATTERN, "BOTH", "x*", topic=GIVEN),
    *wrong(10, SENDS, "BOTH", "QUIET", topic=GIVEN),
    *wrong(12, ["get_data"], 0, json.dumps({"Dkey": EXPIRED}), dkey=EXPIRED),
    *wrong(13, ["get_data"], 0, json.dumps({"Dkey": UNKNOWN}), dkey=UNKNOWN),
    *wrong(13, ["get_data"], 0, '{"Dkey":"junk"}', dkey="junk"),
    *wrong(14, ASKING, 1, "", None),
    *wrong(15, ASKING, 0, "", None),
    *wrong(15, [*AS_NODE, *WITH_QUEUE, *ENDS], 0, "", None),
    *wrong(16, [*AS_NODE, *WITH_QUEUE], 0, "NOBODY", "x*", ident=GIVEN),
    *wrong(16, ["rpc", *ENDS], 0, "NOBODY", "x*", ident=GIVEN),
    *wrong(17, ["rpc"], 0, "ABSENT", ident=GIVEN),
    Case(17, "topic_send_as", ("AWAY", "BOTH", "body", "TOKEN"), {"ident": "AWAY"}),
    *wrong(18, ANSWERS, 1, "junk", "0" * 32, "0" * 31 + " 5 TOKEN", "0" * 32 + " x TOKEN",
           "0" * 32 + " 5 ", "0" * 32 + "  5 TOKEN", "G" * 32 + " 5 TOKEN"),
    *wrong(19, ANSWERS, 0, "NOBODY", ident=GIVEN),
    *wrong(20, ANSWERS, 0, "OTHER", "ABSENT", ident="ME", dest=GIVEN, token=FORGED),
    *wrong(20, ANSWERS, 1, "1." + FORGED, ident="ME", dest="OTHER", token=GIVEN),
    *wrong(21, SENDS[:2], 0, "WRITE", ident="ME", topic=GIVEN),
    *(
        Case(50, name, RIGHT[name], caller="nobody")
        for name in (*WITH_TOPIC, *ASKING, "get_data", "use", "audience")
        if name not in AS_NODE
    ),
    *wrong(51, ["topic_send", "rpc", "topic_send_as", "publish", "push"], "body", BIG, **TOO_BIG),
    *wrong(51, ["topic_send_many", "publish_many", "push_many"], "body", ["small", BIG], **TOO_BIG),
    *wrong(51, [*SENDS, *PUBLISHES], "body", "ü" * 4097, size=8194, max=8192),
    *wrong(52, ["get_data"], 0, "", None, "junk", "{}", "[]", '"text"', '{"Dkey":null}',
           '{"Dkey":"5.0', '{"Dkey":"\\u0000"}', '{"Dkey":"\\ud800"}', '\n{"Dkey":"junk"}',
           "[" * 100_000),
    *wrong(52, ["audience"], 0, "", None, "junk", "{}", '{"Evt":"\\u0000"}', "[" * 100_000),
    *wrong(53, ["use"], 0, "OTHER", "NOBODY", ident=GIVEN),
    *wrong(54, WITH_TOPIC, "BOTH", LONG),
    *wrong(54, WITH_QUEUE, "QBOTH", LONG),
    *wrong(54, ["init", "deinit", "crash", "use", "connect_stream", *ASKING, *ENDS], 0, LONG),
    *wrong(54, [*AS_NODE, *WITH_QUEUE], 0, LONG),
    *wrong(54, ["rpc"], 1, LONG_TOKEN, "ü" * 501),
    *wrong(54, ANSWERS, 1, "1." + FORGED + "x" * 1100),
    *wrong(54, SENDS[:2], 2, LONG_TOKEN, "ü" * 501),
    *wrong(54, SENDS[2:], 3, LONG_TOKEN, "ü" * 501),
    Case(54, "topic_send", ("WRITE", "body", LONG_TOKEN)),
    Case(54, "push", ("ME", "QBOTH", "body", None, None, None, None, 0, "k" * 201)),
    *wrong(54, ["publish_staged", "push_staged"], 2, "", "q" * 201),
    *wrong(55, [*SENDS[:2], *PUSHES, *PUBLISHES, "rpc"], 3, *ENCS, enc=GIVEN),
    *wrong(55, SENDS[2:], 4, *ENCS, enc=GIVEN),
    *wrong(55, PUBLISHES, 3, "", enc=GIVEN),
    *wrong(58, TAKES, 2, 4097, limit="4096 elements"),
    *wrong(58, ["deliver"], 2, ["5"] * 4097, limit="4096 elements or 65536 copies"),
    *wrong(58, [*ENDS, "renew"], LEASE, [LEASE] * 4097, limit="4096 leases"),
    *wrong(60, ["subscribe"], 2, 0, -1, None, argument="timeout"),
    *wrong(60, ["subscribe_from"], 3, 0, -1, None, argument="timeout"),
    *wrong(60, ["subscribe"], 3, 0, -1, None, argument="max_rows"),
    *wrong(60, ["stream_horizons"], 3, 0, -1, argument="max_rows"),
    Case(60, "read_stream", ("ME", "BOTH", 0, None, 0), {"argument": "max_rows"}),
    *wrong(60, TAKES, 2, 0, -1, None, argument="count"),
    *wrong(60, ["reserve"], 3, 0.0, -1.0, float("nan"), 1e12, argument="duration"),
    *wrong(60, ["configure_queue"], 4, 0, -1, argument="key_timeout"),
    *wrong(60, ["renew"], 2, 0.0, -1.0, argument="duration"),
    *wrong(61, ["subscription"], 0, "ME", ident="ME", topic="BOTH"),
    *wrong(62, WITH_QUEUE, "QBOTH", "Q*", "x*", queue=GIVEN),
    *wrong(62, ["sizes"], 1, "QREAD", queue=GIVEN),
    *wrong(62, ["pause", "resume", "remove_queue"], 1, "QNONE", queue=GIVEN),
    *wrong(63, [*ENDS, "renew"], LEASE, "", "junk", "5", "1.", "1.x", "-" + LEASE, LEASE[:-1] + "G",
           "9" * 30 + LEASE[1:], LEASE + "0", argument="lease", value=GIVEN),
    *wrong(63, ["move_elements"], 2, "QBOTH", argument="to_queue", value=SAME_QUEUE),
    *wrong(63, ["rollback"], 1, -1.0, argument="delay", value=DELAY),
    *wrong(63, PUSHES[:1], 4, "[]", argument="headers", value=HEADERS),
    *wrong(63, PUSHES[1:], 4, ["[]"], argument="headers", value=HEADERS),
    *wrong(63, PUSHES, 5, *TIMES, argument="time", value=TIME),
    *wrong(63, PUSHES, 6, -1.0, *map(float, ("nan", "inf", "1e10")), argument="time", value=TIME),
    *wrong(63, PUSHES, 7, -1, argument="tries", value="-1"),
    *wrong(63, ["configure_queue"], 2, -1, argument="max_tries", value=MAX_TRIES),
    *wrong(63, PUSHES[:1], 7, None, argument="tries", value="null"),
    *wrong(63, ["deliver"], 2, "junk", argument="element", value=GIVEN),
    *wrong(63, ["stream_horizons"], 2, "[]", "5", '{"BOTH":"x"}', '{"BOTH":99999999999999999999}',
           '{"BOTH":1.5}', argument="after", value=GIVEN),
    *(
        Case(63, "subscribe_from", ("ME", ["BOTH"], ids, 60), {"argument": "positions", "value": s})
        for ids, s in [([], "{}"), ([1, 2], "{1,2}"), ([-1], "{-1}"), (None, "null"),
                       ([None], "{NULL}")]
    ),
    *wrong(63, ["publish_staged", "push_staged"], 3, -1, argument="batch", value=GIVEN),
    *wrong(63, ["publish_staged", "push_staged"], 3, None, argument="batch", value="null"),
    *(Case(63, "unstage", (s,), {"argument": "staging", "value": s}) for s in ("", "junk", LEASE)),
    *wrong(64, ["publish_staged", "push_staged"], 5, 5, n=0, m=GIVEN),
    *wrong(64, ["publish_staged", "push_staged"], 5, None, n=0, m="null"),
]  # fmt: skip


def gathered(case: Case) -> Case:
    """The same call as the only one of rpc_many or return_many."""
    arguments = tuple([argument] for argument in case.arguments)
    return case._replace(function=f"{case.function}_many", arguments=arguments)


CASES += [gathered(case) for case in CASES if case.function in {"rpc", "return"}]

# Function, arguments, number and text of an error, and the rule that the node ME needs.
NEEDED_RULES: list[tuple[str, tuple[Any, ...], int, str, tuple[str, ...]]] = [
    ("topic_auth", ("T",), 2, "cannot use Topic to T", ("ME", "Topic", "T", "R")),
    ("topic_status", ("T",), 9, "Topic T is not existent", ("ME", "Topic", "T", "R")),
    ("topic_status_as", ("ME", "T"), 9, "Topic T is not existent", ("ME", "Topic", "T", "R")),
    ("unsubscribe", ("ME", "T"), 2, "cannot use Topic to T", ("ME", "Topic", "T", "R")),
    ("sizes", ("ME", "Q"), 2, "cannot use Queue to Q", ("ME", "Queue", "Q", "R")),
    ("rpc", ("A", "TOKEN"), 2, "cannot use Rpc to A", ("ME", "Rpc", "A", "W")),
    ("rpc", ("x*", "TOKEN"), 16, "Client x* don't exist", ("ME", "Rpc", "x*", "W")),
    ("push", ("A", "Q"), 16, "Client A don't exist", ("A", "Queue", "Q", "W")),
    ("commit", ("A", LEASE), 16, "Client A don't exist", ("A", "Queue", "", "R")),
    ("", (), 16, "Client A don't exist", ("A", "", "", "")),
    ("", (), 3, "cannot auth A with Queue Q", ("ME", "Queue", "Q", "A")),
    ("init", ("A",), 5, "there are no permissions for ident A", ("A", "", "", "")),
]  # fmt: skip


class ErrorNodes(NamedTuple):
    """A world where each error is one call away."""

    world: World
    me: Program
    other: Program
    nobody: Program


@pytest.fixture(scope="module")
def nodes(server: TestedServer) -> Iterator[ErrorNodes]:
    world = World(server)
    world.rules(*RULES)
    me = world.node("user1", "ME", notify="BOTH QUIET")
    other = world.node("user2", "OTHER", listen="BOTH WRITE")
    me.ok("push", "ME", "QBOTH", "x")
    world.execute("UPDATE messages._settings SET max_body_bytes = 8192")
    yield ErrorNodes(world, me, other, world.program("user1"))
    world.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")
    world.close()


def state(world: World) -> list[Any]:
    """All rows of the tables, but the kept bodies."""
    tables = (f"psqlmessages_{name} ORDER BY id" for name in STATE)
    counted = "psqlmessages_elementkey", "psqlmessages_streammessage"
    found = [world.execute(f"SELECT * FROM {table}").fetchall() for table in tables]
    return found + [world.owner.query(f"SELECT count(*) FROM {table}") for table in counted]


def fault(nodes: ErrorNodes, case: Case) -> str | None:
    """Make the call of a case; what is wrong with its answer and its warning."""
    program = getattr(nodes, case.caller)
    program.warnings.clear()
    answer = program.call(case.function, *case.arguments)
    found = answer["Answers"][0] if "Answers" in answer else answer, program.warnings
    text = f"Messages err:{case.number} {case.text}"
    expected = {"Err": str(case.number), "Errstr": case.text}, [f"WARNING: {text}"]
    return None if found == expected else f"{case!r}: {found}, not {expected}"


def test_a_refused_call_answers_with_number_text_and_warning(nodes: ErrorNodes):
    # Any call would end an asker that another test killed, and remove what one has published.
    nodes.world.execute("TRUNCATE psqlmessages_streammessage")
    nodes.me.ok("evaluate")
    before = state(nodes.world)
    told = nodes.me, nodes.other
    for program in told:
        program.payloads()
    wrong = []
    for function, cases in groupby(sorted(CASES, key=FUNCTION), FUNCTION):
        wrong += [wrong for case in cases if (wrong := fault(nodes, case))]
        if state(nodes.world) != before or [p for p in told if p.payloads()]:
            wrong.append(f"refused calls of {function} changed something")
            before = state(nodes.world)
    assert not wrong
    assert len(CASES) > 600


def test_a_refused_call_names_the_rule_that_it_needs():
    table = list(NEEDED_RULES)
    for case in CASES:
        if case.number == 3 and case.function not in ("take", "deliver"):
            mode, type_, dest = case.values.values()
            rule = ("ME", type_, dest, mode.replace("RW", ""))
            table.append((case.function, case.arguments, 2, f"cannot use {type_} to {dest}", rule))
    for name, arguments, number, text, rule in table:
        sql = f"SELECT messages.{name}()" if name else ""
        assert needed_rule("ME", error_for(number, text), sql, arguments) == rule, name


def ask(nodes: ErrorNodes) -> tuple[Program, str, str]:
    """A new node that has just asked OTHER; its name and its token."""
    asker = nodes.world.node("user3", f"ASKER{len(nodes.world.programs)}")
    nodes.other.payloads()
    asker.ok("rpc", "OTHER", "TOKEN", "question")
    [question] = nodes.other.headers(1)
    asker.payloads()
    return asker, question["From"], question["Token"]


def prepared(nodes: ErrorNodes) -> Iterator[Case]:
    """Bring about what a case needs, and give the case."""
    who = {"ident": "ME", "pid": nodes.me.pid}
    yield Case(7, "init", ("ME",), who | {"role": "user1"}, caller="other")
    yield Case(8, "init", ("ME",), who, caller="nobody")
    nodes.other.payloads()
    nodes.me.ok("topic_send", "BOTH", "x" * 8100)
    yield Case(11, "get_data", tuple(nodes.other.payloads(1)), {"topic": "BOTH"})
    for body in "answer", BIG:
        asker, ident, token = ask(nodes)
        nodes.world.kill(asker)
        yield Case(17, "return", (ident, token, body), {"ident": ident}, caller="other")
    _, *asked = ask(nodes)
    for function in ANSWERS:
        yield Case(51, function, (*asked, BIG), TOO_BIG, caller="other")
    for enc in ENCS:
        yield Case(55, "return", (*asked, "answer", enc), {"enc": enc}, caller="other")
    nodes.me.ok("publish_staged", "ME", "BOTH", "imports", 5, [], 0)
    told = {"batch": 4, "query": "imports", "last": 5}
    yield Case(66, "remove_queue", ("ME", "QBOTH"), {"queue": "QBOTH"})
    yield Case(65, "publish_staged", ("ME", "BOTH", "imports", 4, [], 0), told)


def test_a_call_refused_for_the_state_of_things_answers_so_too(nodes: ErrorNodes):
    provoked, wrong = {case.number for case in CASES}, []
    for case in prepared(nodes):
        provoked.add(case.number)
        # After 17 housekeeping removes the node, and the next call answers 20.
        is_twice = case.function == "return" and case.number != 17
        both = (case, gathered(case)) if is_twice else (case,)
        wrong += [found for each in both if (found := fault(nodes, each))]
    assert not wrong
    # 6 is a warning, 56 travels in a header, and the rest are the relay's.
    assert provoked | {6, 56, 57, 59} == set(TEXTS)


def test_init_a_second_time_is_a_success_with_a_warning(nodes: ErrorNodes):
    nodes.me.warnings.clear()
    answer = nodes.me.ok("init", "ME")
    assert answer["Already"] == 1
    assert answer["Channel"].startswith(f"user1_{nodes.me.pid}")
    assert nodes.me.warnings == ["WARNING: Messages err:6 Client ME exists with same pid"]


def test_a_failure_answered_to_the_asker_has_number_and_text_in_its_header(nodes: ErrorNodes):
    asker, *asked = ask(nodes)
    nodes.other.ok("return_error", *asked, "no such order")
    [header] = asker.headers()
    assert (header["Err"], header["Errstr"], header["Body"]) == ("56", TEXTS[56], "no such order")


TOPIC_ORDER = [50, 54, 1, 15, 9, 16, 2, 3, 21, 17, 55, 51, 10, 60, 61]
QUEUE_ORDER = [54, 1, 15, 16, 62, 2, 3, 63, 58, 60, 55, 51]
RETURN_ORDER = [50, 54, 15, 14, 18, 19, 20]
# In which order a function looks for its errors.
ORDERS = {
    **{name: TOPIC_ORDER for name in WITH_TOPIC
       if "staged" not in name and "stream" not in name and name != "subscribe_from"},
    **dict.fromkeys((*PUSHES, *TAKES, "pause", "resume", "drain", "queue_listen"), QUEUE_ORDER),
    "rpc": [50, 54, 15, 14, 16, 2, 17, 55, 51],
    **dict.fromkeys(ANSWERS, RETURN_ORDER),
    "get_data": [50, 52],
    "use": [50, 54],
}  # fmt: skip


def doubly_wrong() -> Iterator[tuple[int, int, Case]]:
    """Each function with each two of its errors that one call can have; the first, the other."""
    for function, order in ORDERS.items():
        right = RIGHT[function]
        # One case of each number and place; a key is looked at last.
        cases: dict[tuple[int, tuple[int, ...]], Case] = {}
        for case in CASES:
            if case.function == function and case.number in order and len(case.arguments) < 9:
                cases.setdefault((case.number, different(case, right)), case)
        for ((one, here), first), ((other, there), second) in combinations(cases.items(), 2):
            if one == other or {one, other} == {9, 16} or set(here) & set(there):
                continue
            longest = max(first.arguments, second.arguments, key=len)
            arguments = [*right, *[None] * (len(longest) - len(right))]
            for case, places in (first, here), (second, there):
                for place in places:
                    arguments[place] = case.arguments[place]
            number = min(one, other, key=order.index)
            caller = "nobody" if "nobody" in (first.caller, second.caller) else "me"
            yield one, other, Case(number, function, tuple(arguments), caller=caller)


def different(case: Case, right: tuple[Any, ...]) -> tuple[int, ...]:
    """At which places the arguments of a case are not the right ones."""
    return tuple(
        place for place, value in enumerate(case.arguments)
        if value != (right[place] if place < len(right) else None)
    )  # fmt: skip


def test_of_two_errors_the_first_in_order_is_answered(nodes: ErrorNodes):
    wrong, cases = [], [*doubly_wrong()]
    for one, other, case in cases:
        found = getattr(nodes, case.caller).error(case.function, *case.arguments)[0]
        if found != case.number:
            wrong.append(f"{one} and {other} of {case!r}: {found}")
    assert not wrong
    assert len(cases) > 400


def test_a_role_without_a_rule_can_act_as_no_node(nodes: ErrorNodes):
    hostile = nodes.world.program("hostile")
    expected = {
        **dict.fromkeys(WITH_TOPIC, 50), **dict.fromkeys((*AS_NODE, *WITH_QUEUE), 2),
        "init": 5, "connect_stream": 5, "use": 50, "rpc": 50,
    }  # fmt: skip
    assert {name: hostile.error(name, *RIGHT[name])[0] for name in expected} == expected
    # Nor ends the node of another.
    assert [p.ok("deinit", "ME")["Already"] for p in (hostile, nodes.other)] == [1, 1]
    assert nodes.other.error("topic_send_as", "ME", "WRITE", "x")[0] == 2
    nodes.me.ok("topic_send", "BOTH", "x")


def test_a_name_of_100_characters_and_a_token_of_1000_bytes_are_not_too_long(nodes: ErrorNodes):
    assert nodes.me.error("topic_listen", "ü" * 100)[0] == 9
    assert nodes.me.error("init", "ü" * 100)[0] == 5
    nodes.me.ok("rpc", "OTHER", "ü" * 500, "body")
    nodes.me.ok("topic_send", "BOTH", "body", "ü" * 500)


def test_a_body_of_exactly_the_maximum_is_sent(nodes: ErrorNodes):
    for case in wrong(0, [*SENDS, *PUBLISHES, "rpc"], "body", "x" * 8192, "ü" * 4096):
        nodes.me.ok(case.function, *case.arguments)
