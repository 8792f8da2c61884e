"""Routing: what an exchange takes is delivered and removed in one transaction."""

from datetime import timedelta
from typing import Any

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import Program
from tests.sql.simultaneous import blocked

pytestmark = pytest.mark.versions

PUT_OFF = """
    SELECT e.tries, e.available_at >= %s + interval '1 s'
    FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q ON q.id = e.queue_id
    WHERE q.name = 'Q'
"""


class Exchange:
    """Exchange X of user3: from queue Q to queues A and B."""

    def __init__(self, queue: Queue, *, is_brief: bool) -> None:
        self.is_brief = is_brief
        queue.world.rules(
            "user3 exchange.X Queue Q R 1", "user3 exchange.X Queue A W 1",
            "user3 exchange.X Queue B W 1", "user2 GET Queue A R 1", "user2 GET Queue B R 1",
            "user2 GET Queue __no_route__ R 1", "user2 GET Queue __too_many_hops__ R 1",
        )  # fmt: skip
        if is_brief:
            # One statement delivers it all only where all queues are there.
            for name in ("Q", "A", "B", "FORBIDDEN", "__no_route__", "__too_many_hops__"):
                queue.limit(None, name)
        self.queue = queue
        self.program: Program = queue.world.program("user3")
        self.asked_at = queue.now()

    def take(self, count: int = 10) -> list[Any]:
        return self.program.elements("take", "exchange.X", "Q", count)

    def reserve(self, count: int = 10) -> list[Any]:
        return self.program.elements("reserve", "exchange.X", "Q", count, 60)

    def route(self, *copies: dict[str, Any]) -> dict[str, Any]:
        """Take one element, and deliver copies of it in the same transaction."""
        with self.program.connection.transaction():
            (taken,) = self.take(1)
            return self.deliver([taken.id], [{"of": taken.id, **copy} for copy in copies])

    def put_off(self) -> list[tuple[int, bool]]:
        """What is in Q: tries, and whether the last call has put it off by a second or more."""
        return self.queue.world.execute(PUT_OFF, [self.asked_at]).fetchall()

    def deliver(self, *given: Any) -> dict[str, Any]:
        answer = self.answer(*given)
        assert answer.pop("Err") == "0", answer
        return answer

    def answer(
        self, elements: list[Any], copies: list[dict[str, Any]], failed: list[Any] | None = None
    ) -> dict[str, Any]:
        """Call deliver: a copy is {"of": element, "to": queue, and what is other}."""
        columns = [
            [str(copy["of"]) for copy in copies],
            [copy.get("mark", f"X/{copy.get('to')}") for copy in copies],
            [copy.get("to") for copy in copies],
            *([copy.get(name) for copy in copies] for name in ("headers", "body", "enc")),
            *([copy.get(name) for copy in copies] for name in ("mature", "tries")),
        ]
        put_back = [str(element) for element in failed or []]
        if self.is_brief:
            # As loops do: where all is as at the source, nothing is said of it.
            columns[3:] = [column if any(column) else None for column in columns[3:]]
        self.asked_at = self.queue.now()
        return self.program.query(
            "SELECT messages.deliver('exchange.X', 'Q', %s::text[], %s::text[], %s::text[],"
            " %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::timestamptz[],"
            " %s::int[])",
            [str(element) for element in elements],
            (put_back or None) if self.is_brief else put_back,
            *columns,
        )


@pytest.fixture(params=[False, True], ids=["with all columns", "in brief"])
def exchange(queue: Queue, request) -> Exchange:
    """As given with all columns, and in brief: each form has checks of its own."""
    return Exchange(queue, is_brief=request.param)


def test_copies_are_pushed_and_the_element_is_removed(exchange: Exchange):
    id_ = exchange.queue.push("x", headers='{"h":1}', tries=3)
    exchange.queue.wait(queue="A")
    # Two equal destinations get two copies.
    done = exchange.route({"to": "A", "mark": "0"}, {"to": "A", "mark": "1"}, {"to": "B"})
    assert (done, exchange.queue.wakes()) == ({"Lost": [], "Refused": []}, ["pushed A"])
    rows = [*exchange.queue.reserve(5, queue="A"), *exchange.queue.reserve(5, queue="B")]
    found = [(row.body, row.headers, row.tries) for row in rows]
    assert found == [("x", {"h": 1, "x-hop-count": 1}, 0)] * 3
    assert len({id_, *(row.id for row in rows)}) == 4
    assert exchange.queue.sizes()["Total"] == 0
    assert exchange.queue.counts() == {"puts": 1, "gets": 1}
    assert exchange.queue.counts("A")["puts"] == 2


