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


# load


def test_load_shows_what_it_does_and_which_rules_are_missing(
    type_in: Callable[..., Done], graph_file: Path
) -> None:
    done = type_in("load", str(graph_file))
    assert done.out == "+ x1: default/orders -> default/eu, default/slow, default/audit\n"
    told = done.err.splitlines()
    assert told[0] == "1 added, 0 changed, 0 unchanged, 0 removed"
    assert told[1:] == [
        "missing rule, in default: INSERT INTO messages.auth (role, ident, type, dest, mode,"
        f" timeout) VALUES ('{Server.owner}', 'exchange.x1', 'Queue', '{queue}', '{mode}', 60);"
        for queue, mode in (("audit", "W"), ("eu", "W"), ("orders", "R"), ("slow", "W"))
    ]
    assert Exchange.objects.get().name == "x1"


def test_load_with_rules_adds_them_and_tells(
    type_in: Callable[..., Done], graph_file: Path
) -> None:
    done = type_in("load", str(graph_file), "--with-rules")
    assert done.err == "1 added, 0 changed, 0 unchanged, 0 removed\n"
    assert done.out.count("\n+ rule, in default: INSERT INTO messages.auth") == 4
    assert set(Auth.objects.values_list("ident", "dest", "mode")) == {
        ("exchange.x1", "orders", "R"), ("exchange.x1", "eu", "W"),
        ("exchange.x1", "slow", "W"), ("exchange.x1", "audit", "W"),
    }  # fmt: skip
    again = type_in("load", str(graph_file), "--with-rules")
    assert (again.out, again.err) == ("", "0 added, 0 changed, 1 unchanged, 0 removed\n")


def test_a_dry_run_changes_nothing(type_in: Callable[..., Done], graph_file: Path) -> None:
    done = type_in("load", str(graph_file), "--dry-run", "--with-rules")
    assert done.out.startswith("+ x1: ")
    assert done.err.startswith("would be 1 added, ")
    assert not Exchange.objects.exists()
    assert not Auth.objects.exists()


def test_load_shows_each_field_that_changes(
    type_in: Callable[..., Done], x1: Exchange, graph_file: Path
) -> None:
    graph_file.write_text(
        GRAPH.replace("wsize: 100", "wsize: 7").replace("queue: audit", "queue: b")
    )
    assert type_in("load", str(graph_file)).out == (
        "~ x1: default/orders -> default/eu, default/slow, default/b\n"
        "    consumer.wsize: 100 -> 7\n"
        '    dst[2].queue: "audit" -> "b"\n'
    )


def test_replace_all_removes_what_the_file_does_not_name(
    type_in: Callable[..., Done], x1: Exchange, graph_file: Path
) -> None:
    graph_file.write_text(GRAPH.replace("x1:", "x2:"))
    assert type_in("load", str(graph_file)).out.startswith("+ x2: ")
    assert [row.name for row in Exchange.objects.all()] == ["x1", "x2"]
    assert type_in("load", str(graph_file), "--replace-all").out.startswith("- x1: ")
    assert [row.name for row in Exchange.objects.all()] == ["x2"]


def test_all_that_is_wrong_with_a_file_is_a_line_each_and_nothing_is_made(
    type_in: Callable[..., Done], graph_file: Path
) -> None:
    graph_file.write_text(
        GRAPH.replace("parallel: 2", "parallel: 20").replace("ns: default, queue: slow", "queue: 5")
    )
    done = type_in("load", str(graph_file))
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        "psqlmessages: exchanges.x1.dst[1].queue: 5 is no text: put it in quotes.",
        "psqlmessages: exchanges.x1.consumer.parallel: It is 20, and must be 1 to 16.",
    ]
    assert not Exchange.objects.exists()


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
    assert done.err.startswith(
        "psqlmessages: rules cannot be changed now: another change of rules "
    )
    assert done.err.endswith("names who sits in a transaction.\n")
    assert not Exchange.objects.exists()


def test_load_tells_where_somebody_was_faster(
    type_in: Callable[..., Done], graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = definitions.validated_exchange("y", {"src": {"queue": "a"}, "dst": [{"queue": "b"}]})
    monkeypatch.setattr(stored, "lock", lambda using: stored.write(faster, using))
    done = type_in("load", str(graph_file))
    assert done.code == 1
    assert done.err == "psqlmessages: somebody changed exchanges meanwhile: try again\n"


def test_load_reads_the_standard_input(
    type_in: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(GRAPH.encode())))
    assert type_in("load", "-").code == 0
    assert Exchange.objects.exists()


def test_a_file_that_is_not_there_is_told(type_in: Callable[..., Done]) -> None:
    done = type_in("load", "/nowhere.yaml")
    assert done.code == 1
    assert done.err.startswith("psqlmessages: [Errno 2] No such file")


def test_load_tells_what_goes_round_with_what_was_there(
    type_in: Callable[..., Done], x1: Exchange, tmp_path: Path
) -> None:
    back = tmp_path / "back.yaml"
    back.write_text("exchanges: {back: {src: {queue: audit}, dst: [{queue: orders}]}}")
    told = type_in("load", str(back), "--with-rules").err
    assert told.endswith("\na cycle: default/audit, default/orders\n")


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


# show


