"""doctor: every fault it knows, provoked."""

import json
import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from django.core.management import call_command
from django.db import connection
from psycopg.conninfo import conninfo_to_dict
from pytest_django import Settings

from project.postgres import Server
from psqlmessages.cli import doctor, doctor_checks
from psqlmessages.cli.doctor import (
    CHECKS,
    create_rights,
    expired_bodies,
    owners,
    rules,
    run_checks,
)  # fmt: skip
from psqlmessages.cli.doctor_checks import Check, Finding, FindingState
from psqlmessages.cli.main import main
from psqlmessages.handler_registry import HandlerRegistry
from psqlmessages.management import database
from psqlmessages.management.database import needed_rules
from psqlmessages.sql import MIGRATIONS
from tests.django.conftest import Changed, finding_of
from tests.django.pgbouncer import pgbouncer
from tests.django.processes import manage
from tests.django.waiting import wait_until
from tests.exchanges.conftest import namespace
from tests.sql.conftest import World

RunCheck = Callable[..., Finding]


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch) -> None:
    """A notification may arrive late on a slow machine."""
    monkeypatch.setattr(doctor_checks, "NOTIFICATION_TIMEOUT_SECONDS", 60.0)


@pytest.fixture
def examined(shop: World) -> RunCheck:
    return lambda check, address=None: finding_of(check, address or shop.server.url())


def pruned(shop: World, capsys, *options: str) -> str:
    assert main(["--dsn", shop.server.url(), "prune", *options]) == 0
    return capsys.readouterr().out


def test_nothing_is_wrong_with_a_database_as_migrate_leaves_it(shop: World):
    findings = {each.check: each.state for each in run_checks(shop.server.url())}
    names = [check.__name__.replace("_", " ") for check in CHECKS]
    assert findings == dict.fromkeys(names, FindingState.OK)
    done = manage(shop.server, "psqlmessages", "doctor")
    assert (done.returncode, done.stderr) == (0, "\nnothing wrong\n"), done.stdout
    assert done.stdout.startswith("ok       server          PostgreSQL ")


def test_missing_rules_have_a_command(shop: World, monkeypatch, settings: Settings, capsys):
    handlers = HandlerRegistry()
    monkeypatch.setattr(database, "registry", handlers)
    settings.PSQLMESSAGES = {"NODE": "new shop"}
    handlers.on_topic("NEWS*", node="reader")(print)
    handlers.on_topic("NEWS")(print)
    handlers.on_rpc(node="answerer")(print)
    # A rule for one name of a pattern, or for a longer pattern, is enough.
    handlers.on_topic("ORDERS.*", node="a.*")(print)
    shop.rules("user1 a.b.* Topic ORDERS.1 R 5")

    def wrong() -> list[Finding]:
        return [found for found in run_checks(shop.server.url(), needed_rules) if found.fix]

    found = {each.found: each.fix for each in wrong()}
    assert len(found) == 4, found
    assert "no rule names the node new shop for the role" in next(iter(found))
    for fix in found.values():
        assert not re.search("NODE|TOPIC|CALLER", fix)
        words = shlex.split(fix.removeprefix("python manage.py psqlmessages "))
        call_command("psqlmessages", *words, *(() if "--role" in words else ("--role", "user1")))
    assert wrong() == []
    shop.execute("DELETE FROM messages.auth")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        call_command("psqlmessages", "doctor")
    said = capsys.readouterr().out
    assert re.search(r"are no rules\n.+ a rule allows it\n.+'new shop', .+'NEWS\*'", said)
    settings.PSQLMESSAGES = {}
    monkeypatch.setattr(database, "registry", HandlerRegistry())
    (found,) = wrong()
    assert found.why.endswith("; NODE and TOPIC stand for your names")


