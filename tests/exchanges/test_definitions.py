"""Definitions of exchanges: what is wrong is told with its place, all of it at once."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import Settings

from psqlmessages.exchanges.messages import Place
from psqlmessages.graph import definitions, parsing
from psqlmessages.graph.entries import (
    MAX_DESTINATIONS,
    DefinedDestination,
    DefinedExchange,
    MalformedExchanges,
)
from psqlmessages.graph.namespaces import namespaces
from psqlmessages.models.exchanges import MAX_PARALLEL, MAX_WSIZE

X1: dict[str, Any] = {
    "consumer": {"parallel": 2, "wsize": 50, "reserve": False},
    "src": {"ns": "default", "queue": "orders"},
    "dst": [
        {"ns": "default", "queue": "eu", "selector": 'msg.headers["country"] == "it"'},
        {"queue": "audit"},
    ],
}


def told(document: Any) -> list[str]:
    with pytest.raises(MalformedExchanges) as raised:
        definitions.validated(document)
    return [str(fault) for fault in raised.value.faults]


def told_of(**changes: Any) -> list[str]:
    """What is wrong with x1, changed."""
    return told({"exchanges": {"x1": {**X1, **changes}}})


def told_of_target(**changes: Any) -> list[str]:
    """What is wrong with x1 whose one destination is this."""
    return told_of(dst=[{"queue": "eu", **changes}])


# What can be


def test_an_exchange_is_read_with_its_defaults() -> None:
    (found,) = definitions.validated(
        {"exchanges": {"x": {"src": {"queue": "a"}, "dst": X1["dst"]}}}
    )
    assert found == DefinedExchange(
        "x",
        Place("default", "a"),
        (
            DefinedDestination(Place("default", "eu"), 'msg.headers["country"] == "it"'),
            DefinedDestination(Place("default", "audit")),
        ),
        parallel=1,
        wsize=100,
        reserve=True,
    )


def test_what_is_read_is_written_as_it_was() -> None:
    found = definitions.validated({"exchanges": {"x1": X1}})
    target = {**X1["dst"][1], "ns": "default"}
    assert definitions.as_document(found) == {
        "exchanges": {"x1": {**X1, "dst": [X1["dst"][0], target]}}
    }


def test_a_selector_of_null_is_none() -> None:
    (found,) = definitions.validated(
        {"exchanges": {"x": {**X1, "dst": [{"queue": "a", "selector": None}]}}}
    )
    assert found.destinations[0].selector == ""


def test_no_exchanges_are_a_definition() -> None:
    assert definitions.read("exchanges: {}") == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"consumer": {"parallel": 1, "wsize": 1}},
        {"consumer": {"parallel": MAX_PARALLEL, "wsize": MAX_WSIZE}},
        {"src": {"queue": "q" * 100}},
        {"src": {"queue": "a*b"}},
        {"dst": [{"queue": "a"}] * MAX_DESTINATIONS},
    ],
)
def test_the_ends_of_the_bounds_are_within(changes: dict[str, Any]) -> None:
    assert definitions.validated({"exchanges": {"x" * 90: {**X1, **changes}}})


# What cannot


def test_all_that_is_wrong_is_told_at_once_each_with_its_place() -> None:
    document = {
        "exchanges": {
            "x1": {
                "consumer": {"parallel": 17, "wsize": 0, "x": 2},
                "src": {"ns": "nowhere", "queue": ""},
                "dst": [{"queue": "a", "selector": "msg."}, {"queue": "eu*"}],
            },
            "x2*": {"src": {"queue": "a"}, "dst": []},
        },
        "queues": {},
    }
    faults = told(document)
    (about_selector,) = (fault for fault in faults if ".selector: " in fault)
    faults.remove(about_selector)
    assert about_selector.startswith("exchanges.x1.dst[0].selector: ")
    assert faults == [
        "queues: There is no such field; the fields are exchanges.",
        "exchanges.x1.consumer.x: There is no such field; the fields are parallel, wsize, reserve.",
        "exchanges.x1.consumer.parallel: It is 17, and must be 1 to 16.",
        "exchanges.x1.consumer.wsize: It is 0, and must be 1 to 4,096.",
        "exchanges.x1.src.ns: There is no namespace 'nowhere': those of DATABASES are default.",
        "exchanges.x1.src.queue: It is empty.",
        "exchanges.x1.dst[1].queue: 'eu*' ends in *: that is a pattern, and no name.",
        "exchanges['x2*']: 'x2*' ends in *: that is a pattern, and no name.",
        "exchanges['x2*'].dst: It has 0 destinations; an exchange has 1 to 1,000.",
    ]


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (None, "None is no map of exchanges."),
        ([], "[] is no map of exchanges."),
        ({}, "exchanges: It is missing."),
        ({"exchanges": None}, "exchanges: None is no map."),
        ({"exchanges": {"x": None}}, "exchanges.x: None is no map of consumer, src, dst."),
        ({"exchanges": {7: X1}}, "exchanges: The name 7 is no text: put it in quotes."),
        ({"exchanges": {"": X1}}, "exchanges['']: It is empty."),
        ({"exchanges": {"x" * 91: X1}}, "It has 91 characters; 90 are the most."),
        ({"exchanges": {"a\0": X1}}, "holds a character that PostgreSQL cannot keep."),
    ],
)
def test_what_is_no_document_of_exchanges_is_refused(document: Any, fault: str) -> None:
    faults = told(document)
    assert faults[0].endswith(fault)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"consumer": {"parallel": "2"}}, "consumer.parallel: '2' is no whole number."),
        ({"consumer": {"parallel": True}}, "consumer.parallel: True is no whole number."),
        ({"consumer": {"wsize": 1.0}}, "consumer.wsize: 1.0 is no whole number."),
        ({"consumer": {"wsize": 4097}}, "consumer.wsize: It is 4,097, and must be 1 to 4,096."),
        ({"consumer": {"parallel": -1}}, "consumer.parallel: It is -1, and must be 1 to 16."),
        ({"consumer": {"reserve": "no"}}, "consumer.reserve: 'no' is no true or false."),
        ({"consumer": None}, "consumer: None is no map of parallel, wsize, reserve."),
        ({"src": {}}, "src.queue: It is missing."),
        ({"src": "orders"}, "src: 'orders' is no map of ns, queue."),
        (
            {"src": {"queue": "__too_many_hops__"}},
            "src.queue: All that is there has too many hops: an exchange can move none of it.",
        ),
        ({"src": {"queue": 5}}, "src.queue: 5 is no text: put it in quotes."),
        ({"src": {"queue": "q" * 101}}, "src.queue: It has 101 characters; 100 are the most."),
        (
            {"src": {"queue": "\ud800"}},
            "src.queue: '\\ud800' holds a character that PostgreSQL cannot keep.",
        ),
        ({"src": {"queue": "a", "ns": None}}, "src.ns: None is no text: put it in quotes."),
        (
            {"src": {"queue": "a", "selector": ""}},
            "src.selector: There is no such field; the fields are ns, queue.",
        ),
        ({"dst": {"queue": "a"}}, "dst: {'queue': 'a'} is no list."),
        (
            {"dst": [{"queue": "a"}] * (MAX_DESTINATIONS + 1)},
            "dst: It has 1,001 destinations; an exchange has 1 to 1,000.",
        ),
        ({"dst": ["eu"]}, "dst[0]: 'eu' is no map of ns, queue, selector."),
        ({"run": True}, "run: There is no such field; the fields are consumer, src, dst."),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(changes: dict[str, Any], fault: str) -> None:
    assert told_of(**changes) == [f"exchanges.x1.{fault}"]


@pytest.mark.parametrize("missing", ["src", "dst"])
def test_a_missing_part_is_told_once(missing: str) -> None:
    document = {part: value for part, value in X1.items() if part != missing}
    assert told({"exchanges": {"x1": document}}) == [f"exchanges.x1.{missing}: It is missing."]


def test_a_selector_that_is_a_map_in_yaml_lacks_its_quotes() -> None:
    text = 'exchanges: {x: {src: {queue: a}, dst: [{queue: b, selector: {"delay": 30}}]}}'
    with pytest.raises(MalformedExchanges) as raised:
        definitions.read(text)
    assert str(raised.value) == (
        "exchanges.x.dst[0].selector: {'delay': 30} is no text: put it in quotes."
    )


def test_a_selector_that_does_not_parse_is_told_with_line_and_column() -> None:
    (fault,) = told_of_target(selector='msg.headers["a"] ==\n  == 1')
    assert fault.startswith("exchanges.x1.dst[0].selector: ")
    assert "line 2, character 3" in fault


@pytest.mark.parametrize("selector", ["msg.list.all(x, x)", "true" + " " * 1000, "@nobody"])
def test_a_selector_out_of_its_bounds_is_refused(selector: str) -> None:
    (fault,) = told_of_target(selector=selector)
    assert fault.startswith("exchanges.x1.dst[0].selector: ")


def test_names_that_are_there_twice_are_refused_in_both_languages() -> None:
    x = json.dumps(X1)
    for text in (f'{{"exchanges": {{"x": {x}, "x": {x}}}}}', f"exchanges:\n  x: {x}\n  x: {x}"):
        with pytest.raises(MalformedExchanges, match="twice"):
            definitions.read(text)


def test_text_that_cannot_be_read_is_refused_likewise() -> None:
    with pytest.raises(MalformedExchanges) as raised:
        definitions.read("exchanges: [")
    assert len(raised.value.faults) == 1


def test_many_faults_are_counted_not_all_told() -> None:
    faults = told_of(dst=[{"queue": ""}] * 50)
    assert len(faults) == 21
    assert faults[-1] == "And 30 more."


def test_one_exchange_is_read_for_rest_with_places_of_its_own() -> None:
    with pytest.raises(MalformedExchanges) as raised:
        definitions.validated_exchange("x*", {"src": {"queue": ""}, "dst": [{}]})
    assert [str(fault) for fault in raised.value.faults] == [
        "dst[0].queue: It is missing.",
        "name: 'x*' ends in *: that is a pattern, and no name.",
        "src.queue: It is empty.",
    ]


def test_values_of_a_form_are_checked_alike() -> None:
    exchange = definitions.validated_exchange("x", X1)
    assert definitions.checked(exchange) is exchange
    wrong = DefinedExchange("x", Place("default", "a"), (), parallel=0)
    with pytest.raises(MalformedExchanges) as raised:
        definitions.checked(wrong)
    assert [fault.where for fault in raised.value.faults] == [("consumer", "parallel"), ("dst",)]


# Whatever is given

words = st.sampled_from([*X1, *X1["src"], *X1["consumer"], "selector", "exchanges"])
anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
)


@given(st.dictionaries(words, anything) | anything)
def test_whatever_is_given_is_read_or_refused_with_a_sentence(document: Any) -> None:
    with contextlib.suppress(MalformedExchanges):
        definitions.validated({"exchanges": {"x": document}})


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_whatever_text_is_given_is_read_or_refused_with_a_sentence(text: bytes | str) -> None:
    with contextlib.suppress(MalformedExchanges):
        definitions.read(text)


names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=90
).filter(lambda name: not name.endswith("*"))
places = st.builds(Place, st.just("default"), names)
exchanges = st.builds(
    DefinedExchange,
    names,
    places,
    st.lists(
        st.builds(DefinedDestination, places, st.sampled_from(["", "true", 'msg.body == "ü\\n"'])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.integers(1, MAX_PARALLEL),
    st.integers(1, MAX_WSIZE),
    st.booleans(),
)


@given(st.lists(exchanges, max_size=3, unique_by=lambda exchange: exchange.name))
def test_what_is_written_is_read_again(some: list[DefinedExchange]) -> None:
    document = definitions.as_document(some)
    ordered = tuple(sorted(some, key=lambda exchange: exchange.name))
    assert definitions.read(parsing.as_yaml(document)) == ordered
    assert definitions.read(parsing.as_json(document)) == ordered


# Namespaces


@pytest.fixture
def lite() -> Iterator[None]:
    """The namespace "lite", which is no PostgreSQL."""
    connections.settings["lite"] = {
        **connections.settings["default"], "ENGINE": "django.db.backends.sqlite3"
    }  # fmt: skip
    yield
    del connections["lite"]
    del connections.settings["lite"]


class NoMessages:
    """A router that keeps the app out of "away"."""

    def allow_migrate(self, db: str, app_label: str, **_: object) -> bool | None:
        return None if db != "away" else app_label != "psqlmessages"


def test_a_namespace_needs_postgresql(lite: None) -> None:
    assert told_of_target(ns="lite") == [
        "exchanges.x1.dst[0].ns: Database 'lite' is SQLite, and queues need PostgreSQL."
    ]
    assert namespaces() == ["default"]


def test_a_namespace_is_one_where_the_app_is(away: None, settings: Settings) -> None:
    settings.DATABASE_ROUTERS = ["tests.exchanges.test_definitions.NoMessages"]
    assert told_of_target(ns="away") == [
        "exchanges.x1.dst[0].ns: A router keeps psqlmessages out of database 'away'."
    ]


def test_a_namespace_whose_server_is_away_is_one_all_the_same(away: None) -> None:
    assert definitions.validated({"exchanges": {"x": {**X1, "src": {"ns": "away", "queue": "a"}}}})
    assert namespaces() == ["default", "away"]
