"""route(): hops, order, merging, outcomes; and the cache of its results."""

from copy import deepcopy
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psqlmessages.exchanges import CompiledExchange, RoutingResult, SelectorInput, route
from psqlmessages.exchanges.model import NO_ROUTE_ACTIONS
from psqlmessages.exchanges.routing import RouteCache, read_hop_count
from tests.django.processes import run_python
from tests.exchanges.asking import NOW, exchange, routed

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)
headers = st.dictionaries(texts | st.sampled_from(["a", "b", "x-hop-count"]), values, max_size=5)
bodies = values | st.binary() | texts
SELECTORS = (
    "", "msg.body == null || msg.body == 1", "has(msg.headers.a) && msg.headers.a == msg.body",
    "{'headers': {'a': 1, 'b': [null, {'c': 2.0}]}}",
    "{'select': has(msg.headers.b), 'headers': {'b': 'x'}}",
    "{'body': msg.headers, 'headers': {'body': msg.body}}",
    "{'state': {'n': has(state.n) ? state.n + 1 : 1}, 'delay': 3}",
    "{'select': has(state.n) && state.n > 1, 'tries': state.n}", "1 / msg.hops > 0",
    "msg.headers.nope",
)  # fmt: skip
exchanges = st.lists(st.sampled_from(SELECTORS), max_size=8).map(lambda some: exchange(*some))
quiet = settings(deadline=None, max_examples=150)


@quiet
@given(exchanges, bodies, headers)
def test_each_match_has_a_copy(graphed: CompiledExchange, body: Any, given_headers: dict[str, Any]):
    kept_body, kept_headers = deepcopy(body), deepcopy(given_headers)
    result = route(graphed, SelectorInput(body, given_headers), now=NOW)
    assert result == route(graphed, SelectorInput(deepcopy(body), deepcopy(given_headers)), now=NOW)
    assert (repr(body), repr(given_headers)) == (repr(kept_body), repr(kept_headers))
    if result.outcome == "too_many_hops":
        assert result == RoutingResult("too_many_hops")
        return
    indexes = list(range(len(graphed.destinations)))
    assert [verdict.destination for verdict in result.verdicts] == indexes
    taken = [verdict.destination for verdict in result.verdicts if verdict.is_accepted]
    assert [delivery.destination for delivery in result.deliveries] == taken
    assert result.outcome == ("ok" if taken else "no_route")
    assert not any(verdict.is_accepted for verdict in result.verdicts if verdict.error)


@quiet
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), max_size=6), headers)
def test_later_headers_replace_earlier(merges: list[dict[str, int]], given_headers: dict[str, Any]):
    graphed = exchange(*[f"{{'headers': {merge}}}" for merge in merges], max_hops=10**9)
    result = route(graphed, SelectorInput(headers=given_headers))
    expected = {**given_headers, "x-hop-count": read_hop_count(given_headers) + 1}
    for merge, delivery in zip(merges, result.deliveries, strict=True):
        expected = {**expected, **merge}
        assert delivery.headers == expected


def test_hops_that_are_no_integer_count_as_zero():
    most = 999_999_999
    cases: list[tuple[Any, int]] = [
        (0, 0), (3, 3), ("3", 3), ("003", 3), ("999999999", most), ("1" * 10, most),
        ("0" * 10, most), ("9" * 10_000, most), (10**9, most), (10**30, most),
        *((value, 0) for value in (None, -1, "-1", "+1", " 3", "3\n", "", "1_0", "٣", "²", "0x3")),
        *((value, 0) for value in (3.0, "3.0", True, [3], {})),
    ]  # fmt: skip
    assert [value for value, hops in cases if read_hop_count({"x-hop-count": value}) != hops] == []
    assert read_hop_count({"X-Hop-Count": 3}) == 0


