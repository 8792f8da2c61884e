"""Queues over HTTP: pushing, taking, leases, pauses, status."""

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta

from project.postgres import Server
from tests.django.waiting import wait_until
from tests.rest.callers import Answer, Caller, at
from tests.sql.conftest import World


def waits(caller: Caller, queue: str, tid: str, **query: object) -> "Future[Answer]":
    begun = caller.begin("GET", at(queue), to=60, tid=tid, **query)
    wait_until(lambda: tid in caller.waiting(queue))
    return begun


HOSTILE = '{"content-type": "a\\r\\nx: y", "n": 1e400, "b\\r\\nc": "d", "e": "f\\r\\ng"}'


def test_a_pushed_body_is_returned_once_with_its_type(worker: Caller):
    pushed = worker.push("orders", b'{"n": 1}', "application/json")
    assert (pushed.status, pushed.json["already"]) == (201, False)
    taken = worker.take("orders")
    assert (taken.status, taken.data) == (200, b'{"n": 1}')
    assert taken.headers["content-type"] == "application/json"
    assert taken.headers["x-ks-id"] == str(pushed.json["id"])
    assert taken.headers["x-ks-tries"] == "0"
    assert datetime.fromisoformat(taken.headers["x-ks-mature"]).tzinfo is not None
    assert "x-ks-lease" not in taken.headers
    assert worker.take("orders").status == 504
    worker.push("orders", b"<script>alert(1)</script>", "text/html")
    headers = worker.take("orders").headers
    assert "sandbox" in headers["content-security-policy"]
    names = ("content-type", "x-content-type-options", "content-disposition")
    assert [headers[name] for name in names] == ["text/html", "nosniff", "attachment"]


def test_headers_travel_each_by_itself_and_all_as_json(worker: Caller):
    given = {"X-KS-HDR-Lane": "slow", "x-ks-headers": '{"n": 5, "Größe": "ü"}'.encode()}
    worker.call("POST", at("orders"), b"\xff\x00", given)
    taken = worker.take("orders")
    assert taken.data == b"\xff\x00"
    names = ("content-type", "x-ks-hdr-lane", "x-ks-hdr-n")
    assert [taken.headers[name] for name in names] == ["application/octet-stream", "slow", "5"]
    assert taken.headers["x-ks-headers"].isascii()
    assert json.loads(taken.headers["x-ks-headers"]) == {"lane": "slow", "n": 5, "Größe": "ü"}


def test_invalid_json_is_refused_and_nothing_is_pushed(worker: Caller):
    for body in (b'{"n": ', b"", b"NaN", b"\xff", b"[" * 100_000, b"\xef\xbb\xbf1"):
        assert worker.push("orders", body, "application/json").status == 400
    for headers in (rb'{"a": "\ud800"}', rb'{"\u0000": 1}', b'{"a": 1e400}', b"[]"):
        assert worker.call("POST", at("orders"), b"", {"x-ks-headers": headers}).status == 400
    assert worker.call("GET", at("orders", "status")).json["puts"] == 0


def test_elements_of_any_type_can_be_taken(worker: Caller, rest: World):
    plain = "text/plain; charset=utf-8"
    for body, enc, headers, content_type in (
        ('{"a":1}', "json", "{}", "application/json"),
        ("no base64", "b64", "{}", plain),
        ("ω", None, '{"content-type": "text/plain; charset=iso-8859-1"}', plain),
        ("text", None, HOSTILE, plain),
    ):
        rest.owner.ok("push", "worker", "orders", body, enc, headers)
        answer = worker.take("orders")
        assert (answer.status, answer.data) == (200, body.encode())
        assert answer.headers["content-type"] == content_type
    assert not {"x", "x-ks-hdr-e"} & set(answer.headers)
    assert '"n": 1' + "0" * 400 in answer.headers["x-ks-headers"]


def test_a_push_may_be_for_later_or_have_a_key(worker: Caller):
    first, second = worker.push("orders", key="k"), worker.push("orders", key="k")
    assert (first.status, second.status) == (201, 200)
    assert second.json == {"id": first.json["id"], "already": True}
    assert worker.take("orders").status == 200
    later = datetime.now(UTC) + timedelta(hours=1)
    worker.push("orders", mature=later.isoformat())
    worker.push("orders", delay=7200)
    status = worker.call("GET", at("orders", "status")).json
    assert (status["scheduled"], status["available"]) == (2, 0)
    assert datetime.fromisoformat(status["next"]) == later
    assert worker.take("orders").status == 504
    worker.push("orders", b"soon", delay=0.5)
    assert worker.take("orders", to=60).data == b"soon"


