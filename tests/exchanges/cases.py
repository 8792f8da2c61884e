"""Cases for every runner of exchanges; `run_until_idle` runs all until no source has elements."""

from collections.abc import Callable
from typing import Any

from tests.exchanges.field import Field, flow

Run = Callable[[], None]

HOP = "x-hop-count"
NAME = "x-exchange-name"


def case_each_destination_gets_a_copy_as_it_was_pushed(field: Field, run_until_idle: Run) -> None:
    bodies: list[Any] = ["text", "", {"a": [1, 2.5, None, True]}, [], 0, None, False, b"\x00\xff"]
    field.define(x1=flow("a", "b", "c", "c"))
    headers = {"lane": 7, "flag": True, "note": None, "deep": {"a": [1]}}
    for body in bodies:
        field.default.push("a", body, **headers)
    run_until_idle()
    copies = [(body, {**headers, HOP: 1}) for body in bodies]
    assert field.default.contents("b") == copies
    # Two equal destinations give two copies.
    found = field.default.contents("c")
    assert found[::2] == found[1::2] == copies
    assert field.default.contents("a") == []


def case_the_order_is_kept_by_a_single_loop(field: Field, run_until_idle: Run) -> None:
    field.define(x1=flow("a", "b", wsize=7))
    bodies = [str(number) for number in range(50)]
    field.default.push_many("a", bodies)
    run_until_idle()
    assert field.default.bodies("b") == bodies


def case_changes_are_for_this_and_the_later_destinations(field: Field, run_until_idle: Run) -> None:
    second = ("second", '{"headers": {"lane": "slow"}, "body": {"n": 1}}')
    never = ("never", '{"select": false, "headers": {"seen": msg.hops}}')
    last = ("last", 'msg.headers.lane == "slow" && msg.body.n == 1')
    field.define(x1=flow("a", "first", second, never, last))
    field.default.push("a", "it", lane="fast")
    run_until_idle()
    assert field.default.contents("first") == [("it", {"lane": "fast", HOP: 1})]
    assert field.default.contents("second") == [({"n": 1}, {"lane": "slow", HOP: 1})]
    assert field.default.contents("never") == []
    assert field.default.contents("last") == [({"n": 1}, {"lane": "slow", "seen": 1, HOP: 1})]


def case_a_circle_ends_after_so_many_hops(field: Field, run_until_idle: Run) -> None:
    traversals = "has(msg.headers.traversals) ? msg.headers.traversals + 1 : 1"
    count = f'{{"headers": {{"traversals": {traversals}}}}}'
    field.define(x1=flow("a", ("b", count)), x2=flow("b", ("a", count)))
    field.default.push("a", "it")
    run_until_idle()
    # x1 routed the first and the 17th time; x2 refused the 18th.
    aside = [("it", {"traversals": 17, HOP: 17, NAME: "x2"})]
    assert field.default.contents("__too_many_hops__") == aside


def case_copies_are_pushed_as_their_selector_says(field: Field, run_until_idle: Run) -> None:
    late, tried = ("late", '{"delay": 1000}'), ("tried", '{"tries": 3}')
    when = ("when", '{"mature": 4000000000, "delay": 5}')
    field.define(x1=flow("a", late, when, tried, "plain"))
    field.default.query("SELECT messages.push('W', 'a', 'it', tries => 5)")
    run_until_idle()
    state = """
        SELECT round(extract(epoch FROM e.mature_at - clock_timestamp()) / 100) * 100
               || ' ' || extract(epoch FROM e.mature_at)::bigint || ' ' || e.tries
        FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q ON q.id = e.queue_id
        WHERE q.name = %s
    """
    for queue, delay, tries in (("late", "1000", "0"), ("tried", "0", "3"), ("plain", "0", "0")):
        assert field.default.query(state, queue).split()[::2] == [delay, tries], queue
    assert field.default.query(state, "when").split()[1:] == ["4000000000", "0"]


CASES = [value for name, value in globals().items() if name.startswith("case_")]
