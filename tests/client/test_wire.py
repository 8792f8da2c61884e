"""Payloads, headers and bodies: valid ones are read back, malformed ones are refused."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages import wire
from psqlmessages.client.messages import HeaderCache, split_call
from psqlmessages.wire import EncodedBody, MalformedPayload, decode, encode_many, parse, serialize

# What PostgreSQL's text can hold: no NUL, no surrogates.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # JSON escapes what text cannot hold, lone surrogates and NUL too.
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
no_texts = json_values.filter(lambda value: not isinstance(value, str))
ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
DEEP: list[object] = []
for _ in range(100_000):
    DEEP = [DEEP]


@given(st.dictionaries(st.text(), json_values, max_size=5), texts | st.none())
def test_serialized_headers_are_parsed_back(header: dict[str, object], text: str | None):
    payload = parse(serialize(header, text))
    assert payload.header == header
    assert payload.text == text


NO_OBJECTS = (
    "", "\n", "[]", "1", "{", '{"a":1', '{"a":NaN}', "[" * 100_000, '{"a":' + "9" * 5000 + "}",
)  # fmt: skip
OTHER_ENCODINGS = (
    ("a", "b64"), ("ä===", "b64"), ("{", "json"), ("NaN", "json"), ("a", "gzip"), ("a", ""),
)  # fmt: skip


def test_a_first_line_that_is_no_json_object_or_a_body_of_another_encoding_is_refused():
    for payload in NO_OBJECTS:
        with pytest.raises(MalformedPayload):
            parse(payload)
    for text, enc in OTHER_ENCODINGS:
        with pytest.raises(MalformedPayload):
            decode(text, enc)


def test_numbers_have_ascii_digits_and_a_maximum():
    for text, number in (
        ("0", 0), ("7", 7), ("99", 99), ("100", None), ("007", 7), ("0" * 5000, 0),
        ("0" * 5000 + "99", 99), ("9" * 5000, None), ("", None), ("-1", None), ("+1", None),
        (" 1", None), ("1_0", None), ("1.0", None), ("٣", None), ("²", None),
    ):  # fmt: skip
        assert wire.parse_number(text, 99) == number, text[:9]


@given(texts | st.binary() | no_texts)
def test_a_body_comes_back_as_it_was(value: object):
    body = EncodedBody.of(value)
    assert "\0" not in body.text
    body.text.encode()
    assert decode(body.text, body.enc) == value


def test_the_encoding_follows_the_type():
    assert EncodedBody.of("a") == EncodedBody("a", None)
    assert EncodedBody.of(b"a") == EncodedBody("YQ==", "b64")
    assert len({EncodedBody.of(kind(b"a")) for kind in (bytes, bytearray, memoryview)}) == 1
    assert EncodedBody.of({"a": [1, None]}) == EncodedBody('{"a":[1,null]}', "json")


NO_BODIES = (
    ("ab\0c", ValueError, r"NUL character at position 2.*send it as bytes"),
    ("a\ud800", ValueError, "lone surrogate at position 1"),
    ({1, 2}, TypeError, "type set cannot be sent"),
    (object(), TypeError, "type object cannot be sent"),
    ({"a": b"within"}, TypeError, "type dict cannot be sent"),
    (1j, TypeError, "type complex cannot be sent"), (math.nan, ValueError, "not JSON compliant"),
    ({"a": [-math.inf]}, ValueError, "not JSON compliant"),
    (ENDLESS, ValueError, r"Circular|too deep"), (DEEP, ValueError, r"Circular|too deep"),
)  # fmt: skip


def test_values_that_no_body_can_contain_are_refused():
    for value, error, words in NO_BODIES:
        with pytest.raises(error, match=words):
            EncodedBody.of(value)


@given(st.lists(texts | no_texts, max_size=5))
def test_many_values_have_one_encoding_and_bytes_travel_alone(values: list[object]):
    encoded, enc = encode_many(values)
    assert [decode(text, enc) for text in encoded] == values
    assert encode_many([b"a", b"b"]) == (["YQ==", "Yg=="], "b64")
    assert encode_many([]) == ([], None)
    with pytest.raises(TypeError, match="cannot be mixed"):
        encode_many([b"a", "b"])


def payload(number: int, body: str = "body", size: int | None = None, **more: Any) -> str:
    header = {"Type": "Topic", "Size": len(body) if size is None else size, **more, "Id": number}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False) + "\n" + body


def known(first: str) -> HeaderCache:
    headers = HeaderCache()
    headers.add(first, parse(first).header)
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
    assert known(first).split(second) in (None, tuple(parse(second)))


def test_other_headers_are_left_to_the_parser():
    assert known(FIRST).split(SECOND) == tuple(parse(SECOND))
    assert [known(FIRST).split(unlike) for unlike in UNLIKE] == [None] * len(UNLIKE)
    for never in (TWICE, payload(1, To="T", From="B", Token="t")):
        assert known(never).split(never) is None


@given(names, names, st.sampled_from([{}, {"Enc": "b64"}]), st.text())
def test_a_request_is_split_as_parsed(to: str, sender: str, more: dict[str, str], body: str):
    text = payload(7, body, To=to, Token="mac t", From=sender, **more).replace("Topic", "Rpc", 1)
    is_plain = to and sender and not re.search(r'["\\\x00-\x1f]', to + sender)
    assert split_call(text) == (tuple(parse(text)) if is_plain else None)
    for old, new in ("Rpc", "Sys"), ('"Id":7', '"Err":"1","Id":7'), ('"Id":7', '"Id":07'):
        assert split_call(text.replace(old, new)) is None
