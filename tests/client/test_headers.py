"""Headers that are known are split without parsing, and mean what parsing would say."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages import wire
from psqlmessages.client.headers import Headers


def payload(number: int, body: str = "body", size: int | None = None, **more: Any) -> str:
    header = {"Type": "Topic", "Size": len(body) if size is None else size, **more, "Id": number}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False) + "\n" + body


def known(first: str) -> Headers:
    headers = Headers()
    headers.keep(first, wire.parse(first).header)
    return headers


names = st.text(min_size=1, max_size=20)


@given(names, names, st.integers(0, 2**63 - 1), st.text())
def test_what_is_split_is_what_parsing_says(to: str, sender: str, number: int, body: str) -> None:
    first, second = (payload(n, text, To=to, From=sender) for n, text in ((1, "x"), (number, body)))
    parts = known(first).split(second)
    assert parts is None or parts == tuple(wire.parse(second))
    assert (parts is not None) == (number < 10**18)


@given(st.text(alphabet='{}",:Id5Size\\ \n', max_size=40))
def test_a_name_that_looks_like_a_header_changes_nothing(name: str) -> None:
    first, second = payload(1, To=name, From="A"), payload(2, To=name, From="A")
    assert known(first).split(second) in (None, tuple(wire.parse(second)))


@pytest.mark.parametrize(
    "unlike",
    [
        payload(2, To="T", From="C"),
        payload(2, To="T", From="B", Enc="json"),
        payload(2, To="T", From="B", Token="t"),
        payload(2, To="T", From="B").replace("Topic", "Rpc"),
        payload(2, To="T", From="B").partition("\n")[0],
        payload(2, To="T", From="B").replace('"Id":2', '"Id":2,"Dkey":"1"'),
        payload(2, To="T", From="B").replace('"Id":2', '"Id":٢'),
        payload(-2, To="T", From="B"),
        " " + payload(2, To="T", From="B"),
        "",
    ],
)
def test_what_is_not_like_it_is_left_to_parsing(unlike: str) -> None:
    assert known(payload(1, To="T", From="B")).split(unlike) is None


def test_a_header_that_says_its_size_twice_is_not_kept() -> None:
    twice = '{"Type":"Topic","Size":4,"To":"T","From":"B","Size":5,"Id":1}\nbody'
    assert known(twice).split(twice) is None


def test_a_token_is_not_kept() -> None:
    asked = payload(1, To="T", From="B", Token="t")
    assert known(asked).split(asked) is None


def test_what_was_split_may_be_changed() -> None:
    first = payload(1, To="T", From="B")
    headers = known(first)
    for _ in range(2):
        parts = headers.split(first)
        assert parts is not None
        assert "mine" not in parts[0]
        parts[0]["mine"] = True


def test_it_keeps_a_thousand_at_most() -> None:
    headers = Headers()
    for number in range(3_000):
        one = payload(1, To=f"T{number}", From="B")
        headers.keep(one, wire.parse(one).header)
    assert len(headers._known) <= 1_000
    assert headers.split(one) is not None
