"""Cycles of queues."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.exchanges import QueueRef
from psqlmessages.exchanges.store.route_graph import find_cycles
from psqlmessages.monitor.graph import mark_cycles
from tests.exchanges.asking import defined


def cycles(*arrows: str) -> list[tuple[QueueRef, ...]]:
    """The cycles of exchanges written as "source > destination"."""
    return find_cycles(defined(*arrow.split(" > ")) for arrow in arrows)


def test_a_cycle_may_be_longer_than_the_stack_and_stays_within_a_namespace():
    chain = [f"q{number} > q{number + 1}" for number in range(5000)]
    assert cycles(*chain) == cycles("a > eu/a", "eu/a > b") == []
    assert len(cycles(*chain, "q5000 > q0")[0]) == 5001


names = st.sampled_from("abcdef")


@given(st.lists(st.tuples(names, names), max_size=12))
def test_a_queue_is_in_a_cycle_if_it_leads_back_to_itself(arrows: list[tuple[str, str]]):
    found = cycles(*(f"{source} > {destination}" for source, destination in arrows))
    reached = {(source, destination) for source, destination in arrows}
    for middle in "abcdef":
        ends = [end for start, end in reached if start == middle]
        reached |= {(start, end) for start, via in reached if via == middle for end in ends}
    in_cycles = {each.name for cycle in found for each in cycle}
    assert in_cycles == {name for name in "abcdef" if (name, name) in reached}
    exchanges: list[dict[str, Any]] = [
        {"name": "x", "source": ["", source], "destinations": [{"to": ["", destination]}]}
        for source, destination in arrows
    ]
    mark_cycles(exchanges)
    marks = [route["is_in_cycle"] for exchange in exchanges for route in exchange["destinations"]]
    assert marks == [(destination, source) in reached for source, destination in arrows]
