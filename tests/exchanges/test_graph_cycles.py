"""Cycles of queues."""

from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.exchanges import QueueRef
from psqlmessages.exchanges.store.route_graph import find_cycles
from tests.exchanges.asking import defined


def cycles(*arrows: str) -> list[tuple[QueueRef, ...]]:
    """The cycles of exchanges written as "source > destination destination"."""
    pairs = (arrow.split(" > ") for arrow in arrows)
    return find_cycles(defined(source, *destinations.split()) for source, destinations in pairs)


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
        reached |= {(start, end) for start, at in reached if at == middle for end in ends}
    number = {each.name: number for number, cycle in enumerate(found) for each in cycle}
    assert number.keys() == {name for name in "abcdef" if (name, name) in reached}
    for source, destination in arrows:
        is_in_cycle = number.get(source, -1) == number.get(destination)
        assert is_in_cycle == ((destination, source) in reached)
