"""The commands of exchanges: load, list, show, test, start, stop, delete, as they are typed."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models.functions import Now

from project.postgres import Server
from psqlmessages.graph import definitions, stored
from psqlmessages.models import Auth, Exchange, ExchangeCount
from tests.conftest import TestedServer
from tests.django.processes import manage

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


@dataclass
class Done:
    """What a command printed, and its exit code."""

    out: str
    err: str
    code: int


@pytest.fixture
def type_in(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Type `manage.py psqlmessages exchange …`."""

    def type_in(*arguments: str) -> Done:
        capsys.readouterr()
        code = 0
        try:
            call_command("psqlmessages", "exchange", *arguments)
        except SystemExit as leaving:
            code = int(str(leaving.code))
        printed = capsys.readouterr()
        return Done(printed.out, printed.err, code)

    return type_in


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """The file of the documentation."""
    file = tmp_path / "graph.yaml"
    file.write_text(GRAPH)
    return file


@pytest.fixture
def x1(type_in: Callable[..., Done], graph_file: Path) -> Exchange:
    """The exchange of that file, stored, with its rules."""
    assert type_in("load", str(graph_file), "--with-rules").code == 0
    return Exchange.objects.get()


def test_load_tells_which_rules_are_missing_and_adds_those(
    type_in: Callable[..., Done], graph_file: Path
) -> None:
    dry = type_in("load", str(graph_file), "--dry-run", "--with-rules")
    assert dry.err.startswith("would be 1 added, ")
    assert not Exchange.objects.exists()
    assert not Auth.objects.exists()
    assert type_in("load", str(graph_file)).err.splitlines() == [
        "1 added, 0 changed, 0 unchanged, 0 removed",
        *(
            "missing rule, in default: INSERT INTO messages.auth (role, ident, type, dest, mode,"
            f" timeout) VALUES ('{Server.owner}', 'exchange.x1', 'Queue', '{queue}', '{mode}', 60);"
            for queue, mode in (("audit", "W"), ("eu", "W"), ("orders", "R"), ("slow", "W"))
        ),
    ]
    done = type_in("load", str(graph_file), "--with-rules")
    assert done.err == "0 added, 0 changed, 1 unchanged, 0 removed\n"
    assert set(Auth.objects.values_list("ident", "dest", "mode")) == {
        ("exchange.x1", "orders", "R"), ("exchange.x1", "eu", "W"),
        ("exchange.x1", "slow", "W"), ("exchange.x1", "audit", "W"),
    }  # fmt: skip
    again = type_in("load", str(graph_file), "--with-rules")
    assert (again.out, again.err) == ("", "0 added, 0 changed, 1 unchanged, 0 removed\n")


def test_replace_all_removes_what_the_file_does_not_name(
    type_in: Callable[..., Done], x1: Exchange, graph_file: Path
) -> None:
    graph_file.write_text(GRAPH.replace("x1:", "x2:"))
    assert type_in("load", str(graph_file)).out.startswith("+ x2: ")
    assert [row.name for row in Exchange.objects.all()] == ["x1", "x2"]
    assert type_in("load", str(graph_file), "--replace-all").out.startswith("- x1: ")
    assert [row.name for row in Exchange.objects.all()] == ["x2"]
    done = type_in("load", "/nowhere.yaml", "--replace-all")
    assert done.code == 1
    assert done.err.startswith("psqlmessages: [Errno 2] No such file")


def test_nothing_is_made_where_the_rules_cannot_be_changed_now(
    transactional_db: None,
    server: TestedServer,
    type_in: Callable[..., Done],
    graph_file: Path,
) -> None:
    with psycopg.connect(server.url()) as other, connection.cursor() as cursor:
        other.execute("SELECT messages._close_gate()")
        cursor.execute("SET lock_timeout = '50ms'")
        done = type_in("load", str(graph_file), "--with-rules")
        cursor.execute("RESET lock_timeout")
    assert done.code == 1
    assert done.err.startswith("psqlmessages: rules cannot be changed now: ")
    assert not Exchange.objects.exists()


def test_load_tells_where_somebody_was_faster(
    type_in: Callable[..., Done], graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = definitions.validated_exchange("y", {"src": {"queue": "a"}, "dst": [{"queue": "b"}]})
    monkeypatch.setattr(stored, "lock", lambda using: stored.write(faster, using))
    done = type_in("load", str(graph_file))
    assert done.code == 1
    assert done.err == "psqlmessages: somebody changed exchanges meanwhile: try again\n"


def test_load_reads_the_standard_input_and_tells_what_goes_round(
    type_in: Callable[..., Done], x1: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = b"exchanges: {back: {src: {queue: audit}, dst: [{queue: orders}]}}"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(back)))
    told = type_in("load", "-", "--with-rules").err
    assert told.endswith("\na cycle: default/audit, default/orders\n")
    assert Exchange.objects.count() == 2


def test_load_tells_of_a_namespace_that_cannot_be_asked(
    away: None, type_in: Callable[..., Done], graph_file: Path
) -> None:
    graph_file.write_text(GRAPH.replace("{ns: default, queue: audit}", "{ns: away, queue: audit}"))
    done = type_in("load", str(graph_file), "--with-rules")
    assert done.code == 0
    assert "\nwhich rules are missing in away is not known: connection failed: " in done.err