def test_it_fails_with_the_problem_and_its_fix(shop: World, changed: Changed, capsys):
    version = shop.owner.query("SELECT obj_description('messages'::regnamespace, 'pg_namespace')")
    comment = "COMMENT ON SCHEMA messages IS"
    changed(f"{comment} 'psqlmessages 0123456789abcdef'", f"{comment} '{version}'")
    assert main(["--dsn", shop.server.url(), "doctor"]) == 1
    said = capsys.readouterr()
    assert said.err == "\n1 wrong\n"
    assert "wrong    installed       functions of another version: 0123456789abcdef" in said.out
    assert "\n         why: calls may fail, or behave differently" in said.out
    assert "\n         fix: python manage.py psqlmessages install" in said.out
    assert main(["--dsn", shop.server.url(), "doctor", "--json"]) == 1
    (first, *_) = (report := json.loads(capsys.readouterr().out))["findings"]
    assert (report["wrong"], set(first)) == (1, {"check", "state", "found", "why", "fix"})


def test_prune_removes_expired_bodies_left_behind(shop: World, examined: RunCheck, capsys):
    # The housekeeping of another session, such as a hub's, may be faster.
    for _ in range(5):
        shop.execute(
            "INSERT INTO psqlmessages_body (slot, id, expires_at, header, body) VALUES"
            " (messages._body_slot(3, 1), gen_random_uuid(), now() - interval '1 h', '{}', 'x')"
        )
        if (found := examined(expired_bodies)).state is FindingState.WRONG:
            break
    assert (found.state, found.fix) == (FindingState.WRONG, "psqlmessages prune")
    # In another thread, as a scheduler may call it.
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(pruned, shop, capsys).result()
    assert re.match("emptied tables of expired data: [01]; ended", said)
    assert examined(expired_bodies).state is FindingState.OK
    assert json.loads(pruned(shop, capsys, "--json"))["emptied_tables"] == 0


def test_prune_removes_queues_of_long_ago_that_were_never_used(shop: World, capsys):
    shop.rules("user1 W Queue * RW 5")
    shop.program("user1").ok("queue_listen", "W", "mistyped")
    shop.execute("UPDATE psqlmessages_queue SET awaited_until = now() - interval '9 days'")
    assert "removed unused queues: 1\n" in pruned(shop, capsys)


def test_prune_removes_stream_messages(shop: World, examined: RunCheck, changed: Changed, capsys):
    shop.rules("user1 A Topic STREAM RW 5", "user1 B Topic STREAM RW 5")
    held = "UPDATE messages._stream SET maintained_at = 'infinity'"
    neglected = "UPDATE messages._stream SET maintained_at = now() - interval '1 h'"
    changed(held, neglected)
    program = shop.program("user1")
    program.ok("subscribe", "B", "STREAM", 60)
    program.ok("publish", "A", "STREAM", "x")
    changed(neglected, neglected)
    assert examined(doctor.stream_tables).state is FindingState.OK
    changed(held, neglected)
    program.ok("unsubscribe", "B", "STREAM")
    changed(neglected, neglected)
    found = examined(doctor.stream_tables)
    assert (found.state, found.fix) == (FindingState.WRONG, "psqlmessages prune")
    assert re.match("emptied tables of expired data: [01]; ended", pruned(shop, capsys))
    assert examined(doctor.stream_tables).state is FindingState.OK


def leave_a_transaction_open(shop: World) -> None:
    shop.rules("user1 SITTER Topic T RW 5")
    sitter = shop.node("user1", "SITTER")
    sitter.connection.execute("BEGIN")
    sitter.ok("topic_listen", "T")


def prepare_a_transaction(shop: World) -> None:
    shop.rules("user1 W Queue Q W 5")
    query = "BEGIN; SELECT messages.push('W', 'Q', 'x'); PREPARE TRANSACTION 'forgotten'"
    shop.program("user1").execute(query)


def crash(shop: World) -> None:
    shop.kill(shop.node(Server.owner, "worker", listen="ORDERS"))


