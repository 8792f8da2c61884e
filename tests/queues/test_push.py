"""Pushing: what is stored, when it becomes available, and what a key prevents."""

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.queues.conftest import Desk
from tests.sql.conftest import PATIENCE_SECONDS, World


def test_naming_a_queue_makes_it_where_a_rule_allows(desk: Desk) -> None:
    desk.push("x", queue="NEW.1")
    assert desk.pop(queue="NEW.1") == ["x"]
    assert desk.pop(queue="NEW.2") == []
    assert desk.world.owner.query(
        "SELECT array_agg(queue ORDER BY queue) FROM messages.queues"
    ) == [
        "NEW.1",
        "NEW.2",
    ]


@pytest.mark.parametrize("function", ["sizes"])
def test_a_status_never_makes_a_queue(desk: Desk, function: str) -> None:
    assert desk.reader.error(function, "GET", "NEW.3") == (62, "Queue NEW.3 is not existent")
    assert desk.world.owner.query("SELECT count(*) FROM messages.queues") == 0


@pytest.mark.parametrize(
    "body", ["", "0", "null", "x" * 10_000, "x" * 3_000_000, "🐘\n\x01'\"\\ %s", "漢" * 5_000]
)
@pytest.mark.parametrize("enc", [None, "json", "b64"])
def test_a_body_comes_back_as_it_was_pushed(desk: Desk, body: str, enc: str | None) -> None:
    desk.push(body, enc=enc)
    (row,) = desk.reader.elements("pop", "GET", "Q")
    assert (row.body, row.enc) == (body, enc)


def test_null_is_pushed_as_the_empty_text(desk: Desk) -> None:
    desk.pusher.ok("push", "PUT", "Q", None)
    assert desk.pop() == [""]


def test_headers_come_back_with_their_types(desk: Desk) -> None:
    headers = {"s": "3", "n": 3, "f": 1.5, "t": True, "z": None, "l": [1, {"a": "b"}], "o": {}}
    desk.push("x", headers=json.dumps(headers))
    (row,) = desk.reserve()
    assert row.headers == headers


@pytest.mark.parametrize("headers", [None, ""])
def test_without_headers_they_are_an_empty_object(desk: Desk, headers: str | None) -> None:
    desk.push("x", headers=headers)
    assert desk.reserve()[0].headers == {}


@pytest.mark.parametrize(
    "headers",
    ["{", "[]", "3", '"x"', "null", '{"a":"\\u0000"}', '{"a":1e999999}', "[" * 100_000,
     '{"a":' * 12_000, json.dumps({"a": "x" * 70_000}), '{"a":1e5000}',
     '{"a":[{"b":-1' + "1" * 4_300 + "}]}", '{"a":' + "[" * 201 + "1" + "]" * 201 + "}"],
    ids=["open", "list", "number", "text", "null", "nul", "overflow", "deep", "nested", "long",
         "exponent", "digits", "levels"],
)  # fmt: skip
def test_headers_that_are_no_object_are_refused(desk: Desk, headers: str) -> None:
    number, text = desk.pusher.error("push", "PUT", "Q", "x", None, headers)
    assert (number, text.partition(":")[0]) == (63, "malformed headers")
    assert desk.pop() == []


@pytest.mark.parametrize(
    "headers",
    ['{"a":1e4299}', '{"a":' + "[" * 200 + "1" + "]" * 200 + "}", json.dumps({"a": "1" * 60_000})],
    ids=["digits", "levels", "text"],
)
def test_headers_as_large_as_they_may_be_are_read(desk: Desk, headers: str) -> None:
    desk.push("x", headers=headers)
    assert json.dumps(desk.reserve()[0].headers) == json.dumps(
        json.loads(headers.replace("1e4299", "1" + "0" * 4_299))
    )


@pytest.mark.parametrize(
    ("given", "hops"),
    [(3, 3), ("3", 3), (0, 0), ("x", 0), (3.5, 0), (True, 0), (None, 0), (-3, 0), ([3], 0),
     ("", 0), (10**12, 999_999_999), ("٣", 0)],
)  # fmt: skip
def test_hops_are_the_header_read_as_a_whole_number(desk: Desk, given: Any, hops: int) -> None:
    desk.push("x", headers=json.dumps({"x-hop-count": given}))
    assert desk.reserve()[0].hops == hops


def test_an_element_holds_id_mature_tries_and_when_it_was_pushed(desk: Desk) -> None:
    before = datetime.now(UTC)
    id_ = desk.push("x", tries=4)
    (row,) = desk.reader.elements("pop", "GET", "Q")
    assert (row.id, row.tries, row.hops, row.lease) == (id_, 4, 0, None)
    assert before <= row.mature <= datetime.now(UTC)
    assert before <= row.pushed_at <= datetime.now(UTC)


