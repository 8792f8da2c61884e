"""The commands of exchanges: load, list, show, test, start, stop, delete, as they are typed."""

import io
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now

from project.postgres import Server
from psqlmessages.exchanges.store import definitions, repository
from psqlmessages.exchanges.store.stats import FORMER_WORKERS, CounterStore
from psqlmessages.models import Auth, Exchange, ExchangeCount
from tests.conftest import TestedServer
from tests.exchanges.conftest import TypeIn

pytestmark = pytest.mark.django_db

GRAPH = """\
exchanges:
  x1:
    consumer: {parallel: 2, wsize: 100, reserve: true}
    src: {ns: default, queue: orders}
    dst:
    - {ns: default, queue: eu, selector: 'msg.headers["country"].matches("^(it|de|fr)$")'}
    - {ns: default, queue: slow, selector: '{"delay": 30, "headers": {"lane": "slow"}}'}
    - {ns: default, queue: audit}
"""
RULES = (("audit", "W"), ("eu", "W"), ("orders", "R"), ("slow", "W"))


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    file = tmp_path / "graph.yaml"
    file.write_text(GRAPH)
    return file


@pytest.fixture
def x1(type_in: TypeIn, graph_file: Path) -> Exchange:
    assert type_in("load", graph_file, "--with-rules").returncode == 0
    return Exchange.objects.get()


def test_load_tells_and_adds_the_missing_rules(type_in: TypeIn, graph_file: Path):
    dry = type_in("load", graph_file, "--dry-run", "--with-rules")
    assert dry.stderr.startswith("dry run: 1 added, ")
    assert not Exchange.objects.exists()
    assert not Auth.objects.exists()
    assert type_in("load", graph_file).stderr.splitlines() == [
        "1 added, 0 changed, 0 unchanged, 0 removed",
        *(
            "missing rule in default: INSERT INTO messages.auth (role, ident, type, dest, mode,"
            f" timeout) VALUES ('{Server.owner}', 'exchange.x1', 'Queue', '{queue}', '{mode}', 60);"
            for queue, mode in RULES
        ),
    ]
    done = type_in("load", graph_file, "--with-rules")
    assert done.stderr == "0 added, 0 changed, 1 unchanged, 0 removed\n"
    rules = {("exchange.x1", *rule) for rule in RULES}
    assert set(Auth.objects.values_list("ident", "dest", "mode")) == rules
    again = type_in("load", graph_file, "--with-rules")
    assert (again.stdout, again.stderr) == ("", "0 added, 0 changed, 1 unchanged, 0 removed\n")


def test_a_new_exchange_may_start_stopped(type_in: TypeIn, graph_file: Path):
    graph_file.write_text(f"{GRAPH}    running: false\n")
    assert type_in("load", graph_file).stdout.endswith(" (stopped)\n")
    assert type_in("start", "x1").stdout == "x1 is running\n"
    # An exchange that exists keeps its state.
    for text in (f"{GRAPH}    running: false\n", GRAPH.replace("wsize: 100", "wsize: 7")):
        graph_file.write_text(text)
        assert type_in("load", graph_file).returncode == 0
        assert Exchange.objects.get().is_running
    graph_file.write_text(f"{GRAPH}    running: 0\n")
    assert "exchanges.x1.running: 0 is not true or false." in type_in("load", graph_file).stderr


def test_replace_all_removes_the_unnamed(type_in: TypeIn, x1: Exchange, graph_file: Path):
    graph_file.write_text(GRAPH.replace("x1:", "x2:"))
    assert type_in("load", graph_file).stdout.startswith("+ x2: ")
    assert [row.name for row in Exchange.objects.all()] == ["x1", "x2"]
    assert type_in("load", graph_file, "--replace-all").stdout.startswith("- x1: ")
    assert [row.name for row in Exchange.objects.all()] == ["x2"]
    done = type_in("load", "/nowhere.yaml", "--replace-all")
    assert done.returncode == 1
    assert done.stderr.startswith("psqlmessages: [Errno 2] No such file")


def test_nothing_is_made_where_the_rules_cannot_be_changed_now(
    transactional_db: None, server: TestedServer, type_in: TypeIn, graph_file: Path
):
    with psycopg.connect(server.url()) as other, connection.cursor() as cursor:
        other.execute("SELECT messages._lock_rules()")
        cursor.execute("SET lock_timeout = '50ms'")
        done = type_in("load", graph_file, "--with-rules")
        cursor.execute("RESET lock_timeout")
    assert done.returncode == 1
    assert done.stderr.startswith("psqlmessages: rules cannot be changed now: ")
    assert not Exchange.objects.exists()


