"""Plans: what an exchange's definition means for its loops."""

from psqlmessages.exchanges.messages import Graphed, Place, Target
from psqlmessages.exchanges.selector import Selector
from psqlmessages.graph.plans import Flow, Plan


def graphed(*targets: str, **options: object) -> Graphed:
    places = (Place(*target.split("/")) for target in targets)
    return Graphed("x1", Place("here", "a"), tuple(map(Target, places)), **options)


def test_within_one_database_nothing_is_reserved() -> None:
    assert Plan.of(graphed("here/b", "here/c", reserve=False)).flow is Flow.WITHIN
    assert Plan.of(graphed("here/b", "there/c")).flow is Flow.RESERVED
    assert Plan.of(graphed("here/b", "there/c", reserve=False)).flow is Flow.POPPED


def test_the_window_is_shared_by_the_loops() -> None:
    plan = Plan.of(graphed("here/b", parallel=4, wsize=100))
    assert (plan.loops, plan.batch) == (4, 25)
    plan = Plan.of(graphed("here/b", parallel=16, wsize=3))
    assert (plan.loops, plan.batch) == (3, 1)


def test_a_batch_has_no_more_copies_than_one_call_delivers() -> None:
    plan = Plan.of(graphed(*[f"here/b{number}" for number in range(1000)], wsize=4096))
    assert plan.batch == 65


def test_bodies_are_fetched_only_where_they_are_looked_at_or_leave_the_database() -> None:
    place = Place("here", "b")
    source = Place("here", "a")
    headers = Graphed("x1", source, (Target(place, Selector('msg.headers.n == "1"')),))
    bodies = Graphed("x1", source, (Target(place, Selector('msg.body == "1"')),))
    assert not Plan.of(headers).fetches_body
    assert Plan.of(bodies).fetches_body
    assert Plan.of(graphed("there/b")).fetches_body
    assert not Plan.of(graphed("there/b")).wants_body


def test_what_distinguishes_a_destination_stays_when_others_come_before_it() -> None:
    before = Plan.of(graphed("here/b", "there/b", "here/b"))
    after = Plan.of(graphed("there/c", "there/b", "here/b", "here/b"))
    assert before.marks == ("x1/here/b/0", "x1/there/b/0", "x1/here/b/1")
    assert set(before.marks) < set(after.marks)
    assert before.key(1, 5, 99) == after.key(1, 5, 99) == "x1.5.99.0"
