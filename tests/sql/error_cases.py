"""The error table of the protocol as calls that must be refused, one for each row and function."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any, NamedTuple

# The table of the documentation.
DOCS = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| (\d+) \| (.*?) \|", re.MULTILINE)
TEXTS = {int(number): text for number, text in ROW.findall(DOCS.read_text())}

RULES = [
    "user1 ME Rpc OTHER W 5",
    "user1 ME Rpc ABSENT W 5",
    "user1 ME Topic BOTH RW 1000",
    "user1 ME Topic WRITE W 10",
    "user1 ME Topic QUIET W 10",
    "user1 ME Topic READ R 10",
    "user1 ME Topic WATCH O 10",
    "user1 AWAY Topic BOTH W 10",
    "user1 AWAY Topic QUIET W 10",
    "user1 AWAY Topic READ R 10",
    "user2 ME Topic BOTH R 10",
    "user2 OTHER Topic BOTH RW 10",
    "user2 OTHER Topic WRITE R 10",
    "user2 OTHER Topic READ W 10",
    "user2 OTHER Topic ELSEWHERE RW 10",
    "user2 ABSENT Topic ELSEWHERE R 10",
    "user3 ASKER* Rpc OTHER W 10",
    "user1 ME Queue QBOTH RW 10",
    "user1 ME Queue QREAD R 10",
    "user1 ME Queue QWRITE W 10",
    "user2 OTHER Queue QELSE RW 10",
]

LONG = "x" * 101
LONG_TOKEN = "x" * 1001
BIG = "x" * 8193
FORGED = "0" * 32 + " 5 TOKEN"
EXPIRED = f"5.0.1000000000000.{'0' * 32}"
UNKNOWN = f"5.0.999999999999999.{'0' * 32}"
TOO_BIG = {"size": 8193, "max": 8192}

# Each function that has a topic, with arguments that are right but for the topic.
WITH_TOPIC: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    **{
        f"topic_{name}": lambda topic: (topic,)
        for name in (
            "auth", "status", "notify", "unnotify", "listen", "unlisten", "observe", "unobserve",
        )
    },
    "topic_send": lambda topic: (topic, "body"),
    "topic_send_many": lambda topic: (topic, ["body"]),
    "topic_send_as": lambda topic: ("ME", topic, "body"),
    "topic_status_as": lambda topic: ("ME", topic),
    "publish": lambda topic: ("ME", topic, "body"),
    "publish_many": lambda topic: ("ME", topic, ["body"]),
    "subscribe": lambda topic: ("ME", topic),
    "unsubscribe": lambda topic: ("ME", topic),
    "subscription": lambda topic: ("ME", topic),
    "stream_horizons": lambda topic: ("ME", [topic]),
    "subscribe_from": lambda topic: ("ME", [topic], [0], 60),
    "publish_staged": lambda topic: ("ME", topic, "query", 0, [], 0),
}  # fmt: skip
SENDS = ("topic_send", "topic_send_many", "topic_send_as")
PUBLISHES = ("publish", "publish_many")
# Their first argument is the node.
AS_NODE = (
    "topic_send_as", "topic_status_as", *PUBLISHES, "subscribe", "unsubscribe", "subscription",
    "stream_horizons", "subscribe_from", "publish_staged",
)  # fmt: skip
ANSWERS = ("return", "return_error")
ASKING = ("rpc", *ANSWERS)
MODES = {
    "W": ("topic_notify", "topic_unnotify", *SENDS, *PUBLISHES, "publish_staged"),
    "R": (
        "topic_listen",
        "topic_unlisten",
        "subscribe",
        "subscription",
        "stream_horizons",
        "subscribe_from",
    ),
    "O": ("topic_observe", "topic_unobserve"),
}
# Each function that has a queue, with arguments that are right but for the queue.
WITH_QUEUE: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "push": lambda queue: ("ME", queue, "body"),
    "push_many": lambda queue: ("ME", queue, ["body"]),
    "remove": lambda queue: ("ME", queue, 1),
    "deliver": lambda queue: ("ME", queue, *[[]] * 10),
    "renew": lambda queue: ("ME", queue, 5.0, LEASE),
    "push_staged": lambda queue: ("ME", queue, "query", 0, [], 0),
    **{
        name: lambda queue: ("ME", queue)
        for name in ("pop", "reserve", "take", "pause", "resume", "drain", "sizes", "queue_listen")
    },
}
PUSHES = ("push", "push_many")
TAKES = ("pop", "reserve", "take")
LEASES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "commit": lambda lease: ("ME", lease),
    "rollback": lambda lease: ("ME", None, lease),
    "release": lambda lease: ("ME", lease),
}
DELAY = "0 to 1,000,000,000 seconds are needed"
TIME = "a delay of 0 to 1,000,000,000 seconds, or a mature from 1970 to 9000"
HEADERS = "a JSON object of at most 64 KiB is needed"
LEASE = "5.00000000-0000-0000-0000-000000000000"
QUEUE_MODES = {
    "W": (*PUSHES, "push_staged"),
    "R": (*TAKES, "queue_listen", "deliver", "renew"),
    "RW": ("remove", "pause", "resume", "drain"),
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
        """The text of the error."""
        return Template(TEXTS[self.number]).substitute(self.values)

    def __repr__(self) -> str:
        arguments = ",".join(str(argument)[:12] for argument in self.arguments)
        return f"{self.number}-{self.function}({arguments})"


def bodies(body: str) -> dict[str, Any]:
    """The last argument of each function that sends: the body, or an array with it."""
    return {
        "topic_send": body, "topic_send_many": ["small", body], "topic_send_as": body,
        "publish": body, "publish_many": ["small", body],
    }  # fmt: skip


CASES = [
    *(
        Case(1, name, arguments(topic))
        for name, arguments in WITH_TOPIC.items()
        for topic in ("", None)
    ),
    *(
        Case(2, name, arguments("ELSEWHERE"), {"type": "Topic", "dest": "ELSEWHERE"})
        for name, arguments in WITH_TOPIC.items()
    ),
    Case(2, "rpc", ("ME", "TOKEN", "body"), {"type": "Rpc", "dest": "ME"}),
    *(
        Case(3, name, WITH_TOPIC[name](topic), {"mode": mode, "type": "Topic", "dest": topic})
        for mode, topic in map(str.split, ["W READ", "W WATCH", "R WRITE", "R WATCH", "O BOTH"])
        for name in MODES[mode]
    ),
    *(Case(4, name, (ident,)) for name in ("init", "connect_stream") for ident in ("", None)),
    *(
        Case(5, name, (ident,), {"ident": ident})
        for name in ("init", "connect_stream")
        for ident in ("NOBODY", "OTHER")
    ),
    *(
        Case(9, name, arguments(topic), {"topic": topic})
        for name, arguments in WITH_TOPIC.items()
        for topic in ("NOWHERE", "both", "100% 'of'\n$topic")
    ),
    *(
        Case(10, name, WITH_TOPIC[name]("QUIET"), {"topic": "QUIET"})
        for name in SENDS
    ),
    Case(12, "get_data", (json.dumps({"Dkey": EXPIRED}),), {"dkey": EXPIRED}),
    Case(13, "get_data", (json.dumps({"Dkey": UNKNOWN}),), {"dkey": UNKNOWN}),
    Case(13, "get_data", ('{"Dkey":"junk"}',), {"dkey": "junk"}),
    *(
        Case(14, name, ("OTHER", token, "body"))
        for name in ASKING
        for token in ("", None)
    ),
    *(
        Case(15, name, (node, FORGED, "body"))
        for name in ASKING
        for node in ("", None)
    ),
    *(
        Case(15, name, (ident, *WITH_TOPIC[name]("BOTH")[1:]))
        for name in AS_NODE
        for ident in ("", None)
    ),
    Case(16, "rpc", ("NOBODY", "TOKEN", "body"), {"ident": "NOBODY"}),
    *(
        Case(16, name, (ident, *WITH_TOPIC[name]("BOTH")[1:]), {"ident": ident})
        for name in AS_NODE
        for ident in ("NOBODY", "ME*")
    ),
    Case(17, "rpc", ("ABSENT", "TOKEN", "body"), {"ident": "ABSENT"}),
    Case(17, "topic_send_as", ("AWAY", "BOTH", "body", "TOKEN"), {"ident": "AWAY"}),
    *(
        Case(18, name, ("OTHER", token, "body"))
        for name in ANSWERS
        for token in (
            "junk", "0" * 32, "0" * 31 + " 5 TOKEN", "0" * 32 + " x TOKEN", "0" * 32 + " 5 ",
            "0" * 32 + "  5 TOKEN", "G" * 32 + " 5 TOKEN",
        )
    ),
    *(Case(19, name, ("NOBODY", FORGED, "body"), {"ident": "NOBODY"}) for name in ANSWERS),
    *(
        Case(20, name, (dest, token, "body"), {"ident": "ME", "dest": dest, "token": token})
        for name in ANSWERS
        for dest in ("OTHER", "ABSENT")
        for token in (FORGED, "1." + FORGED)
    ),
    *(
        Case(21, name, WITH_TOPIC[name]("WRITE"), {"ident": "ME", "topic": "WRITE"})
        for name in ("topic_send", "topic_send_many")
    ),
    *(
        Case(50, name, arguments("BOTH"), caller="nobody")
        for name, arguments in WITH_TOPIC.items()
        if name not in AS_NODE
    ),
    *(Case(50, name, ("OTHER", FORGED, "body"), caller="nobody") for name in ASKING),
    Case(50, "get_data", ('{"Dkey":"junk"}',), caller="nobody"),
    Case(50, "use", ("ME",), caller="nobody"),
    Case(50, "audience", ('{"Type":"Sys","Evt":"connect","Ident":"OTHER"}',), caller="nobody"),
    *(
        Case(51, name, (*WITH_TOPIC[name]("BOTH")[:-1], body), TOO_BIG)
        for name, body in bodies(BIG).items()
    ),
    *(
        Case(51, name, (*WITH_TOPIC[name]("BOTH")[:-1], body), {"size": 8194, "max": 8192})
        for name, body in bodies("ü" * 4097).items()
    ),
    Case(51, "rpc", ("OTHER", "TOKEN", BIG), TOO_BIG),
    *(
        Case(52, "get_data", (message,))
        for message in (
            "", None, "junk", "{}", "[]", '"text"', '{"Dkey":null}', '{"Dkey":"5.0',
            '{"Dkey":"\\u0000"}', '{"Dkey":"\\ud800"}', '\n{"Dkey":"junk"}',
        )
    ),
    *(Case(52, "audience", (event,)) for event in ("", None, "junk", "{}", '{"Evt":"\\u0000"}')),
    *(Case(52, name, ("[" * 100_000,)) for name in ("get_data", "audience")),
    Case(53, "use", ("OTHER",), {"ident": "OTHER"}),
    Case(53, "use", ("NOBODY",), {"ident": "NOBODY"}),
    *(Case(54, name, arguments(LONG)) for name, arguments in WITH_TOPIC.items()),
    *(Case(54, name, (LONG,)) for name in ("init", "deinit", "crash", "use", "connect_stream")),
    *(Case(54, name, (LONG, FORGED, "body")) for name in ASKING),
    Case(54, "rpc", ("OTHER", LONG_TOKEN, "body")),
    *(Case(54, name, ("OTHER", "1." + FORGED + "x" * 1100, "body")) for name in ANSWERS),
    Case(54, "rpc", ("OTHER", "ü" * 501, "body")),
    *(Case(54, name, (LONG, *WITH_TOPIC[name]("BOTH")[1:])) for name in AS_NODE),
    *(
        Case(54, name, (*WITH_TOPIC[name](topic), token))
        for name in SENDS
        for topic in ("BOTH", "WRITE")
        for token in (LONG_TOKEN, "ü" * 501)
    ),
    *(
        Case(55, name, (*WITH_TOPIC[name]("BOTH"), None, "gzip"), {"enc": "gzip"})
        for name in SENDS
    ),
    *(
        Case(55, name, (*WITH_TOPIC[name]("BOTH"), enc), {"enc": enc})
        for name in PUBLISHES
        for enc in ("gzip", "")
    ),
    Case(55, "rpc", ("OTHER", "TOKEN", "body", "B64"), {"enc": "B64"}),
    *(
        Case(60, "subscribe", ("ME", "BOTH", timeout), {"argument": "timeout"})
        for timeout in (0, -1, None)
    ),
    *(
        Case(60, "subscribe", ("ME", "BOTH", 60, max_rows), {"argument": "max_rows"})
        for max_rows in (0, -1, None)
    ),
    Case(61, "subscription", ("ME", "BOTH"), {"ident": "ME", "topic": "BOTH"}),
    *(Case(1, name, given(queue)) for name, given in WITH_QUEUE.items() for queue in ("", None)),
    *(
        Case(2, name, given("QELSE"), {"type": "Queue", "dest": "QELSE"})
        for name, given in WITH_QUEUE.items()
    ),
    *(
        Case(3, name, WITH_QUEUE[name](queue), {"mode": mode, "type": "Queue", "dest": queue})
        for mode, queue in map(str.split, ["W QREAD", "R QWRITE", "RW QREAD", "RW QWRITE"])
        for name in QUEUE_MODES[mode]
    ),
    *(
        Case(number, name, (ident, *given("QBOTH")[1:]), {"ident": ident})
        for name, given in WITH_QUEUE.items()
        for number, ident in ((15, ""), (15, None), (16, "NOBODY"), (16, "ME*"), (54, LONG))
    ),
    *(Case(54, name, given(LONG)) for name, given in WITH_QUEUE.items()),
    *(Case(62, name, given("Q*"), {"queue": "Q*"}) for name, given in WITH_QUEUE.items()),
    Case(62, "sizes", ("ME", "QREAD"), {"queue": "QREAD"}),
    *(
        Case(number, name, (ident, *given(LEASE)[1:]), {"ident": ident})
        for name, given in LEASES.items()
        for number, ident in ((15, ""), (15, None), (16, "NOBODY"), (54, LONG))
    ),
    *(
        Case(63, name, given(lease), {"argument": "lease", "value": lease})
        for name, given in LEASES.items()
        for lease in ("", "junk", "5", LEASE + "0")
    ),
    Case(63, "rollback", ("ME", -1.0, LEASE), {"argument": "delay", "value": DELAY}),
    *(
        Case(58, name, (*given(LEASE)[:-1], [LEASE] * 4097), {"limit": "4096 leases"})
        for name, given in LEASES.items()
    ),
    *(Case(58, name, ("ME", "QBOTH", 4097), {"limit": "4096 elements"}) for name in TAKES),
    *(
        Case(60, name, ("ME", "QBOTH", count), {"argument": "count"})
        for name in TAKES
        for count in (0, -1, None)
    ),
    *(
        Case(60, "reserve", ("ME", "QBOTH", 1, duration), {"argument": "duration"})
        for duration in (0.0, -1.0, None)
    ),
    *(
        Case(51, name, ("ME", "QBOTH", body), TOO_BIG)
        for name, body in zip(PUSHES, (BIG, ["small", BIG]), strict=True)
    ),
    *(
        Case(55, name, (*WITH_QUEUE[name]("QBOTH"), "gzip"), {"enc": "gzip"})
        for name in PUSHES
    ),
    Case(
        63, "push", ("ME", "QBOTH", "body", None, "[]"), {"argument": "headers", "value": HEADERS}
    ),
    Case(
        63, "push_many", ("ME", "QBOTH", ["body"], None, ["[]"]),
        {"argument": "headers", "value": HEADERS},
    ),
    *(
        Case(
            63, name, (*WITH_QUEUE[name]("QBOTH"), None, None, None, -1.0),
            {"argument": "time", "value": TIME},
        )
        for name in PUSHES
    ),
    *(
        Case(
            63, name, (*WITH_QUEUE[name]("QBOTH"), None, None, None, None, -1),
            {"argument": "tries", "value": "-1"},
        )
        for name in PUSHES
    ),
    Case(54, "push", ("ME", "QBOTH", "body", None, None, None, None, 0, "k" * 201)),
    Case(
        58, "deliver", ("ME", "QBOTH", ["5"] * 4097, *[[]] * 9),
        {"limit": "4096 elements or 65536 copies"},
    ),
    Case(
        63, "deliver", ("ME", "QBOTH", ["junk"], *[[]] * 9),
        {"argument": "element", "value": "junk"},
    ),
    # Of the functions for pipelines, besides those for their names.
    *(
        Case(60, "subscribe_from", ("ME", ["BOTH"], [0], timeout), {"argument": "timeout"})
        for timeout in (0, -1, None)
    ),
    *(
        Case(60, "stream_horizons", ("ME", ["BOTH"], None, rows), {"argument": "max_rows"})
        for rows in (0, -1)
    ),
    *(
        Case(63, "stream_horizons", ("ME", ["BOTH"], after), {"argument": "after", "value": after})
        for after in ("[]", "5", '{"BOTH":"x"}', '{"BOTH":99999999999999999999}', '{"BOTH":1.5}')
    ),
    *(
        Case(
            63, "subscribe_from", ("ME", ["BOTH"], positions, 60),
            {"argument": "positions", "value": text},
        )
        for positions, text in (
            ([], "{}"), ([1, 2], "{1,2}"), ([-1], "{-1}"), ([None], "{NULL}"), (None, "null"),
        )
    ),
    *(Case(1, name, ("ME", topics, *more)) for topics in ([], None) for name, more in (
        ("stream_horizons", ()), ("subscribe_from", ([], 60)),
    )),
    Case(9, "subscribe_from", ("ME", ["BO*"], [0], 60), {"topic": "BO*"}),
    *(
        Case(63, "renew", ("ME", "QBOTH", 5.0, lease), {"argument": "lease", "value": lease})
        for lease in ("", "junk", "5", LEASE + "0")
    ),
    *(
        Case(60, "renew", ("ME", "QBOTH", duration, LEASE), {"argument": "duration"})
        for duration in (0.0, -1.0, None)
    ),
    Case(58, "renew", ("ME", "QBOTH", 5.0, [LEASE] * 4097), {"limit": "4096 leases"}),
    *(
        Case(number, name, ("ME", dest, query, batch, [], rows), values)
        for name, dest in (("publish_staged", "BOTH"), ("push_staged", "QBOTH"))
        for number, query, batch, rows, values in (
            (54, "", 0, 0, {}),
            (54, "q" * 201, 0, 0, {}),
            (63, "query", None, 0, {"argument": "batch", "value": "null"}),
            (63, "query", -1, 0, {"argument": "batch", "value": "-1"}),
            (64, "query", 0, 5, {"n": 0, "m": 5}),
            (64, "query", 0, None, {"n": 0, "m": "null"}),
        )
    ),
    *(
        Case(63, "unstage", (staging,), {"argument": "staging", "value": staging})
        for staging in ("", "junk", LEASE)
    ),
]  # fmt: skip
