"""Now: each problem is found with its cure, on the page, in /healthz?full and as an alert."""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from django.db.transaction import atomic as transaction_of_django
from django.test import Client, RequestFactory
from django.urls import include, path
from django.utils import timezone, translation
from pytest_django import Settings

from project.postgres import Server
from psqlmessages import exceptions
from psqlmessages.client.async_node import AsyncNode
from psqlmessages.client.node import Node
from psqlmessages.client.refused_calls import MAX_RULES, refused_calls
from psqlmessages.conf import get_settings
from psqlmessages.django import pop, send
from psqlmessages.django import push as push_element
from psqlmessages.models import Element, Exchange, PipelineJob, Queue, RefusedCall, Subscription
from psqlmessages.monitor import listing, metrics, now, refused_writer
from psqlmessages.monitor.problem_checks import CHECK_NAMES, CHECKS
from psqlmessages.monitor.problems import Problem, database_problem, find_problems
from psqlmessages.orm import direct_dsn
from tests.sql.conftest import World
from tests.web.measured import count, job
from tests.web.pages import logged_in

FILES = Path(__file__).parents[2] / "docs" / "monitoring"
FULL = "/healthz?full"
TOKEN = "a-token-of-the-tests"
QUOTED = shlex.quote("O'T")
HOSTILE = "<b>\N{RIGHT-TO-LEFT OVERRIDE}x"


