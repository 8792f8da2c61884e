"""The admin as a whole: who may only look changes nothing, forms need their token, few queries."""

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core import checks
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import translation
from pytest_django import Settings

from psqlmessages import models
from psqlmessages.models import Auth, Client, Exchange, PipelineJob, Queue, Topic, WebIdentity
from tests.exchanges.conftest import namespace
from tests.exchanges.test_runner_between import ToEu
from tests.web.measured import job, window
from tests.web.pages import (
    CLIENTS,
    EXCHANGES,
    IDENTITIES,
    JOBS,
    QUEUES,
    RULES,
    SUBSCRIPTIONS,
    TOPICS,
    TRAFFIC,
    Admin,
    page_of,
)
from tests.web.test_admin_exchanges import new
from tests.web.test_admin_nodes import ARCHIVE_RULE

MODELS = (
    Auth, Client, models.Destination, models.Element, Exchange, PipelineJob, Queue,
    models.Subscription, Topic, models.Traffic, WebIdentity,
)  # fmt: skip
LISTS = (RULES, CLIENTS, TOPICS, IDENTITIES, QUEUES, EXCHANGES, SUBSCRIPTIONS, TRAFFIC, JOBS)
CHANGES = {
    "Save", "Stop", "Start", "Add the rules of this database", "Pause", "Drain…", "Disconnect…",
    "Archive", "Redrive selected", "Import",
}  # fmt: skip


@pytest.fixture
def filled(admin: Admin) -> Admin:
    """One object of each kind."""
    admin.world.rules("user1 A Topic T RW 9", "user1 A Queue * RW 9")
    node = admin.world.node("user1", "A", listen="T")
    node.got("A", "T")
    node.ok("push", "A", "__deadletter__", "x")
    Auth.objects.filter(type="Queue").delete()
    new("x1", "orders", "eu")
    WebIdentity.objects.create(user=User.objects.create_user("alice"), ident="x")
    window("ORDERS")
    job("archive", silent=60)
    return admin


def posts() -> dict[str, dict[str, Any]]:
    """The address of each form that changes something, and its fields."""
    rule, topic, queue, exchange, identity, dead = (
        model.objects.get() for model in (Auth, Topic, Queue, Exchange, WebIdentity, PipelineJob)
    )
    return {
        page_of(rule): {"mode": "W", "timeout": "9"}, page_of(rule, "delete"): {"post": "yes"},
        f"{RULES}add/": {"role": "user1"}, f"{RULES}import/": {"plan": "x"},
        page_of(identity): {"ident": "y"}, page_of(identity, "delete"): {"post": "yes"},
        f"{IDENTITIES}add/": {"ident": "y"}, page_of(topic): {"retention": "7"},
        page_of(topic, "archive"): {"archive": "yes"}, page_of(queue): {"max_tries": "7"},
        page_of(queue, "elements"): {"all": "yes"}, page_of(exchange): {"parallel": "2"},
        page_of(exchange, "delete"): {"post": "yes"}, page_of(exchange, "rules"): {},
        page_of(dead, "delete"): {"post": "yes"},
        f"{CLIENTS}open-transactions/": {"confirmed": "yes"},
    }  # fmt: skip


def actions() -> list[tuple[str, dict[str, Any]]]:
    """The confirmed actions of lists, and a list of rules that is saved."""
    named = {
        RULES: (Auth, ("delete_selected",)),
        CLIENTS: (Client, ("disconnect",)),
        QUEUES: (Queue, ("pause_selected", "resume_selected", "drain_selected", "delete_empty")),
        EXCHANGES: (Exchange, ("stop_selected", "delete_selected")),
        JOBS: (PipelineJob, ("delete_selected",)),
    }
    found: list[tuple[str, dict[str, Any]]] = [
        (path, {"action": action, "_selected_action": str(model.objects.get().pk),
                "confirmed": "yes", "post": "yes"})
        for path, (model, names) in named.items()
        for action in names
    ]  # fmt: skip
    key = str(Auth.objects.get().pk)
    form = {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 1, "form-0-id": key, "form-0-mode": "W"}
    return [*found, (RULES, {**form, "form-0-timeout": "9", "_save": "Save"})]


