"""A node pushes, takes and settles: what comes back, and what is refused."""

import math
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from psqlmessages import Node, Options
from psqlmessages import exceptions as errors
from tests.queues.client.conftest import SOON
from tests.sql.conftest import World

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
ALLOWED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def kinds(value: Any) -> Any:
    """The types of a JSON value, all the way down."""
    if isinstance(value, dict):
        return {name: kinds(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [kinds(inner) for inner in value]
    return type(value)


@settings(max_examples=50, suppress_health_check=ALLOWED)
@example(body="x" * 2**20, headers={})
@example(body=b"\0" * 2**20, headers={})
@example(body=b"", headers={})
@example(body="", headers={'"1e+30\\': [1e16, -3.5e300, "1e+30", 1e-300]})
@given(body=TEXT | st.binary(max_size=40) | JSON, headers=st.dictionaries(TEXT, JSON, max_size=4))
def test_body_and_headers_survive(writer: Node, reader: Node, body: Any, headers: dict[str, Any]):
    id_ = writer.push("Q", body, headers=headers)
    (element,) = reader.pop("Q", 5)
    assert (element.id, element.queue, element.body) == (id_, "Q", body)
    assert type(element.body) is type(body)
    assert element.headers == headers
    assert kinds(element.headers) == kinds(headers)


def test_an_element_that_is_not_reserved_can_be_removed(writer: Node, reader: Node):
    ids = writer.push_many("Q", ["a", "b"])
    reader.reserve("Q")
    assert [reader.remove("Q", id_) for id_ in (*ids, 10**12)] == [False, True, False]


def test_a_malformed_body_raises_when_it_is_read(queues: World, reader: Node):
    queues.program("user1").ok("push", "WRITER", "Q", "{", "json")
    (element,) = reader.reserve("Q")
    with pytest.raises(errors.MessagesError, match=rf"element {element.id} of Q is malformed"):
        _ = element.body
    assert reader.commit(element)


def test_a_refusal_is_an_error_of_its_number(writer: Node, reader: Node):
    refused: list[tuple[type[errors.MessagesError], Any]] = [
        (errors.ModeNotAuthorized, lambda: writer.pop("Q")),
        (errors.ModeNotAuthorized, lambda: writer.pop("Q", timeout=SOON)),
        (errors.ModeNotAuthorized, lambda: reader.push("Q.1", "x")),
        (errors.DestinationNotAuthorized, lambda: writer.push("OTHER", "x")),
        (errors.QueueNotExistent, lambda: reader.sizes("Q")),
        (errors.NotPositive, lambda: reader.pop("Q", 0)),
        (errors.NotPositive, lambda: reader.reserve("Q", 1, timedelta(0))),
        (errors.LimitReached, lambda: reader.pop("Q", 5000)),
        (errors.NameTooLong, lambda: writer.push("Q", "x", key="k" * 201)),
        (errors.MalformedArgument, lambda: reader.commit("not a lease")),
        (errors.MalformedArgument, lambda: writer.push("Q", "x", headers={"n": "\ud800"})),
        (errors.MalformedArgument, lambda: writer.push("Q", "x", headers={"n": "\0"})),
        (errors.MalformedArgument, lambda: writer.push("Q", "x", delay=-SOON)),
        (errors.MalformedArgument, lambda: writer.push("Q", "x", tries=-1)),
    ]
    for error, act in refused:
        with pytest.raises(error) as raised:
            act()
        assert type(raised.value) is error


def test_invalid_arguments_are_refused_before_the_call(writer: Node, reader: Node):
    calls = writer.counters.calls
    with pytest.raises(ValueError, match="needs a time zone"):
        writer.push("Q", "x", mature=datetime(2026, 1, 1))  # noqa: DTZ001
    for headers in ([], "{}", {1: 2}):
        with pytest.raises(TypeError, match="headers must be a mapping"):
            writer.push("Q", "x", headers=headers)
    with pytest.raises(ValueError, match="1 headers for 2 bodies"):
        writer.push_many("Q", ["a", "b"], headers=[{}])
    with pytest.raises(ValueError, match="0 keys for 1 bodies"):
        writer.push_many("Q", ["a"], keys=[])
    with pytest.raises(TypeError, match="cannot be mixed"):
        writer.push_many("Q", [b"a", "b"])
    with pytest.raises(TypeError, match="another iterable of bodies, not 'ab'"):
        writer.push_many("Q", "ab")
    for call in (partial(writer.push, "Q", "x", tries="5"), partial(reader.pop, "Q", "5")):
        with pytest.raises(TypeError, match="must be an int, not str: '5'"):
            call()
    with pytest.raises(ValueError, match="a body of type float cannot be sent"):
        writer.push("Q", math.inf)
    for text in ("\0", "\ud800"):
        with pytest.raises(ValueError, match=r"NUL|surrogate"):
            writer.push("Q", text)
    for duration, error, words in (
        ("5", TypeError, "must be a timedelta or a number of seconds, not str: '5'"),
        (True, TypeError, "must be a timedelta or a number of seconds, not bool: True"),
        (math.nan, ValueError, "must be a timedelta or a number of seconds, not NaN"),
    ):
        for call in (
            partial(writer.push, "Q", "x", delay=duration),
            partial(reader.reserve, "Q", duration=duration),
            partial(reader.pop, "Q", timeout=duration),
            partial(writer.call, "READER", "x", timeout=duration),
            partial(Options, probe_timeout=duration),
        ):
            with pytest.raises(error, match=words):
                call()
    assert writer.counters.calls == calls
    assert Options(probe_timeout=2).probe_timeout == timedelta(seconds=2)
    writer.push("Q", "later", delay=60)
    assert reader.pop("Q", timeout=0.01) == []
    writer.push("Q", "x")
    (popped,) = reader.pop("Q")
    with pytest.raises(ValueError, match="already removed"):
        reader.commit(popped)
    with pytest.raises(TypeError, match="not int"):
        reader.commit(popped.id)
