"""Selectors in code: chosen by name, may change the message, and fail without harm."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from psqlmessages import exchanges
from psqlmessages.exchanges.selectors import selector
from tests.exchanges.asking import NOW, asked, exchange, routed

Code = Callable[[Callable[[exchanges.SelectorContext], Any]], str]


@pytest.fixture
def code(monkeypatch) -> Code:
    """Register a function for this test; return the selector that names it."""
    names = (f"test.{number}" for number in count())
    monkeypatch.setattr(exchanges.selectors, "_functions", {})

    def register(function: Callable[[exchanges.SelectorContext], Any]) -> str:
        name = next(names)
        selector(name)(function)
        return f"@{name}"

    return register


def test_a_function_sees_the_message_the_state_and_the_time(code: Code):
    seen: list[exchanges.SelectorContext] = []
    routed("{'state': {'a': 1}}", code(seen.append), body={"x": [1]}, country="it")
    (env,) = seen
    headers = {"country": "it", "x-hop-count": 1}
    message = exchanges.SelectorInput({"x": [1]}, headers, 7, 2, 1, "source", "default")
    assert (env.msg, env.state, env.now) == (message, {"a": 1}, NOW)


def test_changes_in_place_apply_to_its_copy_and_later_ones(code: Code):
    def change(env: exchanges.SelectorContext) -> bool:
        env.msg.headers["lane"] = "slow"
        del env.msg.headers["old"]
        env.msg.body["lines"].append(2)
        env.state["n"] = 1
        return env.msg.headers["take"]

    for is_taken in (True, False):
        result = routed("", code(change), "state.n == 1", body={"lines": [1]}, old=1, take=is_taken)
        changed = {"take": is_taken, "lane": "slow", "x-hop-count": 1}
        expected = [(0, None, exchanges.UNCHANGED), (1, changed, {"lines": [1, 2]})]
        expected = [*expected[: 1 + is_taken], (2, changed, {"lines": [1, 2]})]
        copies = [(copy.destination, copy.headers, copy.body) for copy in result.deliveries]
        assert copies == expected


def test_arguments_stay_unchanged_and_true_differs_from_one(code: Code):
    def change(env: exchanges.SelectorContext) -> bool:
        env.msg.headers["list"].append(1)
        env.msg.headers["n"] = True
        env.msg.body[0] = 1.0
        return True

    headers, body = {"list": [], "n": 1}, [1]
    message = exchanges.SelectorInput(body, headers)
    (delivery,) = exchanges.route(exchange(code(change)), message).deliveries
    assert (repr(headers), repr(body)) == ("{'list': [], 'n': 1}", "[1]")
    assert repr(delivery.headers) == repr({"list": [1], "n": True, "x-hop-count": 1})
    assert repr(delivery.body) == "[1.0]"
    (delivery,) = routed(code(lambda env: True), body={"a": [1.0, None]}, h=[True]).deliveries
    assert (delivery.headers, delivery.body) == (None, exchanges.UNCHANGED)


def test_what_a_function_returns_counts_as_the_value_of_an_expression(code: Code):
    no = (None, False, 0, -0.0, math.nan, "", {"select": math.nan})
    yes = (True, 1, -math.inf, " ", b"", [], {}, {"select": "no"})
    for value in (*no, *yes):
        verdict = asked(code(lambda env, value=value: value))
        assert (verdict.error, verdict.is_accepted) == (None, any(value is each for each in yes))


def test_an_exception_counts_as_no_and_undoes_changes(code: Code):
    def fail(env: exchanges.SelectorContext) -> bool:
        env.msg.headers["half"] = 1
        env.msg.body["half"] = 1
        env.state["half"] = 1
        env.state["list"].append(1)
        raise LookupError("no such price")

    unchanged = "size(state) == 1 && size(state.list) == 0"
    result = routed("{'state': {'list': []}}", code(fail), unchanged, body={})
    assert result.verdicts[1].error == "LookupError: no such price"
    copies = [(copy.destination, copy.headers, copy.body) for copy in result.deliveries]
    assert copies == [(0, None, exchanges.UNCHANGED), (2, None, exchanges.UNCHANGED)]


def test_a_copy_that_cannot_be_pushed_fails(code: Code):
    cases: list[tuple[Any, Any, str]] = [
        ({"a": object()}, None, "headers: a value of type object is not JSON"),
        ({"a": "\ud800"}, None, "headers: a text with a lone surrogate at position 0"),
        ({}, [1 << 20_000], "body: an integer of more than 10,000 bits"),
    ]

    def change(env: exchanges.SelectorContext) -> bool:
        env.msg.headers, env.msg.body, _ = cases[env.msg.body]
        return True

    def circle(env: exchanges.SelectorContext) -> bool:
        env.msg.body = env.msg.body, env.msg.body
        env.msg.headers["self"] = env.msg.headers
        return True

    def descend(env: exchanges.SelectorContext) -> bool:
        return descend(env)

    changing = code(change)
    for number, (*_, error) in enumerate(cases):
        result = routed(changing, "", body=number)
        assert result.verdicts[0].error == error
        assert [copy.destination for copy in result.deliveries] == [1]
    result = routed(code(circle), code(descend), "")
    assert [verdict.error is None for verdict in result.verdicts] == [False, False, True]


def test_it_cannot_set_the_hop(code: Code):
    def reset(env: exchanges.SelectorContext) -> bool:
        env.msg.headers.clear()
        env.msg.hops = 0
        return True

    message = exchanges.SelectorInput(headers={"x-hop-count": 5})
    (first, second) = exchanges.route(exchange(code(reset), "msg.hops == 6"), message).deliveries
    assert first.headers == second.headers == {"x-hop-count": 6}


def test_a_name_that_cannot_be_or_is_taken_is_refused(code: Code):
    with pytest.raises(exchanges.SelectorError, match="no selector in code is named nobody"):
        exchanges.Selector("@nobody")
    for name in ("", " a", "a b", "1a", "a" * 101, "@a", "ä"):
        with pytest.raises(ValueError, match="is not a valid selector name"):
            selector(name)

    def mine(env: exchanges.SelectorContext) -> bool:
        return True

    name = code(mine).removeprefix("@")
    selector(name)(mine)
    with pytest.raises(ValueError, match="is registered already"):
        selector(name)(lambda env: False)
    assert asked(f"@{name}").is_accepted
    assert exchanges.Selector(f"@{name}").needs_body
