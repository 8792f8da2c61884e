"""Bodies and headers of HTTP come out of a queue unchanged."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.rest import bodies
from psqlmessages.rest.errors import ApiError

TYPES = st.sampled_from([
    "", "text/plain", "text/html; charset=utf-8", "text/csv; charset=iso-8859-1",
    "text/plain; charset=us-ascii", "text/plain; charset=utf-7", "text/x; charset=punycode",
    "application/octet-stream", "image/png", "application/x-www-form-urlencoded",
])  # fmt: skip
# What jsonb holds.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)

JSON = VALUES.map(lambda value: (json.dumps(value).encode(), "application/json"))


@given(st.tuples(st.binary(max_size=200), TYPES) | JSON)
def test_a_body_comes_out_as_it_went_in_with_its_type(given: tuple[bytes, str]):
    data, content_type = given
    body, headers = bodies.parse_request(data, content_type, {})
    assert (body.enc == "json") == (content_type == "application/json")
    content = bodies.build_content(body.text, body.enc, headers)
    assert content.data == data
    assert not content_type or content.content_type == content_type


@given(st.dictionaries(TEXTS | st.sampled_from(["lane", "n"]), VALUES, max_size=5))
def test_headers_keep_their_types_and_are_sound_http(headers: dict[str, Any]):
    text = json.dumps(headers, ensure_ascii=False)
    shown = bodies.build_content("", None, text).headers
    assert json.loads(shown.pop(bodies.ALL_HEADERS)) == headers
    for name, value in shown.items():
        assert value.isascii()
        assert value.isprintable()
        assert name.isascii()
        original = headers[name.removeprefix(bodies.HEADER_PREFIX)]
        assert value == (original if isinstance(original, str) else json.dumps(original))
    _, again = bodies.parse_request(b"", "", {bodies.ALL_HEADERS: text.encode().decode("latin-1")})
    assert json.loads(again) == headers


def test_headers_too_long_for_a_client_are_not_sent_and_that_is_said():
    headers = {f"h{n}": "v" * 500 for n in range(60)}
    shown = bodies.build_content("", None, json.dumps(headers)).headers
    assert shown.pop(bodies.HEADERS_LENGTH) == str(len(json.dumps(headers)))
    assert bodies.ALL_HEADERS not in shown
    assert len(shown) == 40


def test_malformed_bodies_are_refused():
    for content_type in ("text", "a/b\r\nc: d", "a/b; \x7f", "/", "é/x"):
        with pytest.raises(ApiError):
            bodies.parse_request(b"", content_type, {})
    with pytest.raises(ApiError, match="x-ks-hdr-a"):
        bodies.parse_request(b"", "", {"x-ks-hdr-a": "\xff"})
