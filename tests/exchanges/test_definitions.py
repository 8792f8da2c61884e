"""Definitions of exchanges: all errors are reported together, each with its place."""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import Settings

from psqlmessages.exchanges import SelectorsUnavailable, compiler
from psqlmessages.exchanges.model import QueueRef
from psqlmessages.exchanges.store import definitions, files
from psqlmessages.models.exchanges import MAX_PARALLEL, MAX_WSIZE
from psqlmessages.wire import MalformedText
from tests.exchanges.asking import exchange, routed
from tests.exchanges.conftest import namespace

COUNTRY = 'msg.headers["country"] == "it"'
EU = {"ns": "default", "queue": "eu", "selector": COUNTRY}
X1: dict[str, Any] = {
    "consumer": {"parallel": 2, "wsize": 50, "reserve": False},
    "src": {"ns": "default", "queue": "orders"},
    "dst": [EU, {"queue": "audit"}],
}


def faults(read: Callable[..., object], *given: Any) -> list[str]:
    with pytest.raises(definitions.MalformedExchanges) as raised:
        read(*given)
    return [str(fault) for fault in raised.value.errors]


def told(document: Any) -> list[str]:
    return faults(definitions.parse_document, document)


def told_of(**changes: Any) -> list[str]:
    return told({"exchanges": {"x1": {**X1, **changes}}})


def test_an_exchange_is_read_with_its_defaults_and_written_again():
    a, audit, b = (QueueRef("default", name) for name in ("a", "audit", "b"))
    dst = [*X1["dst"], {"queue": "b", "selector": None}]
    read = definitions.parse_document({"exchanges": {"x": {"src": {"queue": "a"}, "dst": dst}}})
    queues = (QueueRef("default", "eu"), COUNTRY), (audit,), (b,)
    destinations = tuple(definitions.DefinedDestination(*each) for each in queues)
    usual = {"parallel": 1, "wsize": 100, "reserve": True}
    assert read == (definitions.DefinedExchange("x", a, destinations, **usual),)
    written = {"exchanges": {"x1": {**X1, "dst": [EU, {"ns": "default", "queue": "audit"}]}}}
    assert definitions.to_document(definitions.parse_document({"exchanges": {"x1": X1}})) == written
    written["exchanges"]["x1"]["no_route"] = "discard"
    assert definitions.to_document(definitions.parse_document(written)) == written
    assert definitions.parse_text("exchanges: {}") == ()


def test_the_ends_of_the_bounds_are_within():
    for changes in (
        {"consumer": {"parallel": 1, "wsize": 1}},
        {"consumer": {"parallel": MAX_PARALLEL, "wsize": MAX_WSIZE}},
        {"src": {"queue": "q" * 100}},
        {"src": {"queue": "a*b"}},
        {"dst": [{"queue": "a"}] * definitions.MAX_DESTINATIONS},
    ):
        assert definitions.parse_document({"exchanges": {"x" * 90: {**X1, **changes}}})


def test_all_errors_are_reported_together_each_with_its_place():
    x1 = {
        "consumer": {"parallel": 17, "wsize": 0, "x": 2},
        "src": {"ns": "nowhere", "queue": ""},
        "dst": [{"queue": "a", "selector": "msg."}, {"queue": "eu*"}],
    }
    x2 = {"src": {"queue": "a"}, "dst": []}
    found = told({"exchanges": {"x1": x1, "x2*": x2}, "queues": {}})
    (about_selector,) = (fault for fault in found if ".selector: " in fault)
    assert about_selector.startswith("exchanges.x1.dst[0].selector: ")
    assert [fault for fault in found if fault != about_selector] == [
        "queues: Unknown field; the fields are exchanges.",
        "exchanges.x1.consumer.x: Unknown field; the fields are parallel, wsize, reserve.",
        "exchanges.x1.consumer.parallel: It is 17, but must be 1 to 16.",
        "exchanges.x1.consumer.wsize: It is 0, but must be 1 to 4,096.",
        "exchanges.x1.src.ns: Unknown namespace 'nowhere': DATABASES has default.",
        "exchanges.x1.src.queue: It is empty.",
        "exchanges.x1.dst[1].queue: 'eu*' ends in *: this is a pattern, not a name.",
        "exchanges['x2*']: 'x2*' ends in *: this is a pattern, not a name.",
        "exchanges['x2*'].dst: An exchange must have 1 to 1,000 destinations.",
    ]
    many = told_of(dst=[{"queue": ""}] * 50)
    assert (len(many), many[-1]) == (21, "And 30 more.")


