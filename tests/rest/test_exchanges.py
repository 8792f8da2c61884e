"""Exchanges over HTTP: defined, started and stopped by staff."""

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry

from psqlmessages.models import Exchange, ExchangeCount
from tests.rest.callers import Answer, Caller
from tests.sql.conftest import World

DEFINITION: dict[str, Any] = {
    "consumer": {"parallel": 2, "wsize": 50, "reserve": False},
    "src": {"ns": "default", "queue": "orders"},
    "dst": [
        {"ns": "default", "queue": "eu", "selector": "msg.body.n > 1"},
        {"ns": "default", "queue": "audit"},
    ],
}
PERMISSIONS = [f"psqlmessages.{verb}_exchange" for verb in ("view", "add", "change", "delete")]


@pytest.fixture
def staff(caller: Callable[..., Caller]) -> Caller:
    return caller("stella", is_staff=True, permissions=PERMISSIONS)


def put(caller: Caller, name: str, definition: Any = DEFINITION, **query: object) -> Answer:
    return caller.call("PUT", f"x/{name}", json.dumps(definition).encode(), **query)


def test_an_exchange_is_stored_shown_and_runs(staff: Caller, rest: World):
    answer = put(staff, "x1")
    assert answer.status == 201
    assert answer.json["running"] is True
    assert len(answer.json["missing_rules"]) == 3
    assert "exchange.x1" in answer.json["missing_rules"][0]
    shown = staff.call("GET", "x/x1").json
    assert shown["definition"] == DEFINITION
    outcomes = ("ok", "no_route", "discarded", "too_many_hops", "failed")
    assert shown["counts"] == dict.fromkeys(outcomes, 0)
    assert [each["name"] for each in staff.call("GET", "x").json["exchanges"]] == ["x1"]
    assert (shown["state"], shown["missing_rules"]) == ("running", [])
    exchange = Exchange.objects.get()
    assert exchange.is_running
    missing = answer.json["missing_rules"]
    ExchangeCount.objects.create(
        exchange=exchange, worker=uuid4(), outcome="ok", missing_rules=missing
    )
    shown = staff.call("GET", "x/x1").json
    assert (shown["state"], shown["missing_rules"]) == ("blocked", missing)
    staff.call("POST", "x/x1/stop")
    assert staff.call("GET", "x/x1").json["state"] == "stopped"


def test_it_starts_stopped_or_running_is_replaced_if_asked_and_deleted(staff: Caller):
    discarding = {**DEFINITION, "no_route": "discard"}
    answer = put(staff, "x3", {**discarding, "running": False})
    assert (answer.status, answer.json["running"]) == (201, False)
    shown = staff.call("GET", "x/x3").json
    assert (shown["state"], shown["definition"]) == ("stopped", discarding)
    put(staff, "x1")
    assert staff.call("POST", "x/x1/stop").json == {"running": False}
    other = {**DEFINITION, "consumer": {"parallel": 3, "wsize": 1, "reserve": True}}
    assert put(staff, "x1", other).status == 409
    answer = put(staff, "x1", other, replace=1)
    assert (answer.status, answer.json["running"]) == (200, False)
    shown = staff.call("GET", "x/x1").json
    assert (shown["definition"], shown["running"]) == (other, False)
    assert put(staff, "x2", other, replace=1).status == 201
    assert staff.call("POST", "x/x1/start").json == {"running": True}
    assert staff.call("DELETE", "x/x1").status == 204
    for call in ("GET x/x1", "DELETE x/x1", "POST x/x1/start", "POST x/x1/stop"):
        assert staff.call(*call.split()).status == 404
    texts = [f"added {DEFINITION}", "stopped", f"changed {other}", "started", f"deleted {other}"]
    logged = LogEntry.objects.filter(object_repr="x1").order_by("pk")
    assert [each.change_message for each in logged] == [f"REST: {text}." for text in texts]


def test_all_errors_are_reported_with_their_places_and_nothing_is_stored(staff: Caller):
    wrong = {
        "consumer": {"parallel": 17, "wsize": 0}, "src": {"ns": "nowhere", "queue": "orders*"},
        "dst": [{"ns": "default", "queue": "eu", "selector": "msg.("}], "unknown": 1,
    }  # fmt: skip
    answer = put(staff, "x1", wrong)
    assert answer.status == 400
    places = [fault.partition(":")[0] for fault in answer.json["errors"]]
    assert {"consumer.parallel", "dst[0].selector"} <= set(places)
    assert answer.detail == answer.json["errors"][0]
    for text in (b"", b"{", b"[]", b"5", b"\xff", b'{"src": NaN}', b"- " * 3000):
        assert staff.call("PUT", "x/x1", text).status == 400, text
    assert put(staff, "n" * 91).status == 400
    assert staff.call("PUT", "x/x1", b"x" * (1024 * 1024 + 1)).status == 413
    assert not Exchange.objects.exists()


def test_each_act_needs_staff_and_its_permission(staff: Caller, caller: Callable[..., Caller]):
    put(staff, "x1")
    no_staff = caller("ursula", permissions=PERMISSIONS)
    for verb, method, path, body in (
        ("view", "GET", "x/x1", b""), ("add", "PUT", "x/x2", json.dumps(DEFINITION).encode()),
        ("change", "POST", "x/x1/stop", b""), ("delete", "DELETE", "x/x1", b""),
    ):  # fmt: skip
        own = f"psqlmessages.{verb}_exchange"
        others = [each for each in PERMISSIONS if each != own]
        without = caller(f"no-{verb}", is_staff=True, permissions=others)
        assert without.call(method, path, body).status == 403
        assert no_staff.call(method, path, body).status == 403
        alone = caller(f"only-{verb}", is_staff=True, permissions=[own])
        assert alone.call(method, path, body).status in (200, 201, 204)
    assert put(caller("only-add"), "x2", replace=1).status == 403
    # The permission to change exchanges does not allow adding one by PUT.
    put(staff, "x1")
    assert put(caller("only-change"), "x1", replace=1).status == 200
    answer = put(caller("only-change"), "x3", replace=1)
    assert (answer.status, answer.detail.split()[-1]) == (403, "psqlmessages.add_exchange")
    assert not Exchange.objects.filter(name="x3").exists()