def test_malformed_arguments_and_names_are_refused(worker: Caller):
    pushes: list[dict[str, object]] = [
        {"delay": -1}, {"delay": "nan"}, {"delay": "x"}, {"delay": 1e10}, {"mature": "soon"},
        {"mature": "2026-01-01T00:00:00"}, {"tries": -1}, {"tries": 2**31}, {"key": "\0"},
        {"key": "k" * 201},
    ]  # fmt: skip
    for query in pushes:
        answer = worker.push("orders", **query)
        assert (answer.status, next(iter(query)) in answer.detail) == (400, True), query
    for query in ({"to": -1}, {"to": 3601}, {"duration": 0}, {"tid": "a b"}):
        assert worker.take("orders", **query).status == 400, query
    for path in ("q/default/a%00b", "q/default/%ff", "q/default/" + "n" * 101):
        assert worker.call("GET", path).status == 400
    for lease in ("x", "1.2", "1" * 99):
        answer = worker.call("PATCH", at("orders", "commit", lease))
        assert (answer.status, answer.json["err"]) == (400, 63)
    for name in ("orders/eu", "orders und mehr?", "orders.Größe", "orders\nnewline", "orders%2F"):
        assert worker.push(name, name.encode()).status == 201
        assert worker.take(name).data == name.encode()


def test_a_lease_is_committed_once_or_given_back_with_one_more_try(worker: Caller):
    worker.push("orders", b"kept")
    taken = worker.take("orders", reserve=1)
    assert worker.take("orders").status == 504
    assert worker.call("PATCH", at("orders", "rollback", taken.lease), delay=0).status == 200
    assert worker.call("PATCH", at("orders", "rollback", taken.lease)).status == 404
    taken = worker.take("orders", to=30, reserve=1, duration=0.2)
    assert (taken.data, taken.headers["x-ks-tries"]) == (b"kept", "1")
    taken = worker.take("orders", to=30, reserve=1)
    assert taken.headers["x-ks-tries"] == "2"
    assert worker.call("PATCH", at("orders", "commit", taken.lease)).json == {"done": True}
    again = worker.call("PATCH", at("orders", "commit", taken.lease))
    assert (again.status, again.json["err"]) == (404, None)


def test_a_lease_is_renewed_and_released_and_counts_in_its_own_queue_only(worker: Caller):
    worker.push("orders", b"kept")
    worker.push("orders.b")
    lease = worker.take("orders", reserve=1, duration=0.5).lease
    for call in ("commit", "rollback", "release", "renew"):
        for queue in ("orders.b", "orders.unused"):
            assert worker.call("PATCH", at(queue, call, lease)).status == 404, call
        malformed = worker.call("PATCH", at("orders", call, "1.2"))
        assert (malformed.status, malformed.json["err"]) == (400, 63), call
    renewed = worker.call("PATCH", at("orders", "renew", lease), duration=60)
    assert (renewed.status, renewed.json) == (200, {"done": True})
    assert worker.take("orders", to=1).status == 504
    assert worker.call("PATCH", at("orders", "release", lease)).json == {"done": True}
    taken = worker.take("orders", reserve=1)
    assert (taken.data, taken.headers["x-ks-tries"]) == (b"kept", "0")
    for call in ("commit", "rollback", "release", "renew"):
        assert worker.call("PATCH", at("orders", call, lease)).status == 404, call


def test_elements_are_listed_without_being_taken_and_drained(worker: Caller, rest: World):
    assert worker.call("GET", at("orders.unused", "peek")).json == {"elements": []}
    rest.owner.ok("push", "worker", "orders", "[1]", "json", HOSTILE)
    worker.push("orders", b"b" * 2**20, "text/plain")
    worker.push("orders", b"later", delay=60)
    worker.take("orders", reserve=1)
    answer = worker.call("GET", at("orders", "peek"))
    assert [each["body"] for each in answer.json["elements"]] == ["b" * 2**20]
    answer = worker.call("GET", at("orders", "peek"), with_bodies=0)
    states = [(each["state"], each["body"]) for each in answer.json["elements"]]
    assert states == [("available", None), ("scheduled", None), ("reserved", None)]
    assert b'"n": 1' + b"0" * 400 in answer.data
    first = worker.call("GET", at("orders", "peek"), max_rows=1, with_bodies=0).json["elements"]
    assert first == answer.json["elements"][:1]
    for number in (0, 101):
        assert worker.call("GET", at("orders", "peek"), max_rows=number).status == 400
    assert worker.call("PATCH", at("orders", "drain")).json == {"removed": 1}
    assert worker.call("GET", at("orders", "status")).json["total"] == 2