def test_what_a_name_holds_cannot_command_the_terminal(
    type_in: Callable[..., Done], graph_file: Path
) -> None:
    graph_file.write_text(GRAPH.replace("queue: audit", r'queue: "\e[2J"'))
    done = type_in("load", str(graph_file))
    assert r"'Queue', '\x1b[2J'" in done.err
    printed = done.out + done.err + type_in("list").out
    assert "\x1b" not in printed
    assert r"default/\x1b[2J" in printed


def test_show_prints_what_load_takes(type_in: Callable[..., Done], x1: Exchange) -> None:
    for arguments in ((), ("x1",), ("x1", "--format", "yaml")):
        assert type_in("show", *arguments).out == GRAPH
    printed = type_in("show", "--format", "json").out
    assert printed.startswith("{\n")
    assert definitions.read(printed) == stored.present()


def test_test_shows_where_strays_go(type_in: Callable[..., Done], x1: Exchange) -> None:
    x1.destinations.update(selector="msg.tries > 2")
    stray = type_in("test", "x1", "--body", "a").out.splitlines()[-2:]
    assert stray == [
        "no_route: to default/__no_route__",
        '    {"headers": {"x-hop-count": 1, "x-exchange-name": "x1"}, "body": "a"}',
    ]
    assert "yes" in type_in("test", "x1", "--tries", "3").out
    assert type_in("test", "x1", "--headers", '{"x-hop-count": "17"}').out.splitlines() == [
        "too_many_hops: to default/__too_many_hops__",
        '    {"headers": {"x-hop-count": "17", "x-exchange-name": "x1"}, "body": ""}',
    ]


def test_what_cannot_be_tested_is_told(type_in: Callable[..., Done], x1: Exchange) -> None:
    for wrong, error in {
        ("--headers", "[]"): r"argument --headers: not a JSON object: \[\]",
        ("--headers", "{"): "argument --headers: It is no JSON: ",
        ("--tries", "-1"): "argument --tries: at least 0 is needed: '-1'",
    }.items():
        with pytest.raises(CommandError, match=error):
            type_in("test", "x1", *wrong)
    done = type_in("test", "x1", "--body", "NaN", "--json-body")
    assert done.code == 1
    assert done.err == "psqlmessages: It is no JSON: NaN is no number of JSON.\n"
    assert type_in("test", "x1").out.startswith("default/eu: no, no such key: country\n")
    x1.destinations.update(selector='now > timestamp("2020-01-01T00:00:00Z")')
    assert type_in("test", "x1").out.startswith("default/eu: yes, ")
    x1.destinations.filter(position=1).update(selector="@gone")
    done = type_in("test", "x1")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("psqlmessages: exchanges.x1.dst[1].selector: ")


def test_list_is_a_table_of_what_runs_and_what_was_done(
    type_in: Callable[..., Done], x1: Exchange
) -> None:
    # Long ago: such a process is taken for one that has stopped.
    ExchangeCount.objects.create(
        exchange=x1, worker=uuid4(), outcome="ok", count=0, seen_at="2026-01-01T00:00Z"
    )
    assert type_in("list").out.splitlines()[1].split()[:3] == ["x1", "running", "0"]
    later = Now() + timedelta(hours=1)
    for worker in (uuid4(), uuid4()):
        for outcome, count in (("ok", 1000), ("no_route", 2), ("failed", 0), ("to", 77)):
            ExchangeCount.objects.create(
                exchange=x1, worker=worker, outcome=outcome, count=count, seen_at=later
            )
    head, row = type_in("list").out.splitlines()
    assert head.split("  ")[0] == "exchange"
    assert row.split() == [
        "x1", "running", "2", "default/orders", "default/eu,", "default/slow,", "default/audit",
        "2,000", "4", "0", "0",
    ]  # fmt: skip


def test_what_is_not_there_or_is_so_already_is_told(
    type_in: Callable[..., Done], x1: Exchange
) -> None:
    assert type_in("stop", "x1").out == "x1 is stopped\n"
    assert type_in("stop", "x1").out == "x1 is stopped, as it was\n"
    assert type_in("delete", "x1").code == 0
    assert Auth.objects.filter(ident="exchange.x1").count() == 4
    for command in ("show", "test", "start", "stop", "delete"):
        done = type_in(command, "x1")
        assert (done.code, done.out) == (1, ""), command
        assert done.err == "psqlmessages: there is no exchange x1\n"


def test_as_processes_they_do_the_same(
    transactional_db: None, server: TestedServer, graph_file: Path
) -> None:
    loaded = manage(server, "psqlmessages", "exchange", "load", str(graph_file), "--with-rules")
    assert loaded.returncode == 0, loaded.stderr
    shown = manage(server, "psqlmessages", "exchange", "show", "x1", "--format", "json")
    assert json.loads(shown.stdout)["exchanges"]["x1"]["src"]["queue"] == "orders"
    assert manage(server, "psqlmessages", "exchange", "stop", "nobody").returncode == 1