def test_a_copy_may_differ_from_its_source(exchange: Exchange):
    exchange.queue.push("x", enc="json")
    changed = {"headers": '{"n":2}', "body": "YQ==", "enc": "b64", "tries": 5}
    exchange.route({"to": "A", **changed}, {"to": "B", "mature": "2020-01-01T00:00:00Z"})
    (a,), (b,) = exchange.queue.reserve(queue="A"), exchange.queue.reserve(queue="B")
    assert (a.body, a.enc, a.headers, a.tries) == ("YQ==", "b64", {"n": 2}, 5)
    assert (b.body, b.enc, b.mature.year) == ("x", "json", 2020)


def test_no_route_and_too_many_hops_need_no_rule_and_tell_the_exchange(exchange: Exchange):
    exchange.queue.push("lost", "looping", headers='{"x-hop-count":4}')
    exchange.route({"to": "__no_route__"})
    exchange.route({"to": "__too_many_hops__"})
    (lost,) = exchange.queue.reserve(queue="__no_route__")
    (looping,) = exchange.queue.reserve(queue="__too_many_hops__")
    assert lost.headers == {"x-hop-count": 5, "x-exchange-name": "X"}
    assert looping.headers == {"x-hop-count": 4, "x-exchange-name": "X"}


def test_no_route_without_a_rule_accepts_only_unchanged_elements(exchange: Exchange):
    for change in ({"body": "forged"}, {"headers": '{"forged":1}'}):
        exchange.queue.push("x")
        done = exchange.route({"to": "__no_route__", **change})
        assert [refusal[2] for refusal in done["Refused"]] == ["cannot use Queue to __no_route__"]
        assert exchange.queue.reserve(queue="__no_route__") == []
        exchange.queue.world.execute("DELETE FROM psqlmessages_element")


@pytest.mark.parametrize("queues", [("__no_route__",) * 2, ("__no_route__", "__too_many_hops__")])
def test_without_a_rule_an_element_is_put_aside_once(exchange: Exchange, queues: tuple[str, str]):
    id_ = exchange.queue.push("x")
    assert exchange.answer([id_], [{"of": id_, "to": queue} for queue in queues])["Err"] == "58"
    done = exchange.deliver([id_], [{"of": ref, "to": queues[0]} for ref in (id_, f"0{id_}")])
    assert done == {"Lost": [], "Refused": []}
    assert exchange.queue.pop(5, "__no_route__") == ["x"]
    # With a rule as often as wanted.
    exchange.queue.world.rules("user3 exchange.X Queue __* RW 1")
    id_ = exchange.queue.push("x")
    assert exchange.answer([id_], [{"of": id_, "to": queue} for queue in queues])["Err"] == "0"


@pytest.mark.parametrize("name", ["Q", "NEW.1"])
def test_an_existing_queue_takes_no_copy_without_the_right(exchange: Exchange, name: str):
    exchange.queue.push("other", queue="NEW.1")
    id_ = exchange.queue.push("x")
    done = exchange.deliver([id_], [{"of": id_, "to": name}])
    assert [refusal[0] for refusal in done["Refused"]] == [f"X/{name}"]
    assert exchange.queue.pop(5, "NEW.1") == ["other"]
    assert exchange.put_off() == [(1, True)]


def test_after_a_refused_copy_the_others_are_made_once(exchange: Exchange):
    id_ = exchange.queue.push("x", headers='{"h":1}')
    done = exchange.route({"to": "A"}, {"to": "FORBIDDEN"})
    assert done["Refused"] == [["X/FORBIDDEN", str(id_), "cannot use Queue to FORBIDDEN", 2]]
    assert exchange.queue.pop(5, "A") == ["x"]
    assert exchange.put_off() == [(1, True)]
    rules = ("user3 exchange.X Queue FORBIDDEN W 1", "user2 GET Queue FORBIDDEN R 1")
    exchange.queue.world.rules(*rules)
    exchange.queue.age(2)
    with exchange.program.connection.transaction():
        (again,) = exchange.take()
        assert (again.id, again.tries, again.delivered) == (id_, 1, ["X/A"])
        assert again.headers == {"h": 1}
        exchange.deliver([id_], [{"of": id_, "to": "A"}, {"of": id_, "to": "FORBIDDEN"}])
    assert (exchange.queue.pop(5, "A"), exchange.queue.pop(5, "FORBIDDEN")) == ([], ["x"])


