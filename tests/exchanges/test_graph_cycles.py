"""The graph of exchanges: queues, edges and cycles."""

from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.exchanges.store.route_graph import RouteGraph, build_graph
from tests.exchanges.asking import defined


def drawn(*arrows: str) -> RouteGraph:
    """The graph of exchanges written as "source > destination destination"."""
    pairs = (arrow.split(" > ") for arrow in arrows)
    return build_graph(defined(source, *destinations.split()) for source, destinations in pairs)


def test_a_cycle_may_be_longer_than_the_stack_and_stays_within_a_namespace():
    chain = [f"q{number} > q{number + 1}" for number in range(5000)]
    assert drawn(*chain).cycles == drawn("a > eu/a", "eu/a > b").cycles == ()
    assert len(drawn(*chain, "q5000 > q0").cycles[0]) == 5001


names = st.sampled_from("abcdef")


@given(st.lists(st.tuples(names, names), max_size=12))
def test_a_queue_is_in_a_cycle_if_it_leads_back_to_itself(arrows: list[tuple[str, str]]):
    found = drawn(*(f"{source} > {destination}" for source, destination in arrows))
    reached = {(source, destination) for source, destination in arrows}
    for middle in "abcdef":
        ends = [end for start, end in reached if start == middle]
        reached |= {(start, end) for start, at in reached if at == middle for end in ends}
    in_cycle = {each.name for cycle in found.cycles for each in cycle}
    assert in_cycle == {name for name in "abcdef" if (name, name) in reached}
    for edge in found.edges:
        assert edge.is_in_cycle == ((edge.destination.name, edge.source.name) in reached)