def test_a_queue_is_configured_and_removed_by_rules_of_mode_a(worker: Caller, rest: World):
    refused = [worker.call(method, at("orders")) for method in ("PATCH", "DELETE")]
    assert [(each.status, each.json["err"]) for each in refused] == [(403, 3)] * 2
    rest.rules(f"{Server.owner} worker Queue orders A 60")
    settings = {"max_tries": 1, "dead_letter_queue": "__deadletter__", "key_timeout": 60}
    assert worker.call("PATCH", at("orders"), max_tries=1, key_timeout=60).json == settings
    assert worker.call("PATCH", at("orders"), dead_letter_queue="secret").status == 403
    for query in ({"max_tries": -1}, {"key_timeout": 0}, {"dead_letter_queue": ""}):
        assert worker.call("PATCH", at("orders"), **query).status == 400, query
    worker.push("orders")
    refused = worker.call("DELETE", at("orders"))
    assert (refused.status, refused.json["err"]) == (409, 66)
    assert refused.json["url"].endswith("/reference/errors/#error-66")
    lease = worker.take("orders", reserve=1).lease
    given_back = worker.call("PATCH", at("orders", "rollback", lease))
    assert given_back.json == {"done": True, "dead_lettered": True}
    assert worker.call("DELETE", at("orders")).status == 204
    assert worker.call("GET", at("orders", "status")).json["max_tries"] is None
    assert worker.call("DELETE", at("orders")).status == 404
    settings = {"max_tries": None, "dead_letter_queue": "__deadletter__", "key_timeout": 86400}
    assert worker.call("PATCH", at("orders"), max_tries=0).json == settings


def test_an_element_that_is_not_reserved_can_be_removed(worker: Caller):
    number = worker.push("orders").json["id"]
    assert worker.call("DELETE", at("orders", str(number))).status == 204
    assert worker.call("DELETE", at("orders", str(number))).status == 404
    number = worker.push("orders").json["id"]
    worker.take("orders", reserve=1)
    assert worker.call("DELETE", at("orders", str(number))).status == 404
    assert worker.call("DELETE", at("orders", str(2**63))).status == 400


def test_pushes_wake_all_waiting_nodes_in_their_order(caller: Callable[..., Caller], rest: World):
    one, two = caller("wanda", "worker"), caller("otto", "other")
    first, second = waits(two, "orders", "first"), waits(one, "orders", "second")
    told = one.call("GET", at("orders", "consumers")).json
    assert told["process"] == one.site.pid != os.getpid()
    assert [reader["tid"] for reader in told["consumers"]] == ["first", "second"]
    one.push("orders", b"1")
    assert first.result(30).data == b"1"
    one.push("orders", b"2")
    assert second.result(30).data == b"2"
    first, second = waits(one, "orders", "first"), waits(one, "orders", "second")
    rest.owner.ok("push_many", "worker", "orders", ["1", "2"])
    assert {first.result(30).data, second.result(30).data} == {b"1", b"2"}
    answer = one.take("orders", to=0.3)
    assert (answer.status, answer.json["err"], "orders" in answer.detail) == (504, None, True)


def test_a_reader_is_cancelled_by_its_name(worker: Caller, caller: Callable[..., Caller]):
    waiting = waits(worker, "orders", "slow")
    (listed,) = worker.call("GET", at("orders", "consumers")).json["consumers"]
    assert (listed["tid"], listed["ident"], listed["reserve"]) == ("slow", "worker", False)
    assert caller("otto", "other").call("DELETE", at("orders", "consumer", "slow")).status == 404
    assert worker.take("orders", tid="slow", to=1).status == 409
    assert worker.call("DELETE", at("orders", "consumer", "slow")).status == 204
    assert waiting.result(30).status == 410
    assert worker.call("DELETE", at("orders", "consumer", "slow")).status == 404


