"""Pushing: what is stored, when it becomes available, and what a key prevents."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from tests.queues.conftest import Queue
from tests.sql.conftest import World
from tests.sql.simultaneous import blocked


def test_only_a_push_or_a_wait_makes_a_queue(queue: Queue):
    queue.push("x", queue="NEW.1")
    assert queue.pop(queue="NEW.1") == ["x"]
    queue.wait(queue="NEW.2")
    for function in ("pop", "reserve", "take", "peek"):
        assert queue.reader.elements(function, "GET", "NEW.3", 1) == [], function
    assert queue.reader.error("sizes", "GET", "NEW.3") == (62, "Queue NEW.3 is not existent")
    assert queue.pusher.ok("drain", "BOSS", "OTHER") == {"Err": "0", "Removed": 0}
    for function in ("pause", "resume"):
        assert queue.pusher.error(function, "BOSS", "OTHER")[0] == 62
    names = "SELECT array_agg(queue ORDER BY queue) FROM messages.queues"
    assert queue.world.owner.query(names) == ["NEW.1", "NEW.2"]


def test_a_body_comes_back_as_it_was_pushed(queue: Queue):
    bodies = ["", "0", "null", "x" * 10_000, "x" * 3_000_000, "🐘\n\x01'\"\\ %s", "漢" * 5_000]
    pushed = [(body, enc) for body in bodies for enc in (None, "json", "b64")]
    for body, enc in pushed:
        queue.push(body, enc=enc)
    queue.pusher.ok("push", "PUT", "Q", None)
    rows = queue.reader.elements("pop", "GET", "Q", 100)
    assert [(row.body, row.enc) for row in rows] == [*pushed, ("", None)]
    assert queue.put("x", enc="gzip") == {"Err": "55", "Errstr": "unknown encoding gzip"}


def test_headers_come_back_with_their_types(queue: Queue):
    some = {"s": "3", "n": 3, "f": 1.5, "t": True, "z": None, "l": [1, {"a": "b"}], "o": {}}
    levels = '{"a":' + "[" * 200 + "1" + "]" * 200 + "}"
    # As large as they may be: digits, levels, text.
    given = [json.dumps(some), '{"a":1e4299}', levels, json.dumps({"a": "1" * 60_000})]
    for headers in (*given, None, ""):
        queue.push("x", headers=headers)
    expected = [json.loads(each.replace("1e4299", "1" + "0" * 4_299)) for each in given]
    found = [json.dumps(row.headers) for row in queue.reserve(10)]
    assert found == [*(json.dumps(dict(sorted(each.items()))) for each in expected), "{}", "{}"]


def test_headers_that_are_no_object_are_refused(queue: Queue):
    wrong = {
        "open": "{", "list": "[]", "number": "3", "text": '"x"', "null": "null",
        "nul": '{"a":"\\u0000"}', "overflow": '{"a":1e999999}', "deep": "[" * 100_000,
        "nested": '{"a":' * 12_000, "long": json.dumps({"a": "x" * 70_000}),
        "exponent": '{"a":1e5000}', "digits": '{"a":[{"b":-1' + "1" * 4_300 + "}]}",
        "levels": '{"a":' + "[" * 201 + "1" + "]" * 201 + "}",
    }  # fmt: skip
    answers = {}
    for name, headers in wrong.items():
        answer = queue.put("x", headers=headers)
        answers[name] = answer["Err"], answer.get("Errstr", "").partition(":")[0]
    assert answers == dict.fromkeys(wrong, ("63", "malformed headers"))
    assert queue.pop() == []


def test_hops_are_the_header_read_as_a_whole_number(queue: Queue):
    given = [3, "3", 0, "x", 3.5, True, None, -3, [3], "", 10**12, "٣"]
    for hops in given:
        queue.push("x", headers=json.dumps({"x-hop-count": hops}))
    assert [row.hops for row in queue.reserve(20)] == [3, 3, *[0] * 8, 999_999_999, 0]


def test_an_element_holds_id_mature_tries_and_when_it_was_pushed(queue: Queue):
    before = datetime.now(UTC)
    id_ = queue.push("x", tries=4)
    (row,) = queue.reader.elements("pop", "GET", "Q")
    assert (row.id, row.tries, row.hops, row.lease) == (id_, 4, 0, None)
    assert before <= row.mature <= datetime.now(UTC)
    assert before <= row.pushed_at <= datetime.now(UTC)


def test_an_element_cannot_be_taken_before_it_is_mature(queue: Queue):
    now = datetime.now(UTC)
    queue.push("later", delay=60.0)
    queue.push("much later", mature=now + timedelta(hours=1))
    # It wins over a delay, and the oldest comes first.
    for body, seconds in (("b", 20), ("c", 10), ("a", 30)):
        queue.push(body, mature=now - timedelta(seconds=seconds), delay=60.0)
    queue.push("d", "e")
    assert queue.pop(10) == ["a", "b", "c", "d", "e"]
    queue.age(61)
    assert queue.pop(5) == ["later"]
    queue.age(3600)
    assert queue.pop(5) == ["much later"]


def test_a_second_push_with_a_key_answers_the_first_id(queue: Queue):
    key = "k" * 200
    first = queue.put("first", key=key)
    again = {"Err": "0", "Id": first["Id"], "Already": 1}
    assert first == {"Err": "0", "Id": first["Id"]}
    assert queue.put("second", key=key) == again
    queue.push("of another queue", key=key, queue="NEW.1")
    assert (queue.pop(5), queue.pop(5, "NEW.1")) == (["first"], ["of another queue"])
    # The key counts although the element has been taken.
    assert (queue.put("second", key=key), queue.pop()) == (again, [])
    assert queue.put("x", key=key + "k") == {"Err": "54", "Errstr": "name or token too long"}


@pytest.mark.parametrize("tended", [False, True])
def test_a_key_counts_for_the_time_that_the_queue_says(queue: Queue, tended: bool):
    queue.push("first", key="k")
    for seconds, body in ((24 * 3600 - 100, "second"), (101, "third")):
        queue.age(seconds)
        if tended:
            queue.tend()
        kept = queue.world.owner.query("SELECT count(*) FROM psqlmessages_elementkey")
        assert (body, kept) in [("second", 1), ("third", 0 if tended else 1)]
        assert ("Already" in queue.put(body, key="k")) == (body == "second")
    assert queue.pop(5) == ["first", "third"]


@pytest.mark.versions
def test_two_pushes_of_one_key_at_once_push_one_element(queue: Queue, world: World):
    other = world.program("user1")
    push = "SELECT messages.push('PUT', 'Q', 'second', key => 'k')"
    with queue.pusher.connection.transaction(force_rollback=True):
        queue.push("rolled back", key="k")
        assert queue.pop() == []
    # A push leaves with its transaction.
    assert (queue.pop(), queue.reader.error("sizes", "GET", "Q")[0]) == ([], 62)
    queue.pusher.execute("BEGIN")
    first = queue.push("first", key="k")
    with blocked(world, other, lambda: other.query(push)["Id"]) as second:
        queue.pusher.execute("COMMIT")
    assert (second.result(), queue.pop(5)) == (first, ["first"])


def test_push_many_keeps_order_headers_and_keys_apart(queue: Queue):
    push_many = ("push_many", "PUT", "Q")
    headers = ['{"n":1}', None, '{"n":3}']
    keys = ["z", None, "a"]
    ids = queue.pusher.ok(*push_many, ["a", "b", "c"], None, headers, None, None, 2, keys)["Ids"]
    found = [(row.id, row.body, row.headers, row.tries) for row in queue.reserve(5)]
    assert found == [(ids[0], "a", {"n": 1}, 2), (ids[1], "b", {}, 2), (ids[2], "c", {"n": 3}, 2)]
    again = queue.pusher.ok(*push_many, ["A", "d"], None, None, None, None, 0, ["a", "new"])
    assert again["Ids"][0] == ids[2]
    assert queue.pop(5) == ["d"]
    assert queue.pusher.ok(*push_many, [])["Ids"] == queue.pusher.ok(*push_many, None)["Ids"] == []
    # One malformed element refuses all.
    assert queue.pusher.error(*push_many, ["a", "b"], None, ["{}", "["])[0] == 63
    assert queue.pop(5) == []


@pytest.mark.versions
def test_pushing_works_above_read_committed(queue: Queue, world: World):
    other = world.program("user1")
    queue.push("before")
    with other.connection.transaction():
        other.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.query("SELECT 1")
        queue.push("between")
        other.ok("push", "PUT", "Q", "within")
    assert sorted(queue.pop(5)) == ["before", "between", "within"]
    assert queue.counts() == {"puts": 3, "gets": 3}


def test_every_function_checks_the_mode_of_the_rule(queue: Queue):
    """Those that need a lease; tests/sql/test_errors.py has the others."""
    queue.push("x")
    lease = queue.lease()
    queue.world.rules("user1 PUT2 Queue Q W 1")
    for function, *given in ("commit",), ("rollback", None), ("release",):
        refused = queue.pusher.error(function, "PUT2", *given, lease)
        assert refused == (3, "cannot auth R with Queue Q"), function
    queue.world.rules("user1 BOTH Queue Q R 1", "user1 BOTH* Queue Q W 1")
    assert queue.pusher.ok("drain", "BOTH", "Q") == {"Err": "0", "Removed": 0}
