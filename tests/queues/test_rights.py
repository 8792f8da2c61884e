"""Rights to queues that exist: what the single query of the common case checks by itself."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import World

PUSHES = {"push": "forged", "push_many": ["forged"]}
TAKES = ("pop", "reserve", "take")
READS = (*TAKES, "peek")


@pytest.fixture
def smallest_maximum(world: World) -> Iterator[int]:
    """Bodies may have no more bytes than the common case takes at once."""
    world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = 8192")
    yield 8192
    world.owner.connection.execute("UPDATE messages._settings SET max_body_bytes = DEFAULT")


def test_the_rule_of_another_role_takes_nothing(desk: Desk) -> None:
    desk.push("x")
    desk.world.rules("user1 GET Queue ELSE R 1")
    refused = {function: desk.pusher.error(function, "GET", "Q", 1) for function in READS}
    assert refused == dict.fromkeys(READS, (2, "cannot use Queue to Q"))
    # Nor does it push.
    for options in ((), (None, "{}")):
        assert desk.reader.error("push", "PUT", "Q", "forged", *options)[0] == 2
    assert desk.pop(5) == ["x"]


@pytest.mark.parametrize("function", ["commit", "rollback", "release"])
def test_a_stolen_lease_is_of_no_use_to_another_role(desk: Desk, function: str) -> None:
    desk.push("x")
    lease = desk.lease()
    arguments = (0, lease) if function == "rollback" else (lease,)
    assert desk.pusher.error(function, "GET", *arguments)[0] == 2
    assert desk.sizes()["Reserved"] == 1


def test_what_is_no_name_of_a_node_takes_nothing_though_a_rule_covers_it(desk: Desk) -> None:
    desk.world.rules("user2 GET* Queue Q R 1", "user2 * Queue Q R 1")
    desk.push("x")
    numbers = {"GET*": 16, "G*": 16, "x" * 101: 54, "": 15}
    expected = {(function, ident): numbers[ident] for function in READS for ident in numbers}
    refused = {case: desk.reader.error(case[0], case[1], "Q", 1)[0] for case in expected}
    assert refused == expected
    assert desk.pop() == ["x"]


def test_what_is_no_name_gets_nothing_though_a_rule_covers_it(desk: Desk) -> None:
    desk.world.rules("user1 * Queue * RW 1", "user1 PUT* Queue Q RW 1")
    desk.push("x")
    numbers = {
        ("PUT*", "Q"): 16, ("P*", "ELSE"): 16, ("PUT", "Q*"): 62, ("PUT", "*"): 62,
        ("x" * 101, "Q"): 54, ("PUT", "x" * 101): 54,
    }  # fmt: skip
    for function, body in PUSHES.items():
        refused = {names: desk.pusher.error(function, *names, body)[0] for names in numbers}
        assert refused == numbers, function
    assert desk.pop(5) == ["x"]
    assert desk.world.owner.query("SELECT array_agg(queue) FROM messages.queues") == ["Q"]


def test_a_body_over_the_maximum_is_refused(desk: Desk, smallest_maximum: int) -> None:
    desk.push("x" * smallest_maximum)
    large = "x" * (smallest_maximum + 1)
    refused = (51, f"body of {smallest_maximum + 1} bytes exceeds {smallest_maximum}")
    assert desk.pusher.error("push", "PUT", "Q", large) == refused
    assert desk.pusher.error("push_many", "PUT", "Q", ["small", large]) == refused
    assert [len(body) for body in desk.pop(5)] == [smallest_maximum]


def test_an_encoding_that_there_is_not_is_refused(desk: Desk) -> None:
    desk.push("x")
    for function, body in PUSHES.items():
        refused = desk.pusher.error(function, "PUT", "Q", body, "gzip")
        assert refused == (55, "unknown encoding gzip"), function
    assert desk.pop(5) == ["x"]


def test_a_rule_for_something_else_pushes_nothing(desk: Desk) -> None:
    desk.push("x")
    desk.world.rules("user1 PUT Topic KNOWN R 1")
    for rule in ("ELSE Queue Q", "PUT Queue ELSE", "PUT Topic Q", "PUT Rpc Q"):
        desk.world.owner.connection.execute(
            "DELETE FROM messages.auth WHERE ident IN ('PUT', 'ELSE') AND dest <> 'KNOWN'"
        )
        desk.world.rules(f"user1 {rule} W 1")
        for function, body in PUSHES.items():
            assert desk.pusher.error(function, "PUT", "Q", body)[0] == 2, (rule, function)
    assert desk.pop(5) == ["x"]


def test_a_count_out_of_bounds_takes_nothing(desk: Desk) -> None:
    desk.push("x")
    numbers: dict[int | None, int] = {4097: 58, 0: 60, -1: 60, None: 60}
    for function in TAKES:
        refused = {n: desk.reader.error(function, "GET", "Q", n)[0] for n in numbers}
        assert refused == numbers, function
    durations: list[Any] = [0, -1, float("nan"), 1e12, None]
    refused = [desk.reader.error("reserve", "GET", "Q", 1, each)[0] for each in durations]
    assert refused == [60] * len(durations)
    assert desk.pop() == ["x"]


def test_an_element_is_removed_from_its_own_queue_only(desk: Desk) -> None:
    id_ = desk.push("x")
    desk.pusher.ok("push", "BOSS", "OTHER", "y")
    assert desk.pusher.ok("remove", "BOSS", "OTHER", id_)["Done"] is False
    assert desk.pop() == ["x"]
