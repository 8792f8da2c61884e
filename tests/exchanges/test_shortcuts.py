"""Shortcuts: what is remembered is what would be decided again."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from psqlmessages.exchanges.messages import Message
from psqlmessages.exchanges.route import route
from psqlmessages.exchanges.shortcuts import Shortcut
from tests.exchanges.asking import exchange

BY_HEADERS = (
    'msg.headers["country"].matches("^(it|de)$")',
    'has(msg.headers.lane) && msg.headers.lane == "1"',
    'msg.headers.country in ["it", "fr"]',
    "",
)
exchanges = st.lists(st.sampled_from(BY_HEADERS), min_size=1, max_size=5)
given_headers = st.lists(
    st.dictionaries(
        st.sampled_from(["country", "lane", "x-hop-count", "other"]),
        st.sampled_from(["it", "de", "1", "16", "17", 1, 1.0, True, None, 17, "x" * 200]),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(exchanges, given_headers)
def test_a_shortcut_decides_as_all_selectors_do(
    texts: list[str], messages: list[dict[str, Any]]
) -> None:
    graphed = exchange(*texts)
    shortcut = Shortcut.of(graphed)
    assert shortcut is not None
    for headers in messages * 2:
        known = shortcut.deliveries(headers)
        routed = route(graphed, Message(headers=dict(headers)))
        if known is not None:
            assert (known, routed.outcome) == (routed.deliveries, "ok" if known else "no_route")
        shortcut.keep(headers, routed)


def test_texts_are_remembered_and_what_only_looks_equal_is_not() -> None:
    graphed = exchange(BY_HEADERS[1], "")
    shortcut = Shortcut.of(graphed)
    assert shortcut is not None
    shortcut.keep({"lane": "1"}, route(graphed, Message(headers={"lane": "1"})))
    known = shortcut.deliveries({"lane": "1", "x": 5})
    assert known is not None
    assert [delivery.target for delivery in known] == [0, 1]
    assert shortcut.deliveries({"lane": "2"}) is None
    assert shortcut.deliveries({"lane": 1}) is None
    assert shortcut.deliveries({"lane": "1", "x-hop-count": 17}) is None


def test_a_selector_that_failed_is_asked_again_and_told_again() -> None:
    number = 'int(msg.headers.lane) > 0 || msg.headers.x == "1"'
    graphed = exchange('msg.headers.lane == "1"', number)
    shortcut = Shortcut.of(graphed)
    assert shortcut is not None
    headers = {"lane": "nought", "x": "2"}
    routed = route(graphed, Message(headers=dict(headers)))
    assert any(verdict.error for verdict in routed.verdicts)
    shortcut.keep(headers, routed)
    assert shortcut.deliveries(headers) is None


def test_a_selector_that_depends_on_more_has_no_shortcut() -> None:
    for text in (
        'msg.body == "1"',
        "{'delay': 3}",
        "msg.tries > 1",
        'msg.headers["x-hop-count"] == "1"',
        "now > timestamp('2020-01-01T00:00:00Z')",
        'msg.headers.a + msg.headers.b + msg.headers.c + msg.headers.d == ""',
    ):
        assert Shortcut.of(exchange('msg.headers.lane == "1"', text)) is None, text