@pytest.fixture(autouse=True)
def quiet(database: World, settings: Settings, monkeypatch) -> World:
    """A database without problems: its server was not started lately."""
    monkeypatch.setattr(now, "_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(now, "_QUERY_TIMEOUT_SECONDS", 60.0)
    settings.PSQLMESSAGES = {"NODE": "example", "HEALTH_TOKEN": TOKEN, "PROBLEM_RESTART_SECONDS": 0}
    database.rule("user1", "W", "Queue", "*", "RW", 60)
    RefusedCall.objects.all().delete()
    return database


def push(world: World, queue: str, minutes: int = 0, **values: Any) -> None:
    world.program("user1").ok("push_many", "W", queue, ["x"])
    Element.objects.update(available_at=timezone.now() - timedelta(minutes=minutes))
    Queue.objects.update(**values)


def exchange(*missing_rules: str, **values: Any) -> None:
    made = Exchange.objects.create(name="sort it", source_queue="orders", **values)
    if missing_rules:
        count(made, ("ok", -1, 1), missing_rules=list(missing_rules))


def slow_reader(world: World, **values: Any) -> None:
    world.rules("user1 PUB Topic T W 60", "user2 SUB Topic T R 60")
    world.program("user2").ok("subscribe", "SUB", "T", 3600)
    world.program("user1").ok("publish", "PUB", "T", "x")
    world.execute("UPDATE psqlmessages_streammessage SET published_at = now() - interval '7 min'")
    Subscription.objects.update(**values)


def transaction(world: World) -> None:
    statements = "BEGIN; UPDATE psqlmessages_topic SET retention = 0; SELECT pg_sleep(1)"
    world.program(is_fresh=True).connection.execute(statements)


def refused(world: World) -> None:
    world.rule(Server.owner, "example", "Topic", "T", "W", 60)
    refused_calls.take()
    for _ in range(3):
        with pytest.raises(exceptions.TopicNotExistent):
            send("O'T", "x", ident="example")
    asyncio.run(refused_writer.write_counts())


# The problem: how to make it, its id, its severity, and words of sentence, URL and cure.
PROBLEMS: tuple[tuple[Callable[[World], object], str, str, str, str, str], ...] = (
    (lambda world: push(world, "__deadletter__", 7), "dead_letters:__deadletter__", "error",
     "1 dead letter in", "/monitor/queues/__deadletter__/", "redrive"),
    (lambda world: push(world, "__no_route__"), "dead_letters:__no_route__", "error",
     "1 element found no route", "/monitor/queues/__no_route__/", "selectors"),
    (lambda world: push(world, HOSTILE, 7), r"waiting:<b>\u202ex", "error",
     r"“<b>\u202ex” has waited for 7 min: no",
     "/monitor/queues/%3Cb%3E%E2%80%AEx/", "Start the program that takes"),
    (lambda world: push(world, "jobs", 7, awaited_until=timezone.now() + timedelta(hours=1)),
     "waiting:jobs", "warning", "the consumers are too slow",
     "/monitor/queues/jobs/", "more consumers"),
    (lambda world: (exchange(""), push(world, "orders", 7)), "waiting:orders", "error",
     "the exchange “sort it” takes", "/monitor/queues/orders/", "exchange run 'sort it'"),
    (lambda world: push(world, "orders", is_paused=True), "paused:orders", "warning",
     "The queue “orders” is paused: 1 element", "/monitor/queues/orders/", "Resume"),
    (lambda _: exchange(), "exchanges:sort it", "error", "No worker has run the exchange “sort it”",
     "/monitor/exchanges/", "psqlmessages exchange run 'sort it'"),
    (lambda _: exchange("default: INSERT INTO messages.auth …;"), "exchanges:sort it", "error",
     "is blocked: it lacks a rule", "/monitor/exchanges/", "database default: INSERT INTO"),
    (lambda world: (exchange(is_running=False), push(world, "orders")), "exchanges:sort it",
     "warning", "stopped, and elements wait in “orders”",
     "/monitor/exchanges/", "exchange start 'sort it'"),
    (lambda _: job(state=PipelineJob.State.FAILED, error="No disk."), "jobs:traffic", "error",
     "The job “traffic” has failed: No disk.", "/monitor/traffic/", "Start the job again"),
    (lambda _: job(silent=600), "jobs:traffic", "error", "no heartbeat for 10 min",
     "/monitor/traffic/", "Start the job again"),
    (slow_reader, "subscriptions:SUB/T", "warning",
     "reads the stream “T” too slowly: 1 message, 7 min", "/monitor/streams/T/",
     "keeps the node “SUB” busy"),
    (lambda world: slow_reader(world, pinged_at=timezone.now() - timedelta(minutes=9)),
     "subscriptions:SUB/T", "error", "“SUB” has not read the stream “T” for 9 min",
     "/monitor/streams/T/", "Start the node"),
    (lambda world: slow_reader(world, timeout=9, pinged_at=timezone.now() - timedelta(seconds=10)),
     "subscriptions:SUB/T", "error", "“SUB” to “T” has expired: it misses messages since 20",
     "/monitor/streams/T/", "continues with new messages"),
    (transaction, "transactions:", "warning", "has been in a transaction for",
     "/open-transactions/", "SELECT messages._terminate("),
    (refused, "refused_calls:example Topic O'T", "warning", "3 calls of “example” to “O'T” were",
     "/monitor/nodes/example/", f"allow example W Topic {QUOTED} --role {Server.owner}"),
)  # fmt: skip

# By check: a setting with which a problem above is none.
TOLERANT = {
    "dead_letters": {"PROBLEM_DEAD_LETTERS": 2}, "waiting": {"PROBLEM_WAIT_SECONDS": 900},
    "subscriptions": {"PROBLEM_LAG_SECONDS": 900}, "refused_calls": {"PROBLEM_REFUSED_CALLS": 4},
    "transactions": {"PROBLEM_TRANSACTION_SECONDS": 900},
}  # fmt: skip
# Problems that tests cannot cause: the check, a row of its query, severity and words.
HOLDER = (True, 7, "shop", "", "idle in transaction", None, 65.0)
OF_THE_SERVER = (
    ("notification_queue", (0.5, *[None] * 7), "error", "Notification queue: 50.0000% full."),
    ("notification_queue", (0.19, *HOLDER), "warning", "held back by pid 7 (shop, no name)"),
    ("notification_queue", (0.2, *HOLDER), "error", "which is idle in transaction for 65 s."),
    ("commit_lock", (3, 8.0, 7), "error", "3 commits wait for pid 7, which holds the NOTIFY lock."),
    ("restart", (timezone.now(),), "warning", "PostgreSQL was started"),
)


def read(client: Client, **headers: str) -> list[dict[str, Any]]:
    listing._results.clear()
    response = client.get(FULL, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["problems"]


def test_each_problem_is_found_alone_with_a_cure(quiet: World, settings, client, monkeypatch):
    token = {"Authorization": f"Bearer {TOKEN}"}
    viewer = logged_in("view_monitor", "view_queue", "view_subscription", "view_client")
    wrong, tolerated = [], set()
    for make, id_, severity, words, url, cure in PROBLEMS:
        quiet.begin()
        PipelineJob.objects.all().delete()
        quiet.rule("user1", "W", "Queue", "*", "RW", 60)
        assert read(client, **token) == []
        page = viewer.get("/monitor/").text
        assert "No problems: all 11 checks passed." in page
        assert "look for their refused calls in PostgreSQL" in page
        if make is transaction:
            settings.PSQLMESSAGES = {**settings.PSQLMESSAGES, "PROBLEM_TRANSACTION_SECONDS": 1}
        make(quiet)
        found = read(client, **token)
        page = viewer.get("/monitor/?fragment=problems").text
        with monkeypatch.context() as patch:
            patch.setattr(translation._trans, "gettext", lambda text: f"«{text}»")
            patch.setattr(translation._trans, "ngettext", lambda one, *_: f"«{one}»")
            translated = [(p["sentence"], p["cure"]) for p in read(client, **token)]
        given, check = settings.PSQLMESSAGES, id_.partition(":")[0]
        settings.PSQLMESSAGES = {**given, **TOLERANT.get(check, {})}
        tolerated |= {check} - {problem["check"] for problem in read(client, **token)}
        settings.PSQLMESSAGES = given
        expected = (len(found) == 1 and found[0]["id"].startswith(id_)
                    and found[0]["severity"] == severity and words in found[0]["sentence"]
                    and url in found[0]["url"] and cure in found[0]["cure"]
                    and all(text.startswith(("«", "SELECT")) for text in translated[0])
                    and 'href="/' in page and "\N{RIGHT-TO-LEFT OVERRIDE}" not in page)  # fmt: skip
        if not expected:
            wrong.append(f"{id_}: {found} {page}")
    assert not wrong, "\n".join(wrong)
    assert tolerated == {*TOLERANT}
    quiet.begin()
    settings.PSQLMESSAGES = {**settings.PSQLMESSAGES, "PROBLEM_RESTART_SECONDS": 604_800}
    assert "restart" in {problem["check"] for problem in read(client, **token)}
    slow_reader(quiet, is_alive=False)
    quiet.program("user2").ok("subscribe", "SUB", "T", 3600)
    assert "subscriptions:SUB/T" not in {problem["id"] for problem in read(client, **token)}
    quiet.begin()
    slow_reader(quiet)
    expired = {"topic": "T", "position": 0, "timeout": 1, "is_alive": False}
    Subscription.objects.bulk_create(Subscription(ident=f"E{n}", **expired) for n in range(20))
    assert "subscriptions:SUB/T" in {problem["id"] for problem in read(client, **token)}


def test_a_stopped_exchange_links_to_its_button_or_permissions(quiet: World, settings: Settings):
    blocked = {"missing_rules": ["default: INSERT"], "failing_since": "2026-11-27T12:03:05Z"}
    for is_running, button, *needed in (
        (False, "Start", "change_exchange"),
        (True, "Add the rules", "view_exchange", "add_auth", "change_auth"),
    ):
        quiet.begin()
        quiet.rule("user1", "W", "Queue", "*", "RW", 60)
        made = Exchange.objects.create(name="x", source_queue="orders", is_running=is_running)
        count(made, ("ok", -1, 1), **blocked)
        push(quiet, "orders", 7)
        listing._results.clear()
        page = logged_in("view_monitor").get("/monitor/").text
        assert {*needed} <= {*re.findall("<code>psqlmessages.(.*?)</code>", page)}
        assert ("2026-11-27 12:03:05 UTC" in page) is is_running
        helper = logged_in("view_monitor", "view_destination", *needed)
        # In the admin, the permission to change includes that to view.
        changer = logged_in("view_monitor", "change_exchange", *needed[1:])
        address = f"/admin/psqlmessages/exchange/{made.pk}/change/"
        for user in (helper, changer):
            page = user.get("/monitor/").text
            # The problem of elements that wait for a stopped exchange leads there too.
            assert page.count(f'href="{address}"') == 2 - is_running
            assert "ask a user with these" not in page
        assert button in helper.get(address).text
        settings.ROOT_URLCONF = (path("", include("psqlmessages.urls")),)
        listing._results.clear()
        PipelineJob.objects.all().delete()
        job(state=PipelineJob.State.FAILED)
        page = unescape(logged_in("view_monitor").get("/monitor/").text)
        assert not re.search("(on|in) (its|the) (page|admin)|with these permissions", page)
        assert ("INSERT" if is_running else "psqlmessages exchange start x") in page
        settings.ROOT_URLCONF = "project.urls"


def test_refused_calls_are_recorded_by_node_and_rule_in_few_rows(quiet: World):
    refused_calls.take()
    quiet.rules(f"{Server.owner} N Topic T R 60", f"{Server.owner} example Queue Q R 60")
    calls = [
        (exceptions.ModeNotAuthorized, push_element, "Q", 1),
        (exceptions.DestinationNotAuthorized, push_element, "other", 1),
        (exceptions.IdentNotExistent, partial(pop, ident="none"), "Q"),
    ]
    for error, call, *arguments in calls:
        with pytest.raises(error), transaction_of_django():
            call(*arguments)
    with Node("N", dsn=direct_dsn()) as node, pytest.raises(exceptions.ModeNotAuthorized):
        node.topic_notify("T")
    with pytest.raises(exceptions.IdentNotAuthorized), Node("stranger", dsn=direct_dsn()):
        pass

    async def use_session() -> None:
        async with AsyncNode("N", dsn=direct_dsn()) as other:
            for _ in range(2):
                with pytest.raises(exceptions.ModeNotAuthorized):
                    await other.topic_notify("T")

    asyncio.run(use_session())
    asyncio.run(refused_writer.write_counts())
    rows = RefusedCall.objects.order_by("ident", "dest")
    assert list(rows.values_list("ident", "type", "dest", "mode", "count")) == [
        ("N", "Topic", "T", "W", 3), ("example", "Queue", "Q", "W", 1),
        ("example", "Queue", "other", "W", 1), ("none", "Queue", "Q", "R", 1),
        ("stranger", "", "", "", 1),
    ]  # fmt: skip
    client = logged_in("view_monitor", "add_auth", "view_auth")
    page = client.get("/monitor/nodes/N/").text
    assert "Refused calls" in page
    assert f"psqlmessages allow N W Topic T --role {Server.owner}" in page
    (address,) = re.findall('href="(/admin/psqlmessages/auth/add/.*?)"', page)
    assert 'name="ident" value="N"' in client.get(unescape(address)).text
    assert len(read(client)) == 5
    quiet.rules(f"{Server.owner} example Queue * W 60", f"{Server.owner} N Topic * W 60")
    cures = (problem["cure"] for problem in read(client))
    unknown, stranger = (cure.partition("psqlmessages allow ")[2] for cure in cures)
    assert unknown == f"none R Queue Q --role {Server.owner}"
    assert stranger == f"stranger MODE TYPE NAME --role {Server.owner}"
    # Callers choose the names, so the number of rows is limited.
    for number in range(MAX_RULES + 50):
        refused_calls.record("N", exceptions.TopicNotExistent(f"Topic t{number} is not existent"))
    asyncio.run(refused_writer.write_counts())
    assert RefusedCall.objects.count() <= 5 + 101
    assert RefusedCall.objects.get(ident="").count == MAX_RULES + 50 - 99


def test_a_check_that_cannot_run_and_a_database_that_is_away_are_problems():
    current = replace(get_settings(), PROBLEM_QUEUE_PERCENT=20)
    answers = [(check, None if check.name == "waiting" else []) for check in CHECKS]
    (unchecked,) = find_problems(answers, timezone.now(), current)
    assert (unchecked.id, unchecked.severity) == ("unchecked:waiting", "warning")
    for name, row, severity, words in OF_THE_SERVER:
        answers = [(check, [row]) for check in CHECKS if check.name == name]
        (problem,) = find_problems(answers, timezone.now(), current)
        assert (problem.check, problem.severity) == (name, severity)
        assert words in problem.sentence

    def samples(*problems: Problem) -> dict[tuple[str, ...], float]:
        family = metrics.problem_family(problems)
        return {(*each.labels.values(),): each.value for each in family.samples}

    found = samples(unchecked)
    assert (found["unchecked", "warning"], found["paused", "error"]) == (1, 0)
    assert ("waiting", "error") not in found
    found = samples(database_problem())
    assert found["database", "error"] == 1
    assert ("paused", "error") not in found


def test_problems_need_the_token_or_a_user_of_the_monitor(client: Client, settings: Settings):
    def status(client: Client, token: str = "") -> int:
        return client.get(FULL, headers={"Authorization": token}).status_code

    assert [status(client, f"Bearer {token}") for token in ("", "x", TOKEN[:-1])] == [401] * 3
    assert (status(client, f"bearer {TOKEN}"), status(logged_in("view_monitor"))) == (200, 200)
    assert status(logged_in("view_bodies")) == 403
    assert client.get("/healthz").json() == {"status": "ok"}
    settings.PSQLMESSAGES = {}
    assert status(client, "Bearer ") == status(client, f"Bearer {TOKEN}") == 401


def test_alerts_and_dashboard_use_real_metrics(settings: Settings, monkeypatch):
    settings.PSQLMESSAGES = {"METRICS": True, "PROBLEM_RESTART_SECONDS": 0}
    counters = SimpleNamespace(receivers=0, nodes=0, received=0, delivered=0, lost_connections=0)
    hub = SimpleNamespace(counters=counters, is_connected=True, echo_seconds=0.1)
    observer = SimpleNamespace(history=SimpleNamespace(topics={}))
    monkeypatch.setattr(metrics, "get_hub", lambda: hub)
    monkeypatch.setattr(metrics, "running_observer", lambda: observer)
    text = asyncio.run(metrics.metrics(RequestFactory().get("/metrics"))).text
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)", text, re.MULTILINE))
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    names = {name + end for name, kind in kinds.items() for end in ends.get(kind, ("",))}
    page = (FILES.parent / "reference/settings.md").read_text().partition("| figure |")[2]
    figures = "".join(re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE))
    documented = set(re.findall(r"`(?:psqlmessages)?(_\w+)", figures))
    assert {f"psqlmessages{name}" for name in documented} == set(kinds)
    alerts = (FILES / "alerts.yml").read_text()
    for file in (alerts, (FILES / "dashboard.json").read_text()):
        used = set(re.findall(r"psqlmessages_\w+", file))
        assert set() < used <= names, used - names
    rules = "".join(rule["expr"] for rule in yaml.safe_load(alerts)["groups"][0]["rules"])
    assert sorted(re.findall('check="(.*?)"', rules)) == sorted(CHECK_NAMES)
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        assert {"title", "description", "targets"} <= panel.keys()


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_accepts_the_alerts():
    subprocess.run(["promtool", "check", "rules", FILES / "alerts.yml"], check=True)