def test_an_element_cannot_be_taken_before_it_is_mature(desk: Desk) -> None:
    desk.push("later", delay=60.0)
    desk.push("much later", mature=datetime.now(UTC) + timedelta(hours=1))
    assert desk.pop(5) == []
    desk.age(61)
    assert desk.pop(5) == ["later"]
    desk.age(3600)
    assert desk.pop(5) == ["much later"]


def test_mature_wins_over_delay(desk: Desk) -> None:
    desk.push("x", mature=datetime.now(UTC), delay=60.0)
    assert desk.pop() == ["x"]


def test_what_matured_first_is_taken_first(desk: Desk) -> None:
    now = datetime.now(UTC)
    for body, seconds in (("b", 20), ("c", 10), ("a", 30)):
        desk.push(body, mature=now - timedelta(seconds=seconds))
    desk.push("d", "e")
    assert desk.pop(10) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf"), 1e10])
def test_a_delay_that_is_none_is_refused(desk: Desk, delay: float) -> None:
    assert desk.pusher.error("push", "PUT", "Q", "x", None, None, None, delay)[0] == 63


@pytest.mark.parametrize("mature", ["infinity", "-infinity", "0001-01-01", "20000-01-01"])
def test_a_mature_time_that_no_client_can_read_is_refused(desk: Desk, mature: str) -> None:
    assert desk.pusher.error("push", "PUT", "Q", "x", None, None, mature)[0] == 63


@pytest.mark.parametrize("tries", [-1, None])
def test_tries_that_are_none_are_refused(desk: Desk, tries: int | None) -> None:
    assert desk.pusher.error("push", "PUT", "Q", "x", None, None, None, None, tries)[0] == 63


def test_a_second_push_with_a_key_answers_the_first_id(desk: Desk) -> None:
    first = desk.put("first", key="k")
    assert first == {"Err": "0", "Id": first["Id"]}
    assert desk.put("second", key="k") == {"Err": "0", "Id": first["Id"], "Already": 1}
    assert desk.pop(5) == ["first"]


def test_a_key_counts_though_the_element_has_been_taken(desk: Desk) -> None:
    first = desk.put("first", key="k")["Id"]
    assert desk.pop() == ["first"]
    assert desk.put("second", key="k")["Id"] == first
    assert desk.pop() == []


def test_a_key_counts_in_its_queue_only(desk: Desk) -> None:
    desk.push("x", key="k")
    desk.push("y", key="k", queue="NEW.1")
    assert (desk.pop(5), desk.pop(5, "NEW.1")) == (["x"], ["y"])


@pytest.mark.parametrize("tended", [False, True])
def test_a_key_counts_for_the_time_that_the_queue_says(desk: Desk, tended: bool) -> None:
    desk.push("first", key="k")
    desk.age(24 * 3600 - 100)
    if tended:
        desk.tend()
    assert desk.put("second", key="k").get("Already") == 1
    desk.age(101)
    if tended:
        desk.tend()
        assert desk.world.owner.query("SELECT count(*) FROM psqlmessages_elementkey") == 0
    assert desk.put("third", key="k").get("Already") is None
    assert desk.pop(5) == ["first", "third"]


def test_a_key_whose_push_was_rolled_back_is_free(desk: Desk) -> None:
    with desk.pusher.connection.transaction(force_rollback=True):
        desk.push("first", key="k")
    desk.push("second", key="k")
    assert desk.pop(5) == ["second"]


def test_two_who_push_with_one_key_at_once_push_one_element(desk: Desk, world: World) -> None:
    other, ids = world.program("user1"), []
    with desk.pusher.connection.transaction():
        ids.append(desk.put("first", key="k")["Id"])
        thread = threading.Thread(
            target=lambda: ids.append(
                other.query("SELECT messages.push('PUT', 'Q', 'second', key => 'k')")["Id"]
            )
        )
        thread.start()
        world.wait_for(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
            other.pid,
        )
    thread.join(PATIENCE_SECONDS)
    assert len(set(ids)) == 1
    assert desk.pop(5) == ["first"]


def test_a_long_key_is_refused(desk: Desk) -> None:
    assert desk.put("x", key="k" * 200)["Err"] == "0"
    assert desk.put("x", key="k" * 201) == {"Err": "54", "Errstr": "name or token too long"}


def test_push_many_keeps_order_headers_and_keys_apart(desk: Desk) -> None:
    answer = desk.pusher.ok(
        "push_many", "PUT", "Q", ["a", "b", "c"], None, ['{"n":1}', None, '{"n":3}'],
        None, None, 2, ["z", None, "a"],
    )  # fmt: skip
    rows = desk.reserve(5)
    assert [(row.id, row.body, row.headers, row.tries) for row in rows] == [
        (answer["Ids"][0], "a", {"n": 1}, 2),
        (answer["Ids"][1], "b", {}, 2),
        (answer["Ids"][2], "c", {"n": 3}, 2),
    ]
    again = desk.pusher.ok(
        "push_many", "PUT", "Q", ["A", "d"], None, None, None, None, 0, ["a", "new"]
    )
    assert again["Ids"][0] == answer["Ids"][2]
    assert desk.pop(5) == ["d"]