def stored() -> list[list[tuple[Any, ...]]]:
    return [list(model.objects.order_by("pk").values_list()) for model in MODELS]


def test_a_view_only_user_changes_nothing_and_sees_no_action(filled: Admin):
    viewer = filled.staff(*(f"view_{model._meta.model_name}" for model in MODELS))
    before, forms = stored(), posts()
    pages = [RULES, CLIENTS, *(path for path in forms if path.endswith(("change/", "elements/")))]
    shown = {path: viewer.open(path) for path in pages}
    offered = [(path, page.status, page.buttons & CHANGES) for path, page in shown.items()]
    assert offered == [(path, 200, set()) for path in pages]
    viewer.client.handler.enforce_csrf_checks = False
    answers = {path: viewer.client.post(path, forms[path]).status_code for path in forms}
    assert {path: status for path, status in answers.items() if status != 403} == {}
    for path, values in actions():
        viewer.client.post(path, values)
    assert stored() == before


def test_an_action_that_cannot_be_logged_changes_nothing(filled: Admin, monkeypatch):
    Queue.objects.update(is_paused=True)
    models.Element.objects.update(headers={"x-dl-from-queue": "__deadletter__"})
    pages = tuple(f"/{name}/" for name in ("elements", "archive", "rules"))
    forms = [*actions(), *(each for each in posts().items() if each[0].endswith(pages))]
    filled.world.rules(ARCHIVE_RULE)
    before, client = stored(), filled.client
    client.handler.enforce_csrf_checks = client.raise_request_exception = False
    monkeypatch.setattr(LogEntry, "__init__", None)
    done = [values for path, values in forms if client.post(path, values).status_code != 500]
    assert [values["action"] for values in done] == ["pause_selected", "delete_empty"]
    assert stored() == before


def test_forms_need_their_token_and_pages_their_permissions(filled: Admin):
    before, forms = stored(), posts()
    for path, values in [*forms.items(), *actions()]:
        assert filled.client.post(path, values).status_code == 403, path
    # Nobody may do this, even with the token.
    chief = filled.client
    chief.handler.enforce_csrf_checks = False
    for model in (Client, Topic, models.Subscription, models.Traffic):
        row = model.objects.get()
        for address in (page_of(row, "delete"), page_of(row).replace(f"{row.pk}/change", "add")):
            assert chief.post(address, {"post": "yes"}).status_code == 403, address
    assert chief.post(page_of(models.Traffic.objects.get()), {"count": 1}).status_code == 403
    assert stored() == before
    pages = [*LISTS, f"{RULES}export/", f"{RULES}import/", f"{CLIENTS}open-transactions/"]
    nobody = filled.staff()
    refused = {path: nobody.open(path) for path in pages}
    assert [path for path, page in refused.items() if page.status != 403] == []
    # The page names the missing permission and who can give it.
    named = re.compile("needs the permission psqlmessages.(view|add)_.* auth.change_user")
    assert [path for path, page in refused.items() if not named.search(page.text)] == []
    chief.logout()
    for path in pages:
        assert chief.get(path)["Location"].startswith("/admin/login/"), path
    assert checks.run_checks(tags=["admin"]) == []


# Tables that may have many rows.
LARGE = ("auth", "client", "topic", "queue", "subscription", "membership", "element")


def scans(query: dict[str, Any]) -> list[str]:
    """Return the large tables that a query reads completely."""

    def search(plan: dict[str, Any], is_limited: bool) -> list[str]:
        is_limited |= plan["Node Type"] == "Limit"
        found = plan.get("Relation Name", "").removeprefix("psqlmessages_")
        is_full = plan["Node Type"] == "Seq Scan" and not is_limited and found in LARGE
        below = [name for each in plan.get("Plans", ()) for name in search(each, is_limited)]
        return [*below, *([found] if is_full else [])]

    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (FORMAT JSON) {query['sql']}")
        return search(cursor.fetchone()[0][0]["Plan"], is_limited=False)


