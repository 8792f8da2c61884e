"""Rights to queues that are there: what the one look of the common case checks by itself."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import World

PUSHES = pytest.mark.parametrize("function", ["push", "push_many"])
TAKES = pytest.mark.parametrize("function", ["pop", "reserve", "take"])
READS = pytest.mark.parametrize("function", ["pop", "reserve", "take", "peek"])


@pytest.fixture
def smallest_maximum(world: World) -> Iterator[int]:
    """Bodies may have no more bytes than the common case takes at once."""
    world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = 8192")
    yield 8192
    world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")


@READS
def test_the_rule_of_another_role_takes_nothing(desk: Desk, function: str) -> None:
    desk.push("x")
    desk.world.rules("user1 GET Queue ELSE R 1")
    refused = desk.pusher.error(function, "GET", "Q", 1)
    assert refused == (2, "cannot use Queue to Q")
    assert desk.pop() == ["x"]


@pytest.mark.parametrize("options", [(), (None, "{}")])
def test_the_rule_of_another_role_pushes_nothing(desk: Desk, options: tuple[Any, ...]) -> None:
    desk.push("x")
    assert desk.reader.error("push", "PUT", "Q", "forged", *options)[0] == 2
    assert desk.pop(5) == ["x"]


@pytest.mark.parametrize("function", ["commit", "rollback", "release"])
def test_a_stolen_lease_is_of_no_use_to_another_role(desk: Desk, function: str) -> None:
    desk.push("x")
    lease = desk.lease()
    arguments = (0, lease) if function == "rollback" else (lease,)
    assert desk.pusher.error(function, "GET", *arguments)[0] == 2
    assert desk.sizes()["Reserved"] == 1


@READS
@pytest.mark.parametrize(("ident", "number"), [("GET*", 16), ("G*", 16), ("x" * 101, 54), ("", 15)])
def test_what_is_no_name_of_a_node_takes_nothing_though_a_rule_covers_it(
    desk: Desk, function: str, ident: str, number: int
) -> None:
    desk.world.rules("user2 GET* Queue Q R 1", "user2 * Queue Q R 1")
    desk.push("x")
    assert desk.reader.error(function, ident, "Q", 1)[0] == number
    assert desk.pop() == ["x"]


@pytest.mark.parametrize(
    ("ident", "queue", "number"),
    [("PUT*", "Q", 16), ("P*", "ELSE", 16), ("PUT", "Q*", 62), ("PUT", "*", 62),
     ("x" * 101, "Q", 54), ("PUT", "x" * 101, 54)],
)  # fmt: skip
@PUSHES
def test_what_is_no_name_gets_nothing_though_a_rule_covers_it(
    desk: Desk, function: str, ident: str, queue: str, number: int
) -> None:
    desk.world.rules("user1 * Queue * RW 1", "user1 PUT* Queue Q RW 1")
    desk.push("x")
    body = ["forged"] if function == "push_many" else "forged"
    assert desk.pusher.error(function, ident, queue, body)[0] == number
    assert desk.pop(5) == ["x"]
    assert desk.world.owner.query("SELECT array_agg(queue) FROM messages.queues") == ["Q"]


@PUSHES
def test_a_body_over_the_maximum_is_refused(
    desk: Desk, smallest_maximum: int, function: str
) -> None:
    desk.push("x" * smallest_maximum)
    large = "x" * (smallest_maximum + 1)
    body = ["small", large] if function == "push_many" else large
    refused = desk.pusher.error(function, "PUT", "Q", body)
    assert refused == (51, f"body of {smallest_maximum + 1} bytes exceeds {smallest_maximum}")
    assert [len(body) for body in desk.pop(5)] == [smallest_maximum]


@PUSHES
def test_an_encoding_that_there_is_not_is_refused(desk: Desk, function: str) -> None:
    desk.push("x")
    body = ["forged"] if function == "push_many" else "forged"
    assert desk.pusher.error(function, "PUT", "Q", body, "gzip") == (55, "unknown encoding gzip")
    assert desk.pop(5) == ["x"]


@pytest.mark.parametrize("rule", ["ELSE Queue Q", "PUT Queue ELSE", "PUT Topic Q", "PUT Rpc Q"])
@PUSHES
def test_a_rule_for_something_else_pushes_nothing(desk: Desk, function: str, rule: str) -> None:
    desk.push("x")
    desk.world.owner.connection.execute("DELETE FROM messages.auth WHERE ident = 'PUT'")
    desk.world.rules(f"user1 {rule} W 1", "user1 PUT Topic KNOWN R 1")
    body = ["forged"] if function == "push_many" else "forged"
    assert desk.pusher.error(function, "PUT", "Q", body)[0] == 2
    assert desk.pop(5) == ["x"]


@TAKES
@pytest.mark.parametrize(("count", "number"), [(4097, 58), (0, 60), (-1, 60), (None, 60)])
def test_a_count_out_of_bounds_takes_nothing(
    desk: Desk, function: str, count: int | None, number: int
) -> None:
    desk.push("x")
    assert desk.reader.error(function, "GET", "Q", count)[0] == number
    assert desk.pop() == ["x"]


def test_an_element_is_removed_from_its_own_queue_only(desk: Desk) -> None:
    id_ = desk.push("x")
    desk.pusher.ok("push", "BOSS", "OTHER", "y")
    assert desk.pusher.ok("remove", "BOSS", "OTHER", id_)["Done"] is False
    assert desk.pop() == ["x"]


def test_the_view_leaks_no_row_to_a_function_in_the_query(desk: Desk, world: World) -> None:
    desk.push("x")
    world.owner.connection.execute("INSERT INTO psqlmessages_queue (name) VALUES ('HIDDEN')")
    desk.reader.connection.execute(
        "CREATE FUNCTION pg_temp.leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001"
        " AS $$ BEGIN RAISE NOTICE '%', $1; RETURN true; END $$"
    )
    desk.reader.connection.execute("SELECT FROM messages.queues WHERE pg_temp.leak(queue)")
    assert desk.reader.warnings == ["NOTICE: Q"]
