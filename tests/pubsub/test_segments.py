"""Segments: the wire format to the byte, and what is cut is joined again."""

import base64
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psqlmessages.pubsub.assembly import Assembly
from psqlmessages.pubsub.segments import channel_name, cut, encoded, flagged, payload_of
from psqlmessages.pubsub.transaction import Transaction
from psqlmessages.wire import MalformedPayload

# Every Unicode text, NUL included; JSON's strings may hold lone surrogates too, but for pairs.
texts = st.text(st.characters(codec="utf-8"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.text(st.characters(min_codepoint=0xDC00, max_codepoint=0xDFFF)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def segments_of(payload: Any) -> list[str]:
    text = flagged(payload)
    characters = encoded(text)
    return cut(characters) if characters else [text]


def joined(segments: list[str]) -> Any:
    """What a receiver makes of segments, of which only the last completes the message."""
    assembly = Assembly(1000, 100_000_000)
    *parts, last = [assembly.add(1, "A", segment) for segment in segments]
    assert parts == [None] * len(parts)
    assert last is not None
    return payload_of(last)


@pytest.mark.parametrize(
    ("payload", "segment"),
    [
        (None, ""),
        ("", "!"),
        ("text", "!text"),
        (" ~", "! ~"),
        ("!", "!!"),
        ('"', '!"'),
        ({"a": 1}, '@{"a":1}'),
        ([1, "b", None, True, 1.5], '@[1,"b",null,true,1.5]'),
        (0, "@0"),
        ("\x7f", "$IX8="),
        ("\n", "$IQo="),
        ("\0", "$IQA="),
        ("é", "$IcOp"),
        ("текст", "$IdGC0LXQutGB0YI="),
        ({"ü": "😀"}, "$QHsiw7wiOiLwn5iAIn0="),
        (["\ud800"], '@["\\ud800"]'),
        (["é\ud800"], '@["\\u00e9\\ud800"]'),
    ],
)
def test_a_short_payload_is_one_segment_to_the_byte(payload: object, segment: str) -> None:
    assert segments_of(payload) == [segment]
    assert joined([segment]) == payload


def test_what_fits_a_segment_of_7999_bytes_travels_as_it_is() -> None:
    assert segments_of("x" * 7998) == ["!" + "x" * 7998]
    assert segments_of("x" * 7999) == [
        "#IXh4" + "eHh4" * 1998 + "eH",
        "$" + "h4" + "eHh4" * 666 + "eHg=",
    ]
    assert [len(segment) for segment in segments_of("é" * 2998)] == [7997]
    assert [len(segment) for segment in segments_of("é" * 2999)] == [7999, 3]


def test_each_further_segment_is_a_byte_shorter_and_the_last_is_what_remains() -> None:
    segments = segments_of("x" * 50_000)
    sizes = [7999, 7998, 7997, 7996, 7995, 7994, 7993, 7992, 2713]
    assert [len(segment) for segment in segments] == sizes
    assert [segment[0] for segment in segments] == ["#"] * 8 + ["$"]
    base64_of_all = "".join(segment[1:] for segment in segments)
    assert base64.b64decode(base64_of_all, validate=True) == b"!" + b"x" * 50_000


@given(texts | st.lists(json_values) | json_values.filter(lambda value: type(value) is not str))
def test_every_text_and_json_value_is_read_back(payload: object) -> None:
    assert joined(segments_of(payload)) == payload


@settings(max_examples=30, deadline=None)
@given(texts.filter(bool) | st.just("\0"), st.integers(1, 10_000_000))
@example("я", 10_000_000)
@example("\0", 10_000_000)
def test_every_size_is_read_back_from_segments_that_all_differ(text: str, size: int) -> None:
    """The size is in bytes of UTF-8, nearly."""
    payload = text * (size // len(text.encode()) + 1)
    segments = segments_of(payload)
    assert len(set(segments)) == len(segments)
    assert max(map(len, segments)) <= 7999
    assert joined(segments) == payload


def test_the_longest_message_is_cut_and_one_that_is_longer_is_refused() -> None:
    longest = "A" * (7998 * 7999 // 2)
    segments = cut(longest)
    assert (len(segments), segments[-2:]) == (7998, ["#AA", "$A"])
    assert len(set(segments)) == 7998
    with pytest.raises(ValueError, match="a message has at most 23991000 bytes"):
        cut(longest + "A")


# In one transaction


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "a", "é"]),
            st.sampled_from(["x", "\0", "é", "abc"]),
            st.integers(1, 40_000),
            st.sampled_from(["", "end", "é"]),
        ),
        max_size=20,
    )
)
def test_no_long_messages_of_a_transaction_share_a_segment(
    parts: list[tuple[str, str, int, str]],
) -> None:
    transaction, sent = Transaction(), set[str]()
    for begin, middle, times, end in parts:
        payload = begin + middle * times + end
        characters = encoded(flagged(payload))
        if not characters:
            continue
        segments = transaction.cut("now", "A", characters)
        assert joined(segments) == payload
        if len(segments) > 1:
            assert sent.isdisjoint(segments)
        sent.update(segments)