def test_push_many_of_nothing_pushes_nothing(desk: Desk) -> None:
    assert desk.pusher.ok("push_many", "PUT", "Q", [])["Ids"] == []
    assert desk.pusher.ok("push_many", "PUT", "Q", None)["Ids"] == []


def test_push_many_is_all_or_none(desk: Desk) -> None:
    assert desk.pusher.error("push_many", "PUT", "Q", ["a", "b"], None, ["{}", "["])[0] == 63
    assert desk.pop(5) == []


def test_a_push_leaves_with_its_transaction(desk: Desk) -> None:
    with desk.pusher.connection.transaction(force_rollback=True):
        desk.push("x")
        assert desk.pop() == []
    assert (desk.pop(), desk.counts()) == ([], {})


def test_pushing_works_above_read_committed(desk: Desk, world: World) -> None:
    other = world.program("user1")
    desk.push("before")
    with other.connection.transaction():
        other.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.query("SELECT 1")
        desk.push("between")
        other.ok("push", "PUT", "Q", "within")
    assert sorted(desk.pop(5)) == ["before", "between", "within"]
    assert desk.counts() == {"puts": 3, "gets": 3}


@pytest.mark.parametrize(
    ("ident", "queue", "error"),
    [("", "Q", (15, "Ident empty")), ("PUT", "", (1, "destination is missing")),
     (None, "Q", (15, "Ident empty")), ("PUT", None, (1, "destination is missing")),
     ("x" * 101, "Q", (54, "name or token too long")),
     ("PUT", "x" * 101, (54, "name or token too long")),
     ("NOBODY", "Q", (16, "Client NOBODY don't exist")),
     ("PUT", "N*", (62, "Queue N* is not existent")),
     ("PUT", "ELSE", (2, "cannot use Queue to ELSE")), ("GET", "Q", (2, "cannot use Queue to Q"))],
)  # fmt: skip
def test_who_may_not_push_is_told_why(
    desk: Desk, ident: str | None, queue: str | None, error: tuple[int, str]
) -> None:
    assert desk.pusher.error("push", ident, queue, "x") == error


def test_every_function_checks_the_mode_of_the_rule(desk: Desk) -> None:
    desk.push("x")
    lease = desk.lease()
    desk.world.rules("user1 GET2 Queue Q R 1", "user1 PUT2 Queue Q W 1")
    writes = {
        "push": ("GET2", "Q", "x"), "push_many": ("GET2", "Q", ["x"]),
    }  # fmt: skip
    reads = {
        "pop": ("PUT2", "Q"), "reserve": ("PUT2", "Q"), "take": ("PUT2", "Q"),
        "commit": ("PUT2", lease), "rollback": ("PUT2", None, lease), "release": ("PUT2", lease),
        "queue_listen": ("PUT2", "Q"),
        "deliver": ("PUT2", "Q", [], [], [], [], [], [], [], [], [], []),
    }  # fmt: skip
    both = {
        "remove": ("Q", 1), "pause": ("Q",), "resume": ("Q",), "drain": ("Q",),
    }  # fmt: skip
    for function, arguments in writes.items():
        assert desk.pusher.error(function, *arguments) == (3, "cannot auth W with Queue Q")
    for function, arguments in reads.items():
        assert desk.pusher.error(function, *arguments) == (3, "cannot auth R with Queue Q")
    for function, arguments in both.items():
        for ident in ("GET2", "PUT2"):
            refused = desk.pusher.error(function, ident, *arguments)
            assert refused == (3, "cannot auth RW with Queue Q")


def test_two_rules_of_one_node_add_up(desk: Desk) -> None:
    desk.world.rules("user1 BOTH Queue Q R 1", "user1 BOTH* Queue Q W 1")
    assert desk.pusher.ok("drain", "BOTH", "Q") == {"Err": "0", "Removed": 0}


def test_no_role_reads_the_tables(desk: Desk) -> None:
    desk.push("secret")
    for table in ("element", "queue", "elementkey", "queuecount"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            desk.reader.query(f"SELECT * FROM psqlmessages_{table}")


def test_the_view_shows_the_queues_that_a_rule_allows(desk: Desk, world: World) -> None:
    desk.push("x")
    world.owner.connection.execute("INSERT INTO psqlmessages_queue (name) VALUES ('HIDDEN')")
    assert desk.reader.query("SELECT array_agg(queue) FROM messages.queues") == ["Q"]
    assert world.program("user3").query("SELECT count(*) FROM messages.queues") == 0
