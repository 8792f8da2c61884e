"""Headers that are known are split without parsing, and mean what parsing would say."""

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from psqlmessages import wire
from psqlmessages.client.messages import HeaderCache, split_call


def payload(number: int, body: str = "body", size: int | None = None, **more: Any) -> str:
    header = {"Type": "Topic", "Size": len(body) if size is None else size, **more, "Id": number}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False) + "\n" + body


def known(first: str) -> HeaderCache:
    headers = HeaderCache()
    headers.add(first, wire.parse(first).header)
    return headers


names = st.text(min_size=1, max_size=20) | st.text(alphabet='{}",:Id5Size\\ \n', max_size=40)
FIRST = payload(1, To="T", From="B")
SECOND = payload(2, To="T", From="B")
UNLIKE = (
    payload(2, To="T", From="C"), payload(2, To="T", From="B", Enc="json"),
    payload(2, To="T", From="B", Token="t"), SECOND.replace("Topic", "Rpc"),
    SECOND.partition("\n")[0], SECOND.replace('"Id":2', '"Id":2,"Dkey":"1"'),
    SECOND.replace('"Id":2', '"Id":٢'), payload(-2, To="T", From="B"), " " + SECOND, "",
)  # fmt: skip
TWICE = '{"Type":"Topic","Size":4,"To":"T","From":"B","Size":5,"Id":1}\nbody'


@given(names, names, st.integers(0, 2**63 - 1), st.text())
def test_splitting_equals_parsing(to: str, sender: str, number: int, body: str):
    first, second = (payload(n, text, To=to, From=sender) for n, text in ((1, "x"), (number, body)))
    assert known(first).split(second) in (None, tuple(wire.parse(second)))


def test_other_headers_are_left_to_the_parser():
    assert known(FIRST).split(SECOND) == tuple(wire.parse(SECOND))
    assert [known(FIRST).split(unlike) for unlike in UNLIKE] == [None] * len(UNLIKE)
    for never in (TWICE, payload(1, To="T", From="B", Token="t")):
        assert known(never).split(never) is None


@given(names, names, st.sampled_from([{}, {"Enc": "b64"}]), st.text())
def test_a_request_is_split_as_parsed(to: str, sender: str, more: dict[str, str], body: str):
    text = payload(7, body, To=to, Token="mac t", From=sender, **more).replace("Topic", "Rpc", 1)
    is_plain = to and sender and not re.search(r'["\\\x00-\x1f]', to + sender)
    assert split_call(text) == (tuple(wire.parse(text)) if is_plain else None)
    for old, new in ("Rpc", "Sys"), ('"Id":7', '"Err":"1","Id":7'), ('"Id":7', '"Id":07'):
        assert split_call(text.replace(old, new)) is None
