"""Cases: what any runner of exchanges has to make of what was pushed.

Each gets a field, and a callable that runs all exchanges until no source has anything to take.
"""

from collections.abc import Callable
from typing import Any

from tests.exchanges.field import Field

Run = Callable[[], None]

HOP = "x-hop-count"
NAME = "x-exchange-name"


def case_each_destination_gets_a_copy_as_it_was_pushed(field: Field, run_until_idle: Run) -> None:
    bodies: list[Any] = ["text", "", {"a": [1, 2.5, None, True]}, [], 0, None, False, b"\x00\xff"]
    field.define(x1={"src": "a", "dst": ["b", "c"]})
    for body in bodies:
        field.default.push("a", body, lane=7, flag=True, note=None, deep={"a": [1]})
    run_until_idle()
    headers = {"lane": 7, "flag": True, "note": None, "deep": {"a": [1]}, HOP: 1}
    for queue in ("b", "c"):
        assert field.default.contents(queue) == [(body, headers) for body in bodies]
    assert field.default.contents("a") == []


def case_the_order_is_kept_by_a_single_loop(field: Field, run_until_idle: Run) -> None:
    field.define(x1={"consumer": {"wsize": 7}, "src": "a", "dst": ["b"]})
    bodies = [str(number) for number in range(50)]
    field.default.push_many("a", bodies)
    run_until_idle()
    assert field.default.bodies("b") == bodies


def case_a_selector_decides_by_its_value(field: Field, run_until_idle: Run) -> None:
    noes = ["false", "null", "0", '""']
    yeses = ["true", "1", '"x"', "{}", '{"other": 1}', "[]"]
    selectors = {f"no{n}": text for n, text in enumerate(noes)}
    selectors |= {f"yes{n}": text for n, text in enumerate(yeses)}
    destinations = [{"queue": queue, "selector": text} for queue, text in selectors.items()]
    field.define(x1={"src": "a", "dst": destinations})
    field.default.push("a", "it")
    run_until_idle()
    taken = [queue for queue in selectors if field.default.bodies(queue)]
    assert taken == [f"yes{n}" for n in range(len(yeses))]


def case_changes_are_for_this_and_the_later_destinations(field: Field, run_until_idle: Run) -> None:
    field.define(
        x1={
            "src": "a",
            "dst": [
                "first",
                {"queue": "second", "selector": '{"headers": {"lane": "slow"}, "body": {"n": 1}}'},
                {"queue": "never", "selector": '{"select": false, "headers": {"seen": msg.hops}}'},
                {"queue": "last", "selector": 'msg.headers.lane == "slow" && msg.body.n == 1'},
            ],
        }
    )
    field.default.push("a", "it", lane="fast")
    run_until_idle()
    assert field.default.contents("first") == [("it", {"lane": "fast", HOP: 1})]
    assert field.default.contents("second") == [({"n": 1}, {"lane": "slow", HOP: 1})]
    assert field.default.contents("never") == []
    assert field.default.contents("last") == [({"n": 1}, {"lane": "slow", "seen": 1, HOP: 1})]


def case_a_state_lives_through_one_traversal(field: Field, run_until_idle: Run) -> None:
    field.define(
        x1={
            "src": "a",
            "dst": [
                {"queue": "b", "selector": '!has(state.seen) ? {"state": {"seen": 1}} : {}'},
                {"queue": "c", "selector": "has(state.seen) && state.seen == 1"},
            ],
        }
    )
    field.default.push("a", "one")
    field.default.push("a", "two")
    run_until_idle()
    assert field.default.bodies("b") == field.default.bodies("c") == ["one", "two"]


def case_two_equal_destinations_give_two_copies(field: Field, run_until_idle: Run) -> None:
    field.define(x1={"src": "a", "dst": ["b", "b"]})
    field.default.push("a", "it")
    run_until_idle()
    assert field.default.bodies("b") == ["it", "it"]


def case_what_nobody_wants_is_put_aside(field: Field, run_until_idle: Run) -> None:
    field.define(x1={"src": "a", "dst": [{"queue": "b", "selector": "false"}]})
    field.default.push("a", "it", lane=1)
    run_until_idle()
    assert field.default.contents("__no_route__") == [("it", {"lane": 1, NAME: "x1", HOP: 1})]
    assert field.default.contents("a") == []