def test_at_the_most_hops_no_selector_is_asked_and_below_the_hop_is_raised_once():
    for value in (17, "17", 18, 10**20):
        message = SelectorInput(headers={"x-hop-count": value})
        assert route(exchange("", "1/0 == 1"), message) == RoutingResult("too_many_hops", (), ())
        assert message.headers == {"x-hop-count": value}
    message = SelectorInput(headers={"x-hop-count": "16"})
    seen = "msg.hops == 17 && msg.headers['x-hop-count'] == 17"
    result = route(exchange(seen, "{'headers': {'x-hop-count': 0}}", seen), message)
    assert [copy.destination for copy in result.deliveries] == [0, 1, 2]
    assert (message.hops, message.headers) == (17, {"x-hop-count": 17})
    for most, outcome in ((3, "too_many_hops"), (4, "ok")):
        message = SelectorInput(headers={"x-hop-count": 3})
        assert route(exchange("", max_hops=most), message).outcome == outcome


def test_state_is_merged_and_starts_empty_for_each_message():
    selectors = ("size(state) == 0", "{'state': {'a': 1}}", "{'state': {'b': 2}}")
    for _ in range(2):
        assert len(routed(*selectors, "state == {'a': 1, 'b': 2}").deliveries) == 4


def test_the_time_is_given_with_a_zone_or_not_at_all():
    (verdict,) = route(exchange("now > timestamp(0)"), SelectorInput()).verdicts
    assert verdict.error == "now is missing: pass it to route"
    with pytest.raises(ValueError, match="time zone"):
        route(exchange(""), SelectorInput(), now=datetime(2026, 1, 1))  # noqa: DTZ001


def test_neither_django_nor_psycopg_is_needed():
    # The package's own __init__ would import the client.
    program = (
        "import sys, types; p = types.ModuleType('psqlmessages')\n"
        "p.__path__ = ['psqlmessages']; sys.modules['psqlmessages'] = p\n"
        "from psqlmessages import exchanges; exchanges.Selector('true')\n"
        "assert not {'django', 'psycopg'} & set(sys.modules), sorted(sys.modules)"
    )
    ran = run_python("-W", "error", "-c", program)
    assert ran.returncode == 0, ran.stderr


BY_HEADERS = (
    'msg.headers["country"].matches("^(it|de)$")',
    'has(msg.headers.lane) && msg.headers.lane == "1"', 'msg.headers.country in ["it", "fr"]', "",
)  # fmt: skip
header_names = st.sampled_from(["country", "lane", "x-hop-count", "x"])
header_values = st.sampled_from(["it", "de", "1", "16", "17", 1, 1.0, True, None, 17, "x" * 200])


@quiet
@given(
    st.lists(st.sampled_from(BY_HEADERS), min_size=1, max_size=5),
    st.lists(st.dictionaries(header_names, header_values), max_size=12),
    st.sampled_from(NO_ROUTE_ACTIONS),
)
def test_shortcuts_equal_selectors(texts: list[str], messages: list[dict[str, Any]], no_route: str):
    graphed = exchange(*texts, no_route=no_route)
    cache = RouteCache.of(graphed)
    assert cache is not None
    for headers in messages * 2:
        known = cache.get(headers)
        routed = route(graphed, SelectorInput(headers=dict(headers)))
        if known is not None:
            outcome = "ok" if known else graphed.outcome_without_route
            assert (known, routed.outcome) == (routed.deliveries, outcome)
        cache.put(headers, routed)


def test_a_selector_that_depends_on_more_has_no_shortcut():
    four = 'msg.headers.a + msg.headers.b + msg.headers.c + msg.headers.d == ""'
    for text in (
        'msg.body == "1"', "{'delay': 3}", "msg.tries > 1", 'msg.headers["x-hop-count"] == "1"',
        "now > timestamp('2020-01-01T00:00:00Z')", four,
    ):  # fmt: skip
        assert RouteCache.of(exchange('msg.headers.lane == "1"', text)) is None, text