def test_readers_wait_while_a_queue_is_paused_until_their_rule_ends(worker: Caller, rest: World):
    worker.push("orders", b"kept")
    assert worker.call("PATCH", at("orders", "pause")).json == {"paused": True}
    assert worker.call("GET", at("orders", "paused")).json == {"paused": True}
    assert worker.take("orders").status == 504
    waiting = waits(worker, "orders", "w")
    assert worker.push("orders").status == 201
    assert worker.call("PATCH", at("orders", "resume")).json == {"paused": False}
    assert waiting.result(30).data == b"kept"
    assert worker.take("orders").status == 200
    waiting = waits(worker, "orders", "w")
    rest.execute("DELETE FROM messages.auth WHERE ident = 'worker'")
    assert waiting.result(30).status == 403


def test_namespaces_and_queues_are_listed_with_their_counts(worker: Caller):
    assert worker.call("GET", "q").json == {"namespaces": ["default"]}
    for name in ("orders.a", "orders.b", "orders.c"):
        worker.push(name)
    worker.take("orders.b")
    first = worker.call("GET", "q/default", limit=2).json
    found = [(queue["queue"], queue["total"], queue["puts"]) for queue in first["queues"]]
    assert found == [("orders.a", 1, 1), ("orders.b", 0, 1)]
    assert first["queues"][1]["dead_letter_queue"] == "__deadletter__"
    rest = worker.call("GET", "q/default", limit=2, after=first["next"]).json
    assert ([queue["queue"] for queue in rest["queues"]], rest["next"]) == (["orders.c"], None)


def test_names_of_queues_that_no_rule_gives_are_not_where_to_go_on(worker: Caller, rest: World):
    rest.rules(f"{Server.owner} secret Queue * RW 60")
    for name in ("alien", "orders.a", "orders!secret", "orders.b", "secret"):
        rest.owner.ok("push", "secret", name, "x")
    rest.execute("DELETE FROM messages.auth WHERE ident = 'worker'")
    rest.rules(*(f"{Server.owner} worker Queue orders.{letter} RW 60" for letter in "ab"))
    listed, after = [], ""
    while after is not None:
        page = worker.call("GET", "q/default", limit=1, after=after).json
        after = page["next"]
        listed.append(([queue["queue"] for queue in page["queues"]], after))
    assert listed == [(["orders.a"], "orders.a"), (["orders.b"], "orders.b"), ([], None)]
    assert worker.call("GET", at("secret", "status")).status == 403


def test_missing_objects_are_404(worker: Caller):
    # The status before the first push equals the status after it, except for the counts.
    unused = worker.call("GET", at("orders.unused", "status")).json
    assert worker.take("orders.unused").status == 504
    unknown = worker.call("PATCH", at("orders.unused", "pause"))
    assert (unknown.status, unknown.json["err"]) == (404, 62)
    worker.push("orders.unused")
    assert worker.take("orders.unused").status == 200
    used = worker.call("GET", at("orders.unused", "status")).json
    assert used == unused | {"puts": 1, "reserves": 1, "commits": 1}
    assert worker.call("GET", "q/nowhere/orders/status").status == 404
    assert "Unknown namespace 'nowhere'" in worker.call("GET", "q/nowhere").detail
    assert worker.call("GET", "nothing/at/all").status == 404
    assert worker.call("GET", "q?all=1").detail == "unknown query argument 'all'; known: none"
    for method, argument, body, status, detail in (
        ("PUT", "", None, 405, "PUT is not supported here, only DELETE, GET, PATCH, POST"),
        ("PATCH", "", b'{"max_tries": 3}', 400, "PATCH takes no body here"),
        ("GET", "?reserved=1", b"x", 400, "unknown query argument 'reserved'"),
        ("POST", "?dealy=60", b"x", 400, "unknown query argument 'dealy'"),
    ):
        refused = worker.call(method, at("orders") + argument, body)
        assert (refused.status, refused.detail.split(";")[0]) == (status, detail)


def test_rights_are_those_of_the_node(caller: Callable[..., Caller]):
    pusher, taker = caller("paul", "pusher"), caller("tina", "taker")
    assert pusher.push("orders").status == 201
    assert pusher.take("orders").json["err"] == 3
    assert taker.push("orders").json["err"] == 3
    for call in ("pause", "drain"):
        assert taker.call("PATCH", at("orders", call)).status == 403
    assert pusher.call("GET", at("orders", "peek")).json["err"] == 3
    lease = taker.take("orders", reserve=1).lease
    for call in ("commit", "rollback", "release", "renew"):
        assert pusher.call("PATCH", at("orders", call, lease)).json["err"] == 3
    assert taker.call("PATCH", at("orders", "commit", lease)).status == 200
    assert taker.push("elsewhere").json["err"] == 2
    assert taker.take("elsewhere", to=5).status == 403