def test_other_documents_than_exchanges_are_refused():
    cases: list[tuple[Any, str]] = [
        (None, "None is not a map of exchanges."),
        ({}, "exchanges: It is missing."),
        (
            {"exchanges": {"x": None}},
            "exchanges.x: None is not a map of consumer, src, dst, no_route, running.",
        ),
        ({"exchanges": {7: X1}}, "exchanges: The name 7 is not text: put it in quotes."),
        ({"exchanges": {"": X1}}, "exchanges['']: It is empty."),
        ({"exchanges": {"x" * 91: X1}}, "It has 91 characters; at most 90 are allowed."),
        ({"exchanges": {"a\0": X1}}, "contains a character that PostgreSQL cannot store."),
        ({"exchanges": {"x": {"dst": X1["dst"]}}}, "exchanges.x.src: It is missing."),
        ({"exchanges": {"x": {"src": X1["src"]}}}, "exchanges.x.dst: It is missing."),
    ]
    assert [fault for document, fault in cases if not told(document)[0].endswith(fault)] == []


DEAD_END = "All its elements have too many hops: an exchange cannot move them."
NO_FIELD = "Unknown field; the fields are"
NO_TEXT = "is not text: put it in quotes."
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"consumer": {"parallel": True}}, "consumer.parallel: True is not a whole number."),
    ({"consumer": {"reserve": "no"}}, "consumer.reserve: 'no' is not true or false."),
    ({"consumer": None}, "consumer: None is not a map of parallel, wsize, reserve."),
    ({"src": {}}, "src.queue: It is missing."),
    ({"src": {"queue": "__too_many_hops__"}}, f"src.queue: {DEAD_END}"),
    ({"src": {"queue": "q" * 101}}, "src.queue: It has 101 characters; at most 100 are allowed."),
    ({"src": {"queue": "\ud800"}},
     r"src.queue: '\ud800' contains a character that PostgreSQL cannot store."),
    ({"src": {"queue": "a", "ns": None}}, f"src.ns: None {NO_TEXT}"),
    ({"src": {"queue": "a", "selector": ""}}, f"src.selector: {NO_FIELD} ns, queue."),
    ({"dst": {"queue": "a"}}, "dst: {'queue': 'a'} is not a list."),
    ({"dst": [EU] * (definitions.MAX_DESTINATIONS + 1)},
     "dst: An exchange must have 1 to 1,000 destinations."),
    ({"dst": ["eu"]}, "dst[0]: 'eu' is not a map of ns, queue, selector."),
    ({"dst": [{"queue": "b", "selector": {"delay": 30}}]},
     f"dst[0].selector: {{'delay': 30}} {NO_TEXT}"),
    ({"run": True}, f"run: {NO_FIELD} consumer, src, dst, no_route, running."),
    ({"no_route": "drop"}, "no_route: It is 'drop', but must be queue or discard."),
]  # fmt: skip


def test_an_exchange_that_cannot_be_is_refused():
    for changes, fault in WRONG:
        assert told_of(**changes) == [f"exchanges.x1.{fault}"]


words = st.sampled_from([*X1, *X1["src"], *X1["consumer"], "selector", "exchanges"])
anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
)


@given(st.dictionaries(words, anything) | anything, st.binary(max_size=200) | st.text(max_size=200))
def test_anything_is_read_or_refused_with_a_sentence(document: Any, text: bytes | str):
    with contextlib.suppress(definitions.MalformedExchanges):
        definitions.parse_document({"exchanges": {"x": document}})
    with contextlib.suppress(definitions.MalformedExchanges):
        definitions.parse_text(text)


characters = st.characters(codec="utf-8", exclude_characters="\0")
names = st.sampled_from(["no", "true", "12", "~", "1e3", "<<", "- a", "a: b"]) | st.text(
    characters, min_size=1, max_size=90
).filter(lambda name: not name.endswith("*") and name != "__too_many_hops__")
queues = st.builds(QueueRef, st.just("default"), names)
selectors = st.sampled_from(["", "true", 'msg.body == "ü\\n"'])
destination = st.builds(definitions.DefinedDestination, queues, selectors)
destinations = st.lists(destination, min_size=1, max_size=3)
bounded = st.integers(1, MAX_PARALLEL), st.integers(1, MAX_WSIZE), st.booleans()
exchanges = st.builds(definitions.DefinedExchange, names, queues, destinations.map(tuple), *bounded)


@given(st.lists(exchanges, max_size=3, unique_by=lambda exchange: exchange.name))
def test_written_definitions_are_read_again(some: list[definitions.DefinedExchange]):
    document = definitions.to_document(some)
    ordered = tuple(sorted(some, key=lambda exchange: exchange.name))
    assert definitions.parse_text(files.write_yaml(document).encode()) == ordered
    assert definitions.parse_text(files.write_json(document)) == ordered