def case_a_circle_ends_after_so_many_hops(field: Field, run_until_idle: Run) -> None:
    count = (
        '{"headers": {"traversals": has(msg.headers.traversals) ? msg.headers.traversals + 1 : 1}}'
    )
    field.define(
        x1={"src": "a", "dst": [{"queue": "b", "selector": count}]},
        x2={"src": "b", "dst": [{"queue": "a", "selector": count}]},
    )
    field.default.push("a", "it")
    run_until_idle()
    # 17 traversals, of which x1 had the first and the last; x2 came upon the 18th.
    assert field.default.contents("__too_many_hops__") == [
        ("it", {"traversals": 17, HOP: 17, NAME: "x2"})
    ]


def case_a_hop_count_that_is_no_integer_counts_as_none(field: Field, run_until_idle: Run) -> None:
    field.define(x1={"src": "a", "dst": ["b"]})
    for value in ("3", 3, "x", 2.5, True, None, -1, "16", "17", 99):
        field.default.push("a", "it", x_hop_count=value)
    run_until_idle()
    assert [headers[HOP] for _, headers in field.default.contents("b")] == [
        4, 4, 1, 1, 1, 1, 1, 17,
    ]  # fmt: skip
    aside = field.default.contents("__too_many_hops__")
    assert [headers[HOP] for _, headers in aside] == ["17", 99]


def case_copies_are_pushed_as_their_selector_says(field: Field, run_until_idle: Run) -> None:
    field.define(
        x1={
            "src": "a",
            "dst": [
                {"queue": "late", "selector": '{"delay": 1000}'},
                {"queue": "when", "selector": '{"mature": 4000000000, "delay": 5}'},
                {"queue": "tried", "selector": '{"tries": 3}'},
                "plain",
            ],
        }
    )
    field.default.query("SELECT messages.push('W', 'a', 'it', tries => 5)")
    run_until_idle()
    state = """
        SELECT round(extract(epoch FROM e.mature_at - clock_timestamp()) / 100) * 100
               || ' ' || extract(epoch FROM e.mature_at)::bigint || ' ' || e.tries
        FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q ON q.id = e.queue_id
        WHERE q.name = %s
    """
    assert field.default.query(state, "late").split()[::2] == ["1000", "0"]
    assert field.default.query(state, "when").split()[1:] == ["4000000000", "0"]
    assert field.default.query(state, "tried").split()[::2] == ["0", "3"]
    assert field.default.query(state, "plain").split()[::2] == ["0", "0"]


def case_a_selector_that_fails_counts_as_no(field: Field, run_until_idle: Run) -> None:
    field.define(
        x1={
            "src": "a",
            "dst": [
                {"queue": "b", "selector": "msg.headers.country == 'it'"},
                {"queue": "c", "selector": "1 / (msg.hops - 1) == 1"},
                {"queue": "d", "selector": '{"delay": "soon"}'},
                "e",
            ],
        }
    )
    field.default.push("a", "it")
    run_until_idle()
    assert [field.default.bodies(queue) for queue in "bcde"] == [[], [], [], ["it"]]


def case_exchanges_are_chained(field: Field, run_until_idle: Run) -> None:
    field.define(
        x1={"src": "a", "dst": ["b", "end"]},
        x2={"src": "b", "dst": ["c"]},
        x3={"src": "c", "dst": ["end"]},
    )
    field.default.push("a", "it")
    run_until_idle()
    hops = [headers[HOP] for _, headers in field.default.contents("end")]
    assert hops == [1, 3]


def case_two_exchanges_share_a_source(field: Field, run_until_idle: Run) -> None:
    field.define(
        x1={"consumer": {"wsize": 5}, "src": "a", "dst": ["b"]},
        x2={"consumer": {"wsize": 5}, "src": "a", "dst": ["b"]},
    )
    bodies = [str(number) for number in range(200)]
    field.default.push_many("a", bodies)
    run_until_idle()
    assert sorted(field.default.bodies("b"), key=int) == bodies


CASES = [value for name, value in globals().items() if name.startswith("case_")]