@pytest.mark.parametrize("size", [7_999, 8_000, 15_980, 100_000])
@pytest.mark.parametrize("form", ["same", "begin alike", "end alike"])
def test_hundreds_of_messages_that_are_alike_are_told_apart(size: int, form: str) -> None:
    transaction, sent = Transaction(), set[str]()
    for number in range(300):
        payload = {
            "same": "q" * size,
            "begin alike": "q" * size + f"{number:06}",
            "end alike": f"{number:06}" + "q" * size,
        }[form]
        segments = transaction.cut("now", "A", encoded(flagged(payload)))
        assert sent.isdisjoint(segments)
        sent.update(segments)
        assert joined(segments) == payload


def test_another_transaction_and_another_channel_begin_anew() -> None:
    transaction = Transaction()
    characters = encoded(flagged("x" * 10_000))
    golden = cut(characters)
    assert transaction.cut("1", "A", characters) == golden
    assert transaction.cut("1", "A", characters) != golden
    assert transaction.cut("1", "B", characters) == golden
    assert transaction.cut("2", "A", characters) == golden


def test_a_short_message_that_equals_the_end_of_a_long_one_is_told_apart() -> None:
    """Base64 of a multiple of three bytes ends as that of the short message alone."""
    transaction = Transaction()
    short = encoded(flagged("é"))
    long = "A" * 7998 + short
    assert transaction.cut("now", "A", long)[-1] == "$" + short
    assert transaction.cut("now", "A", short) == ["#IcO", "$p"]
    transaction = Transaction()
    assert transaction.cut("now", "A", short) == ["$" + short]
    assert transaction.cut("now", "A", short) == ["$" + short], "equal short ones may collapse"
    assert "$" + short not in transaction.cut("now", "A", long)


def test_too_many_equal_messages_in_a_transaction_are_refused_and_not_garbled() -> None:
    transaction = Transaction()
    nul = "A" * 13_333_336
    for _ in range(2):
        assert transaction.cut("now", "A", nul)
    with pytest.raises(ValueError, match="publish it in another transaction"):
        transaction.cut("now", "A", nul)


# What is refused


@pytest.mark.parametrize(
    ("payload", "error", "text"),
    [
        (b"x", TypeError, "type bytes cannot be sent"),
        ({1, 2}, TypeError, "type set cannot be sent: Object of type set is not JSON"),
        ({"a": object()}, TypeError, "type dict cannot be sent: Object of type object"),
        (math.nan, ValueError, "not JSON compliant"),
        ([math.inf], ValueError, "not JSON compliant"),
        ("ab\ud800", ValueError, "lone surrogate at position 2"),
    ],
)
def test_a_payload_that_cannot_travel_is_refused(
    payload: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        flagged(payload)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("", ValueError, "needs a name"),
        ('a"b', ValueError, "a double quote"),
        ("a\0b", ValueError, "a NUL character"),
        ("x" * 64, ValueError, "at most 63 bytes, not 64"),
        ("я" * 32, ValueError, "at most 63 bytes, not 64"),
        ("\udc00", ValueError, "lone surrogate"),
        (5, TypeError, "a channel is a str, not int"),
        (None, TypeError, "a channel is a str, not NoneType"),
    ],
)
def test_a_name_that_cannot_be_a_channel_is_refused(
    name: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        channel_name(name)


@pytest.mark.parametrize(
    "segment",
    [
        "text",
        "é",
        "@",
        "@nope",
        "@NaN",
        "@" + "[" * 100_000,
        "$",
        "$====",
        "$IcO",
        "$YWJj",
        "$IcM=",
        "$Ic\nOp",
    ],
)
def test_what_is_not_of_the_format_is_malformed(segment: str) -> None:
    with pytest.raises(MalformedPayload):
        joined([segment])


@given(st.lists(st.text(max_size=20) | st.sampled_from(["#IcOp", "$IcOp", "!x", ""]), max_size=9))
def test_any_segments_are_read_or_refused(segments: list[str]) -> None:
    assembly = Assembly(10, 1_000)
    for segment in segments:
        try:
            text = assembly.add(1, "A", segment)
            if text is not None:
                payload_of(text)
        except MalformedPayload:
            continue
