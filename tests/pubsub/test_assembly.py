"""Assembly: segments of several senders, and what is bounded."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.pubsub.assembly import Assembly
from psqlmessages.pubsub.segments import cut
from psqlmessages.wire import MalformedPayload

MB = 1024 * 1024


def new_assembly(most: int = 100, most_bytes: int = MB) -> Assembly:
    return Assembly(most, most_bytes)


def segments_of(text: str, size: int) -> list[str]:
    characters = base64.b64encode(b"!" + text.encode()).decode()
    parts = [characters[at : at + size] for at in range(0, len(characters), size)]
    return ["#" + part for part in parts[:-1]] + ["$" + parts[-1]]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.sampled_from("AB"), st.text(max_size=40), st.integers(1, 9)
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_writers_that_interleave_in_any_way_are_told_apart(messages, random) -> None:
    """Each process id and channel is a queue; the queues' heads come in any order."""
    assembly, queues, expected = new_assembly(), {}, {}
    for process_id, channel, text, size in messages:
        queue = queues.setdefault((process_id, channel), [])
        queue += segments_of(text, size)
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
    assert (len(assembly), assembly.size, assembly.dropped) == (0, 0, 0)


def test_a_short_message_amid_a_long_one_arrives_at_once() -> None:
    assembly = new_assembly()
    first, last = segments_of("é", 3)
    assert assembly.add(1, "A", first) is None
    assert assembly.add(1, "A", "!between") == "!between"
    assert assembly.add(1, "A", "") == ""
    assert assembly.add(1, "A", last) == "!é"


def test_more_unfinished_messages_than_the_bound_drop_the_oldest() -> None:
    assembly = new_assembly(most=3)
    first, last = segments_of("é", 3)
    for process_id in (1, 2, 3, 4):
        assembly.add(process_id, "A", first)
    assert (len(assembly), assembly.dropped) == (3, 1)
    assert assembly.add(1, "A", last) is None, "the rest of what was dropped is ignored"
    assert [assembly.add(process_id, "A", last) for process_id in (2, 3, 4)] == ["!é"] * 3
    assembly.add(1, "A", first)
    assert assembly.add(1, "A", last) == "!é", "the next message is whole"


def test_more_bytes_than_the_bound_drop_the_largest() -> None:
    assembly = new_assembly(most_bytes=10_000)
    first, last = segments_of("é", 3)
    assembly.add(1, "A", first)
    for _ in range(10):
        assembly.add(2, "A", "#" + "A" * 3_000)
        assert assembly.size <= 10_000
    assert assembly.dropped == 1
    assert assembly.add(2, "A", "$AAAA") is None
    assert assembly.add(1, "A", last) == "!é"


def test_tiny_segments_are_bounded_as_what_they_take_in_memory() -> None:
    assembly = new_assembly(most_bytes=10_000)
    for _ in range(1_000):
        assembly.add(1, "A", "#A")
    assert assembly.dropped == 1


def test_a_flood_of_senders_keeps_nothing_without_bound() -> None:
    assembly = new_assembly(most=10)
    for process_id in range(1_000):
        assembly.add(process_id, "A", "#A")
    assert (len(assembly), assembly.dropped) == (10, 990)
    assert len(assembly.senders) == 20


def test_the_message_of_a_sender_that_is_gone_is_dropped_when_missed_twice() -> None:
    assembly = new_assembly()
    first, last = segments_of("é", 3)
    for process_id in (1, 2):
        assembly.add(process_id, "A", first)
    assembly.saw([2])
    assert (len(assembly), assembly.dropped) == (2, 0), "what it sent may be on its way"
    assembly.saw([2])
    assert (assembly.senders, assembly.size > 0, assembly.dropped) == ({2}, True, 1)
    assert assembly.add(2, "A", last) == "!é"
    assert assembly.size == 0


def test_a_sender_that_is_heard_meanwhile_is_not_gone() -> None:
    assembly = new_assembly()
    for _ in range(3):
        assembly.add(1, "A", "#A")
        assembly.saw([])
    assert (len(assembly), assembly.dropped) == (1, 0)


def test_what_is_ignored_ends_with_its_sender_too() -> None:
    assembly = new_assembly(most=1)
    assembly.add(1, "A", "#A")
    assembly.add(2, "A", "#A")
    assembly.saw([])
    assembly.saw([])
    assert assembly.senders == set()
    assert assembly.dropped == 2


def test_a_lost_connection_drops_all_and_an_unsubscribed_channel_forgets() -> None:
    assembly = new_assembly()
    for channel in "AB":
        assembly.add(1, channel, "#A")
    assembly.forget("A")
    assert (len(assembly), assembly.dropped) == (1, 0)
    assembly.clear()
    assert (len(assembly), assembly.size, assembly.dropped) == (0, 0, 1)


def test_the_end_of_a_message_whose_begin_was_never_seen_is_malformed() -> None:
    *_, last = cut(base64.b64encode(b"!" + b"x" * 10_000).decode())
    with pytest.raises(MalformedPayload):
        new_assembly().add(1, "A", last)
