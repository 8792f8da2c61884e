"""Shortcuts: what is remembered is what would be decided again."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from psqlmessages.exchanges.model import NO_ROUTE_ACTIONS, SelectorInput
from psqlmessages.exchanges.routing import RouteCache, route
from tests.exchanges.asking import exchange

BY_HEADERS = (
    'msg.headers["country"].matches("^(it|de)$")',
    'has(msg.headers.lane) && msg.headers.lane == "1"', 'msg.headers.country in ["it", "fr"]', "",
)  # fmt: skip
values = st.sampled_from(["it", "de", "1", "16", "17", 1, 1.0, True, None, 17, "x" * 200])
given_headers = st.dictionaries(st.sampled_from(["country", "lane", "x-hop-count", "x"]), values)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from(BY_HEADERS), min_size=1, max_size=5),
    st.lists(given_headers, max_size=12),
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
            assert (known, routed.outcome) == (
                routed.deliveries,
                "ok" if known else graphed.outcome_without_route,
            )
        cache.put(headers, routed)


def test_a_selector_that_depends_on_more_has_no_shortcut():
    four = 'msg.headers.a + msg.headers.b + msg.headers.c + msg.headers.d == ""'
    for text in (
        'msg.body == "1"', "{'delay': 3}", "msg.tries > 1", 'msg.headers["x-hop-count"] == "1"',
        "now > timestamp('2020-01-01T00:00:00Z')", four,
    ):  # fmt: skip
        assert RouteCache.of(exchange('msg.headers.lane == "1"', text)) is None, text