def test_the_delay_grows_and_ends_with_the_dead_letters(queue: Queue):
    brief = Exchange(queue, is_brief=True)
    queue.limit(3)
    queue.push("x")
    for seconds in (1, 2, 4):
        with brief.program.connection.transaction():
            (taken,) = brief.take()
            brief.deliver([taken.id], [], [taken.id])
        if seconds < 4:
            due = brief.queue.world.owner.query("SELECT available_at FROM psqlmessages_element")
            assert brief.asked_at <= due - timedelta(seconds=seconds) <= brief.queue.now()
            brief.queue.age(seconds)
    (dead,) = brief.queue.reserve(queue="__deadletter__")
    assert dead.headers["x-dl-tries"] == 3


def test_elements_taken_over_by_others_are_reported_lost(exchange: Exchange):
    exchange.queue.push("x", "y")
    late, kept = exchange.reserve()
    exchange.queue.age(61)
    exchange.queue.lease()
    copies = [{"of": late.lease, "to": "A"}, {"of": kept.lease, "to": "A"}]
    assert exchange.deliver([late.lease, kept.lease], copies)["Lost"] == [late.lease]
    assert exchange.queue.pop(5, "A") == ["y"]
    assert exchange.queue.sizes()["Total"] == 1


def test_a_leased_element_that_is_locked_for_a_moment_is_not_lost(exchange: Exchange):
    # As by a reader that began before it was reserved: it locks what it finds, and then lets it be.
    exchange.queue.push("x", "y")
    leases = [row.lease for row in exchange.reserve()]
    copies = [{"of": lease, "to": "A"} for lease in leases]
    world = exchange.queue.world
    world.execute("BEGIN; SELECT id FROM psqlmessages_element LIMIT 1 FOR UPDATE")
    with blocked(world, exchange.program, lambda: exchange.deliver(leases, copies)) as answer:
        world.execute("COMMIT")
    assert answer.result() == {"Lost": [], "Refused": []}
    assert exchange.queue.pop(5, "A") == ["x", "y"]


def test_an_element_that_another_has_or_of_another_queue_cannot_be_delivered(exchange: Exchange):
    for id_ in (exchange.queue.push("leased"), exchange.queue.push("x", queue="NEW.1")):
        exchange.queue.reserve()
        assert exchange.deliver([id_], [{"of": id_, "to": "A"}])["Lost"] == [str(id_)]
    assert (exchange.queue.pop(5, "A"), exchange.queue.pop(queue="NEW.1")) == ([], ["x"])


def test_a_copy_is_made_of_each_element_that_is_named_and_once(exchange: Exchange):
    exchange.queue.push("x", "y")
    with exchange.program.connection.transaction():
        one, two = (row.id for row in exchange.take())
        exchange.deliver([one, one], [{"of": one, "to": "A"}, {"of": two, "to": "A"}])
    assert (exchange.queue.pop(5, "A"), exchange.queue.pop(5)) == (["x"], ["y"])
    # A copy without a mark hides no other copy.
    id_ = exchange.queue.push("z")
    exchange.deliver([id_], [{"of": id_, "to": "A", "mark": None}], [id_])
    exchange.queue.age(10)
    exchange.deliver([id_], [{"of": id_, "to": "B", "mark": "m"}])
    assert (exchange.queue.pop(5, "A"), exchange.queue.pop(5, "B")) == (["z"], ["z"])


def test_a_malformed_copy_is_refused_and_its_element_comes_back(exchange: Exchange):
    for fault in {"headers": "["}, {"enc": "x", "body": "y"}, {"mature": "infinity"}, {"tries": -1}:
        exchange.queue.push("x")
        assert len(exchange.route({"to": "A", **fault})["Refused"]) == 1, fault
        assert (exchange.put_off(), exchange.queue.pop(5, "A")) == ([(1, True)], []), fault
        exchange.queue.world.execute("DELETE FROM psqlmessages_element")


def test_arguments_that_name_nothing_deliver_nothing(exchange: Exchange):
    assert exchange.deliver([], []) == {"Lost": [], "Refused": []}
    for ref in ("", None, "x", "1.x", "01"):
        assert exchange.program.error("deliver", "exchange.X", "Q", [ref], *[[]] * 9)[0] == 63, ref
    # Arrays of different lengths: what is missing is as at the source.
    id_ = exchange.queue.push("x")
    ref = [str(id_)]
    exchange.program.ok("deliver", "exchange.X", "Q", ref, [], ref, [], ["A"], *[[]] * 5)
    assert exchange.queue.pop(5, "A") == ["x"]