@pytest.mark.parametrize("arguments", [(), ("x1",), ("x1", "--format", "yaml")])
def test_show_prints_what_load_takes(
    type_in: Callable[..., Done], x1: Exchange, arguments: tuple[str, ...]
) -> None:
    assert type_in("show", *arguments).out == GRAPH


def test_show_as_json_is_the_same_definition(type_in: Callable[..., Done], x1: Exchange) -> None:
    printed = type_in("show", "--format", "json").out
    assert printed.startswith("{\n")
    assert definitions.read(printed) == stored.present()


# test


def test_test_tells_for_each_destination_whether_and_why_and_shows_the_copies(
    type_in: Callable[..., Done], x1: Exchange
) -> None:
    done = type_in("test", "x1", "--headers", '{"country": "us"}', "--body", "7", "--json-body")
    headers = '{"country": "us", "x-hop-count": 1, "lane": "slow"}'
    assert done.out.splitlines() == [
        "default/eu: no, false",
        "default/slow: yes, a map",
        f'    {{"headers": {headers}, "body": 7, "delay": 30.0}}',
        "default/audit: yes, always",
        f'    {{"headers": {headers}, "body": 7}}',
    ]


def test_test_tells_why_a_selector_failed(type_in: Callable[..., Done], x1: Exchange) -> None:
    assert type_in("test", "x1").out.startswith("default/eu: no, ")
    assert "country" in type_in("test", "x1").out.splitlines()[0]


def test_test_knows_what_time_it_is(type_in: Callable[..., Done], x1: Exchange) -> None:
    x1.destinations.update(selector='now > timestamp("2020-01-01T00:00:00Z")')
    assert type_in("test", "x1").out.startswith("default/eu: yes, ")


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


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--headers", "[]"), "argument --headers: not a JSON object: []"),
        (("--headers", "{"), "argument --headers: It is no JSON: "),
        (("--tries", "-1"), "argument --tries: at least 0 is needed: '-1'"),
    ],
)
def test_arguments_that_cannot_be_are_usage(
    type_in: Callable[..., Done], x1: Exchange, arguments: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(CommandError, match=fault.replace("[", r"\[")):
        type_in("test", "x1", *arguments)


def test_a_body_that_is_no_json_is_told(type_in: Callable[..., Done], x1: Exchange) -> None:
    done = type_in("test", "x1", "--body", "NaN", "--json-body")
    assert done.code == 1
    assert done.err == "psqlmessages: It is no JSON: NaN is no number of JSON.\n"


def test_a_selector_that_compiles_no_more_is_told(
    type_in: Callable[..., Done], x1: Exchange
) -> None:
    x1.destinations.filter(position=1).update(selector="@gone")
    done = type_in("test", "x1")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("psqlmessages: exchanges.x1.dst[1].selector: ")


# list, start, stop, delete


def test_list_is_a_table_of_what_runs_and_what_was_done(
    type_in: Callable[..., Done], x1: Exchange
) -> None:
    # Sooner than that nobody is taken for one that has stopped.
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


def test_a_process_that_gave_no_sign_of_life_for_a_while_does_not_run_it(
    type_in: Callable[..., Done], x1: Exchange
) -> None:
    ExchangeCount.objects.create(
        exchange=x1, worker=uuid4(), outcome="ok", count=1, seen_at="2026-01-01T00:00Z"
    )
    assert type_in("list").out.splitlines()[1].split()[:3] == ["x1", "running", "0"]


def test_without_exchanges_list_says_so(type_in: Callable[..., Done]) -> None:
    assert type_in("list").out == "no exchanges\n"


def test_stop_and_start_say_what_is_then(type_in: Callable[..., Done], x1: Exchange) -> None:
    assert type_in("stop", "x1").out == "x1 is stopped\n"
    assert not Exchange.objects.get().is_running
    assert type_in("stop", "x1").out == "x1 is stopped, as it was\n"
    assert type_in("start", "x1").out == "x1 is running\n"
    assert Exchange.objects.get().is_running


def test_delete_removes_it_and_leaves_the_rules(type_in: Callable[..., Done], x1: Exchange) -> None:
    assert type_in("delete", "x1").out == "x1 is removed; its queues and rules stay\n"
    assert not Exchange.objects.exists()
    assert Auth.objects.filter(ident="exchange.x1").count() == 4


@pytest.mark.parametrize("command", ["show", "test", "start", "stop", "delete"])
def test_an_exchange_that_is_not_there_is_told(type_in: Callable[..., Done], command: str) -> None:
    done = type_in(command, "nobody")
    assert (done.code, done.out) == (1, "")
    assert done.err == "psqlmessages: there is no exchange nobody\n"


# As processes


def test_as_processes_they_do_the_same(
    transactional_db: None, server: TestedServer, graph_file: Path
) -> None:
    loaded = manage(server, "psqlmessages", "exchange", "load", str(graph_file), "--with-rules")
    assert loaded.returncode == 0, loaded.stderr
    shown = manage(server, "psqlmessages", "exchange", "show", "x1", "--format", "json")
    assert json.loads(shown.stdout)["exchanges"]["x1"]["src"]["queue"] == "orders"
    assert manage(server, "psqlmessages", "exchange", "stop", "nobody").returncode == 1