def test_prune_ends_dead_sessions(shop: World, capsys):
    shop.rules(f"{Server.owner} worker Topic ORDERS R 60")
    for _ in range(5):
        crash(shop)
        if json.loads(pruned(shop, capsys, "--json"))["ended_sessions"] == 1:
            return
    pytest.fail("prune has not ended the dead session")


def go_back(shop: World) -> None:
    """Leave the functions of an earlier version, and the last migration unapplied."""
    last_but_one = sorted(MIGRATIONS.glob("[0-9]*.py"))[-2].stem
    call_command("migrate", "psqlmessages", last_but_one, verbosity=0)
    shop.execute("COMMENT ON SCHEMA messages IS 'psqlmessages 0123456789abcdef'")


# What is wrong, the check that finds it, and words of what it says.
PROBLEMS: dict[str, tuple[Check, str, Callable[[World], object]]] = {
    "no rules": (
        rules, "there are no rules", lambda shop: shop.execute("DELETE FROM messages.auth")
    ),
    "old functions": (doctor_checks.installed, "functions of another version", go_back),
    "a dead worker": (doctor.dead_nodes, "worker: registered, but the connection", crash),
    "a pooler": (doctor_checks.pooler, "shares connections by transaction", lambda _: None),
    "an open transaction": (
        doctor_checks.open_transactions, "(user1, no name) has been in a transaction",
        leave_a_transaction_open,
    ),
    "a prepared transaction": (
        doctor_checks.open_transactions, "the prepared transaction 'forgotten' of user1 has been",
        prepare_a_transaction,
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_fix_works_as_it_is_printed(shop: World, monkeypatch, problem: str):
    check, words, cause = PROBLEMS[problem]
    # Another test's node may run housekeeping at any time.
    monkeypatch.setattr(doctor, "HOUSEKEEPING_SECONDS", 0)
    monkeypatch.setattr(doctor_checks, "MIN_OPEN_SECONDS", 0)
    with ExitStack() as stack:
        # The superuser sees since when a transaction is open.
        address = shop.server.superuser_url
        if problem == "a pooler":
            address = stack.enter_context(pgbouncer(shop.server, "transaction"))
        elif problem == "no rules":
            address = shop.server.url()
        assert finding_of(check, address).state is FindingState.OK or problem == "a pooler"
        for _ in range(5):
            cause(shop)
            if (found := finding_of(check, address)).state is FindingState.WRONG:
                break
        assert words in found.found
        if "by an alias 'direct' in DATABASES" in found.fix:
            with namespace("direct"), monkeypatch.context() as behind:
                behind.setitem(connection.settings_dict, "PORT", conninfo_to_dict(address)["port"])
                call_command("psqlmessages", "doctor")
        if setting := re.search(r"set pool_mode = (\w+) in pgbouncer.ini", found.fix):
            address = stack.enter_context(pgbouncer(shop.server, setting.group(1)))
        elif command := re.match(r"(?:python manage.py )?((?:migrate )?psqlmessages.+)", found.fix):
            call_command(*shlex.split(command.group(1), comments=True))
        else:
            shop.watcher.connection.execute(found.fix)
        wait_until(lambda: finding_of(check, address).state is FindingState.OK)


def test_rules_of_a_dropped_role_or_its_namesake(shop: World, examined: RunCheck, changed: Changed):
    shop.rules("brief N1 Topic T RW 5", "brief N2 Topic T RW 5")
    assert examined(rules).found == "2 rules name the role brief, which does not exist"
    changed("CREATE ROLE brief", "DROP ROLE brief")
    assert examined(rules).state is FindingState.OK, "a rule may be there before its role"
    shop.execute("UPDATE messages.auth SET role = role WHERE ident = 'N1'")
    shop.watcher.connection.execute("DROP ROLE brief; CREATE ROLE brief")
    found = examined(rules)
    assert found.found == "1 rule names the role brief, which has been dropped and created again"
    shop.execute(found.fix.partition("meant for the new role, ")[2])
    assert examined(rules).state is FindingState.OK
    # As after a dump was restored: the oids are those of another cluster.
    table = "ALTER TABLE psqlmessages_auth"
    changed(f"{table} DISABLE TRIGGER note_role", f"{table} ENABLE TRIGGER note_role")
    shop.execute("UPDATE psqlmessages_auth SET role_identity = '1 2/3'")
    assert examined(rules).state is FindingState.OK


def test_too_old_a_server_and_a_clock_that_differs(examined: RunCheck, monkeypatch):
    monkeypatch.setattr(doctor_checks, "MIN_VERSION", 99)
    found = examined(doctor_checks.server)
    assert found.why == "the functions need PostgreSQL 99 or newer"
    for minutes, word in ((10, "behind"), (-10, "ahead of")):
        elsewhen = datetime.now(UTC) + timedelta(minutes=minutes)
        monkeypatch.setattr(doctor_checks, "datetime", Mock(now=lambda _, at=elsewhen: at))
        found = examined(doctor_checks.clock)
        assert found.state is FindingState.WRONG
        assert f"600 s {word} that of this machine" in found.found


OWNED_BY = "ALTER FUNCTION messages.use(text) OWNER TO"
CREATE = "CREATE ON SCHEMA public"
# A check, the statement that provokes it, the fix, and the text of the finding.
RIGHTS = (
    (owners, f"{OWNED_BY} user1", f"{OWNED_BY} psqlmessages",
     "functions or tables of user1, not of psqlmessages: 1"),
    (owners, "ALTER ROLE psqlmessages SUPERUSER", "ALTER ROLE psqlmessages NOSUPERUSER",
     "the superuser psqlmessages owns the schema messages"),
    (owners, "GRANT psqlmessages TO user2", "REVOKE psqlmessages FROM user2",
     "user2, which rules name, may act as psqlmessages, the owner"),
    (create_rights, f"GRANT {CREATE} TO PUBLIC", f"REVOKE {CREATE} FROM PUBLIC",
     "PUBLIC may create objects in the schema public"),
)  # fmt: skip


def test_too_wide_rights_are_found_and_fixed(shop: World, examined: RunCheck, changed: Changed):
    for check, statement, back, said in RIGHTS:
        changed(statement, back)
        found = examined(check)
        assert (found.found, found.fix.partition(";")[0]) == (said, back)
        shop.watcher.connection.execute(found.fix)
        assert examined(check).state is FindingState.OK
    shop.rules("postgres ROOT Topic ORDERS RW 5")
    assert examined(owners).fix == "ALTER ROLE postgres NOSUPERUSER"
    changed("ALTER SCHEMA messages RENAME TO m", "ALTER SCHEMA m RENAME TO messages")
    changed(f"GRANT {CREATE} TO PUBLIC", f"REVOKE {CREATE} FROM PUBLIC")
    assert examined(create_rights).state is FindingState.WRONG


def test_roles_see_less_and_only_owners_prune(shop: World, examined: RunCheck, monkeypatch, capsys):
    found = examined(expired_bodies, shop.server.url("user1"))
    assert found.found == "role user1 lacks the privileges for this check"
    assert main(["--dsn", shop.server.url("user1"), "doctor"]) == 0
    assert "unknown  owners" in capsys.readouterr().out
    assert main(["--dsn", shop.server.url("user1"), "prune"]) == 1
    assert "role user1 cannot prune" in capsys.readouterr().err
    assert main(["--dsn", shop.server.server.superuser_url(), "prune"]) == 1
    assert "does not exist (run the migrations of psqlmessages" in capsys.readouterr().err
    monkeypatch.setattr(doctor_checks, "MAX_QUEUE_USAGE", 0)
    check = doctor_checks.notification_queue
    assert "no backend has held it back" in examined(check, shop.server.superuser_url).found
    assert "cannot see which" in examined(check).found