class NoMessages:
    def allow_migrate(self, db: str, app_label: str, **_: object) -> bool | None:
        return None if db != "away" else app_label != "psqlmessages"


def test_a_namespace_is_a_database_with_the_app(away: None, settings: Settings):
    with namespace("lite", ENGINE="django.db.backends.sqlite3"):
        assert told_of(dst=[{"queue": "eu", "ns": "lite"}]) == [
            "exchanges.x1.dst[0].ns: Database 'lite' is SQLite, but queues need PostgreSQL."
        ]
        assert definitions.namespaces() == ["default", "away"]
    there = {"ns": "away", "queue": "a"}
    assert definitions.parse_document({"exchanges": {"x": {**X1, "src": there}}})
    settings.DATABASE_ROUTERS = ["tests.exchanges.test_definitions.NoMessages"]
    assert told_of(dst=[{"queue": "eu", "ns": "away"}]) == [
        "exchanges.x1.dst[0].ns: A database router excludes psqlmessages from database 'away'."
    ]


def fault(text: bytes | str) -> str:
    with pytest.raises(MalformedText) as raised:
        files.parse(text)
    return raised.value.sentence()


def test_a_plain_word_is_text_but_for_whole_numbers_booleans_and_null():
    words = [
        "no", "yes", "on", "off", "y", "012", "0x10", "1_000", "1:30", "1.5", ".inf", "=", "<<",
        "2026-11-21", "1e3", "99999999999999999999999999",
    ]  # fmt: skip
    assert [files.parse(f"queue: {word}") for word in words] == [{"queue": w} for w in words]
    values = {"true": True, "FALSE": False, "~": None, "": None, "-12": -12, "'12'": "12"}
    assert {word: files.parse(f"key: {word}")["key"] for word in values} == values
    # Text that begins with a brace is JSON, even after a byte order mark.
    assert files.parse(b'\xef\xbb\xbf \n{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    same = {"src": {"queue": "a"}}
    document = {"exchanges": {"x": same, "y": same}}
    assert files.parse(files.write_yaml(document)) == document


NO_YAML: list[tuple[str, str]] = [
    ("a: &x [1]\nb: *x",
     "line 2, column 4: aliases (*name) are not supported: write the value out"),
    ("a: !!python/object/apply:os.system [ls]", "line 1, column 4: tags (!name) are not supported"),
    ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' occurs twice"),
    ("? [a]\n: 1", "line 1, column 3: a key must not be a list or a map"),
    ("a: [1", "line 1, column 6: expected ',' or ']', but got '<stream end>'"),
    ("\ta: 1", "line 1, column 1: found character '\\t' that cannot start any token"),
    ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
    ("[" * 50_000, "line 1, column 21: it is nested too deeply"),
    ("a: \ud800", "position 3: '\\ud800' is not a valid YAML character"),
]  # fmt: skip
NO_JSON: list[tuple[bytes | str, str]] = [
    ('{"a": 1, "a": 2}', "It is not JSON: an object has the field 'a' twice."),
    (b'{"a": "\xff"}', "It is not UTF-8 text: byte 7 is not valid."),
    ("a" * (2**20 + 1), "It has 1,048,577 bytes; at most 1,048,576 are allowed."),
]


def test_ambiguous_text_is_refused_with_its_place():
    for text, told in NO_YAML:
        assert fault(text) == f"It is invalid or unsupported YAML: {told}."
    for document, told in NO_JSON:
        assert fault(document) == told
    assert len(faults(definitions.parse_text, "exchanges: [")) == 1
    x = json.dumps(X1)
    for twice in (f'{{"exchanges": {{"x": {x}, "x": {x}}}}}', f"exchanges:\n  x: {x}\n  x: {x}"):
        with pytest.raises(definitions.MalformedExchanges, match="twice"):
            definitions.parse_text(twice)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    compiler.get_environment.cache_clear()
    compiler.compile_expression.cache_clear()
    assert "dst[0].selector: expressions need the package cel-expr-python" in told_of()[0]
    assert routed("").outcome == "ok"
    with pytest.raises(SelectorsUnavailable, match=r"pip install 'psqlmessages\[exchanges\]'"):
        exchange("true")
    monkeypatch.setattr(files, "yaml", None)
    assert files.parse('{"a": 1}') == {"a": 1}
    with pytest.raises(files.YAMLMissing, match=r"pip install 'psqlmessages\[exchanges\]'"):
        files.parse("a: 1")