def test_load_reads_stdin(type_in: TypeIn, x1: Exchange, monkeypatch):
    back = b"exchanges: {back: {src: {queue: audit}, dst: [{queue: orders}]}}"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(back)))
    told = type_in("load", "-", "--with-rules").stderr
    assert told.endswith("\ncycle: default/audit, default/orders\n")
    assert Exchange.objects.count() == 2


def test_names_cannot_contain_terminal_commands(type_in: TypeIn, graph_file: Path):
    graph_file.write_text(GRAPH.replace("queue: audit", r'queue: "\e[2J"'))
    done = type_in("load", graph_file)
    assert r"'Queue', '\x1b[2J'" in done.stderr
    printed = done.stdout + done.stderr + type_in("list").stdout
    assert "\x1b" not in printed
    assert r"default/\x1b[2J" in printed


def test_show_prints_definitions_that_load_accepts(type_in: TypeIn, x1: Exchange):
    for arguments in ((), ("x1",), ("x1", "--format", "yaml")):
        assert type_in("show", *arguments).stdout == f"{GRAPH}    running: true\n"
    type_in("stop", "x1")
    Exchange.objects.update(no_route_action="discard")
    assert type_in("show", "x1").stdout == f"{GRAPH}    no_route: discard\n    running: false\n"
    printed = type_in("show", "--format", "json").stdout
    assert printed.startswith("{\n")
    assert definitions.parse_text(printed) == repository.read_all()


def test_a_dry_run_shows_unrouted_elements(type_in: TypeIn, x1: Exchange):
    x1.destinations.update(selector="msg.tries > 2")
    assert type_in("test", "x1", "--body", "a").stdout.endswith(
        "\nno_route: to default/__no_route__\n"
        '    {"headers": {"x-hop-count": 1, "x-exchange-name": "x1"}, "body": "a"}\n'
    )
    assert "yes" in type_in("test", "x1", "--tries", "3").stdout
    assert type_in("test", "x1", "--headers", '{"x-hop-count": "17"}').stdout == (
        "too_many_hops: to default/__too_many_hops__\n"
        '    {"headers": {"x-hop-count": "17", "x-exchange-name": "x1"}, "body": ""}\n'
    )
    Exchange.objects.update(no_route_action="discard")
    discarded = type_in("test", "x1", "--body", "a").stdout
    assert discarded.endswith("\ndiscarded: no selector accepts the element\n")


def test_list_is_a_table_of_exchanges_with_their_counts(type_in: TypeIn, x1: Exchange):
    def count(worker: UUID, outcome: str, count: int, seen_at: object) -> None:
        given = {"worker": worker, "outcome": outcome, "count": count, "seen_at": seen_at}
        ExchangeCount.objects.create(exchange=x1, **given)

    count(uuid4(), "ok", 0, "2026-01-01T00:00Z")
    assert type_in("list").stdout.splitlines()[1].split()[:3] == ["x1", "running", "0"]
    for worker in (uuid4(), uuid4()):
        for outcome, number in (("ok", 1000), ("no_route", 2), ("failed", 0), ("to", 77)):
            count(worker, outcome, number, Now() + timedelta(hours=1))
    head, row = type_in("list").stdout.splitlines()
    assert head.split("  ")[0] == "exchange"
    assert row.split() == [
        "x1", "running", "2", "default/orders", "default/eu,", "default/slow,", "default/audit",
        "2,000", "4", "0", "0", "0",
    ]  # fmt: skip
    # Unchanged rows of workers that live are not merged.
    store = CounterStore()
    for live, outcome in ((worker, "discarded"), (store.worker, "ok"), (store.worker, "to")):
        count(live, outcome, 5, "2026-01-01T00:00Z")
    merged = ExchangeCount.objects.filter(worker=FORMER_WORKERS)
    for _ in range(29):
        store.write([])
    with pytest.raises(IntegrityError), transaction.atomic():
        store.write([ExchangeCount(exchange=x1, outcome="ok", buckets=None)])
    for _ in range(29):
        store.write([])
    assert not merged.exists()
    for each in [store] + [CounterStore()] * 30:
        each.write([])
    assert ExchangeCount.objects.count() == 12
    assert merged.get().outcome == "ok"


def test_missing_objects_and_repeated_changes_are_reported(type_in: TypeIn, x1: Exchange):
    assert type_in("stop", "x1").stdout == "x1 is stopped\n"
    assert type_in("stop", "x1").stdout == "x1 was already stopped\n"
    assert type_in("delete", "x1").returncode == 0
    assert Auth.objects.filter(ident="exchange.x1").count() == 4
    for command in ("show", "test", "start", "stop", "delete"):
        done = type_in(command, "x1")
        assert (done.returncode, done.stdout) == (1, ""), command
        assert done.stderr == "psqlmessages: there is no exchange x1\n"