def test_long_lists_are_cheap(admin: Admin):
    admin.world.rules("user1 N* Topic T* RW 10", "user1 N* Topic T RW 10")
    admin.world.program("user1").connection.execute(
        "SELECT messages.init('N' || n), messages.topic_listen('T' || n % 7),"
        " (SELECT count(*) FROM messages.subscribe('N' || n, 'T', 60))"
        " FROM generate_series(1, 100) AS n"
    )
    insert = "INSERT INTO psqlmessages_auth (role, ident, type, dest, mode, timeout)"
    rules = "SELECT 'user1', 'M' || n, 'Topic', 'M' || n, 'R', 9 FROM generate_series(1, 11000) n"
    admin.world.execute(f"{insert} {rules}")
    Queue.objects.bulk_create(Queue(name=f"q{n}", channel=f"c{n}") for n in range(40))
    for number in range(60):
        new(f"x{number}", "a", "eu", "slow")
        window(f"T{number}")
    for table in LARGE:
        admin.world.execute(f"ANALYZE psqlmessages_{table}")
    for path, most, said in (
        (RULES, 12, "10000 rules The list shows the first 10000."),
        (f"{RULES}?ident=M10&role=user1", 12, "1111 rules"), (CLIENTS, 14, "100 connected nodes"),
        (SUBSCRIPTIONS, 10, "100 subscriptions"), (TOPICS, 10, "10000 topics"),
        (f"{QUEUES}?o=3", 10, "40 queues"), (EXCHANGES, 10, "60 exchanges"),
        (f"{TRAFFIC}?window_seconds=10", 16, "60 traffic"),
        ("/monitor/queues/", 14, "of 40"), ("/monitor/nodes/", 10, "of 100"),
        ("/monitor/streams/", 14, "of 100"), ("/monitor/nodes/?q=N99", 10, "of 1"),
    ):  # fmt: skip
        with CaptureQueriesContext(connection) as queries:
            page = admin.open(path)
        assert len(queries) <= most, path
        assert said in page.text
        assert len(page.html) < 400_000, "the filters do not list all idents"
        read = [query for query in queries if query["sql"].startswith(("SELECT", "\n    WITH"))]
        if path.startswith((RULES, TOPICS)):
            assert [query["sql"] for query in read if scans(query)] == []


MONITOR = (
    "", "topics/", "topics/T/", "queues/", "queues/__deadletter__/", "streams/", "nodes/",
    "nodes/A/", "exchanges/", "traffic/", "traffic/topic/?name=T",
)  # fmt: skip
# Labels, buttons and headings.
LABEL = re.compile(
    r"<(h[12]|label|caption|legend|dt|summary|button)\b[^>]*>(.*?)</\1>"
    r"|<th scope=\"col\"(?: class=\"[^>]*)?>(.*?)</th>"
    r"|<input type=\"submit\"[^>]*? value=\"([^\"]*)",
    re.DOTALL,
)
# Names, and abbreviations that are the same in every language.
NAMES = {"A (user1): RW Topic T", "A", "__deadletter__", "alice as x", "T", "x1", "p95"}


def test_pages_are_translated_and_read_no_replica(filled: Admin, monkeypatch, settings: Settings):
    # This translation puts each text in brackets.
    monkeypatch.setattr(translation._trans, "gettext", lambda text: f"[{text}]")
    monkeypatch.setattr(translation._trans, "ngettext", lambda _, text, *__: f"[{text}]")
    queue, exchange = Queue.objects.get(), Exchange.objects.get()
    pages = [path for path in posts() if path.endswith(("change/", "add/", "import/"))]
    pages += [*LISTS, f"{CLIENTS}open-transactions/", page_of(Client.objects.get()),
              page_of(queue, "elements"), page_of(exchange, "dry-run"),
              *(f"/monitor/{name}" for name in MONITOR)]  # fmt: skip
    settings.DATABASE_ROUTERS = [ToEu()]
    with namespace("eu", HOST="127.0.0.1", PORT="1"):
        shown = {path: filled.open(path).html for path in pages}
    untranslated = [
        (path, text)
        for path, html in shown.items()
        for groups in LABEL.findall(html)
        if (text := " ".join(re.sub(r"<[^>]*>", " ", "".join(groups[1:])).split()))
        and not {"[", "]"} & set(text)
        and text.rstrip(":") not in NAMES
    ]
    assert untranslated == []
