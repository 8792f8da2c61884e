"""The wire format: segments are cut and joined, also if writers interleave."""

import base64
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psqlmessages.pubsub.segments import (
    SegmentAssembler,
    SegmentDeduplicator,
    cut,
    decode_payload,
    encode_base64,
    encode_payload,
)

# Texts may contain NUL; strings in JSON may also contain lone surrogates.
texts = st.text(st.characters(codec="utf-8"))
lone_surrogates = st.text(st.characters(min_codepoint=0xDC00, max_codepoint=0xDFFF))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts | lone_surrogates,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
# The two segments of "é".
FIRST, LAST = "#Ic", "$Op"


def segments_of(payload: Any) -> list[str]:
    text = encode_payload(payload)
    characters = encode_base64(text)
    return cut(characters) if characters else [text]


def joined(segments: list[str]) -> Any:
    """Join segments, of which only the last completes the message."""
    assembly = SegmentAssembler(1000, 100_000_000)
    *parts, last = [assembly.add(1, "A", segment) for segment in segments]
    assert parts == [None] * len(parts)
    return decode_payload(last)


def test_a_short_payload_is_one_segment_to_the_byte():
    for payload, segment in (
        (None, ""), ("", "!"), ("text", "!text"), (" ~", "! ~"), ("!", "!!"), ('"', '!"'),
        ({"a": 1}, '@{"a":1}'), ([1, "b", None, True, 1.5], '@[1,"b",null,true,1.5]'), (0, "@0"),
        ("\x7f", "$IX8="), ("\n", "$IQo="), ("\0", "$IQA="), ("é", "$IcOp"),
        ("текст", "$IdGC0LXQutGB0YI="), ({"ü": "😀"}, "$QHsiw7wiOiLwn5iAIn0="),
        (["\ud800"], '@["\\ud800"]'), (["é\ud800"], '@["\\u00e9\\ud800"]'),
        ("x" * 7998, "!" + "x" * 7998),
    ):  # fmt: skip
        assert (segments_of(payload), joined([segment])) == ([segment], payload)
    # Other writers.
    assert [joined(["@null"]), joined(["#Ic", "#O", "$p"])] == [None, "é"]


def test_each_further_segment_is_a_byte_shorter_and_the_last_is_the_rest():
    assert [len(segment) for segment in segments_of("é" * 2998)] == [7997]
    assert [len(segment) for segment in segments_of("é" * 2999)] == [7999, 3]
    segments = segments_of("x" * 50_000)
    sizes = [7999, 7998, 7997, 7996, 7995, 7994, 7993, 7992, 2713]
    assert [len(segment) for segment in segments] == sizes
    assert [segment[0] for segment in segments] == ["#"] * 8 + ["$"]
    base64_of_all = "".join(segment[1:] for segment in segments)
    assert base64.b64decode(base64_of_all, validate=True) == b"!" + b"x" * 50_000


def test_the_longest_message_is_cut_and_one_that_is_longer_is_refused():
    longest = "A" * (7998 * 7999 // 2)
    segments = cut(longest)
    assert (len(segments), segments[-2:]) == (7998, ["#AA", "$A"])
    assert len(set(segments)) == 7998
    with pytest.raises(ValueError, match="a message can have at most 23991000 bytes"):
        cut(longest + "A")


begins, middles = st.sampled_from(["", "a", "é"]), st.sampled_from(["x", "\0", "é", "abc"])
ends = st.sampled_from(["", "end", "é"])


@settings(max_examples=25)
@given(st.lists(st.tuples(begins, middles, st.integers(1, 40_000), ends), max_size=20))
@example([("", "q", size, "") for size in (7_999, 8_000, 15_980, 100_000) for _ in range(50)])
@example([("", "q", 100_000, f"{number}") for number in range(50)])
@example([(f"{number}", "q", 100_000, "") for number in range(50)])
def test_no_long_messages_share_a_segment(parts: list[tuple[str, str, int, str]]):
    transaction, sent = SegmentDeduplicator(), set[str]()
    for begin, middle, times, end in parts:
        payload = begin + middle * times + end
        characters = encode_base64(encode_payload(payload))
        if not characters:
            continue
        segments = transaction.cut("now", "A", characters)
        assert joined(segments) == payload
        if len(segments) > 1:
            assert sent.isdisjoint(segments)
        sent.update(segments)


pids, channels, sizes = st.integers(1, 3), st.sampled_from("AB"), st.integers(1, 9)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(pids, channels, st.text(max_size=40), sizes), max_size=12),
    st.randoms(use_true_random=False),
)
def test_interleaved_writers_are_kept_apart(messages, random):
    assembly, queues, expected = SegmentAssembler(100, 2**20), {}, {}
    for process_id, channel, text, size in messages:
        characters = base64.b64encode(b"!" + text.encode()).decode()
        parts = [characters[start : start + size] for start in range(0, len(characters), size)]
        queue = queues.setdefault((process_id, channel), [])
        queue += ["#" + part for part in parts[:-1]] + ["$" + parts[-1]]
        expected.setdefault((process_id, channel), []).append("!" + text)
    found = {key: [] for key in expected}
    while queues:
        key = random.choice(sorted(queues))
        text = assembly.add(*key, queues[key].pop(0))
        if text is not None:
            found[key].append(text)
        if not queues[key]:
            del queues[key]
    assert found == expected
    assert (assembly.size, assembly.dropped) == (0, 0)


def test_more_unfinished_messages_than_the_bound_drop_the_oldest():
    assembly = SegmentAssembler(3, 2**20)
    for process_id in (1, 2, 3, 4):
        assembly.add(process_id, "A", FIRST)
    assert assembly.dropped == 1
    assert assembly.add(1, "A", LAST) is None, "the rest of what was dropped is ignored"
    assert [assembly.add(process_id, "A", LAST) for process_id in (2, 3, 4)] == ["!é"] * 3
    assembly.add(1, "A", FIRST)
    assert assembly.add(1, "A", LAST) == "!é", "the next message is whole"
    for process_id in range(1_000):
        assembly.add(process_id, "A", "#A")
    assert (assembly.dropped, len(assembly.senders)) == (998, 6)


def test_more_bytes_than_the_bound_drop_the_largest():
    assembly = SegmentAssembler(100, 10_000)
    assembly.add(1, "A", FIRST)
    for _ in range(10):
        assembly.add(2, "A", "#" + "A" * 3_000)
        assert assembly.size <= 10_000
    assert assembly.dropped == 1
    assert assembly.add(2, "A", "$AAAA") is None
    assert assembly.add(1, "A", LAST) == "!é"
    for _ in range(1_000):
        assembly.add(3, "A", "#A")
    assert assembly.dropped == 2
