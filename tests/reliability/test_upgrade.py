"""Upgrades and steps back: functions are replaced under traffic, removed and made again."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from itertools import islice, product
from typing import Any

import dj_database_url
import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.timezone import now
from psycopg import sql

from psqlmessages import Node, schema
from psqlmessages.exceptions import MessagesError, NotInitialized
from psqlmessages.models import PipelineJob, Traffic, WebIdentity
from psqlmessages.sql import MIGRATIONS
from tests.client.nodes import next_message
from tests.conftest import TestedServer
from tests.exchanges.conftest import namespace
from tests.reliability.counts import report, size
from tests.reliability.deployment import EXCHANGE, run_deployment, write_exchange
from tests.reliability.faults import count_logged
from tests.reliability.workload import BY_CLIENTS, LIVE, LOSSLESS, Workload
from tests.sql.conftest import World
from tests.sql.public import FUNCTIONS
from tests.sql.simultaneous import in_background

FAULT = "an upgrade"
ALIAS, LATEST = "upgraded", max(path.stem for path in MIGRATIONS.glob("0*.py"))
SOON = timedelta(seconds=20)
TABLES = r"""
    SELECT c.oid::regclass::text FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
      AND (c.relnamespace = to_regnamespace('messages') OR c.relname LIKE 'psqlmessages\_%')
"""

Contents = dict[str, list[str]]


@pytest.fixture
def database(own_server: TestedServer, django_db_blocker) -> Iterator[BaseDatabaseWrapper]:
    """The database of the module's own server, as Django names it for a while."""
    with django_db_blocker.unblock(), namespace(ALIAS, **dj_database_url.parse(own_server.url())):
        yield connections[ALIAS]


def migrate(name: str) -> None:
    call_command("migrate", "psqlmessages", name, database=ALIAS, verbosity=0)


def contents(database: BaseDatabaseWrapper) -> Contents:
    with database.cursor() as cursor:
        cursor.execute(TABLES)
        found: Contents = {}
        for (table,) in cursor.fetchall():
            cursor.execute(sql.SQL("SELECT t::text FROM {} AS t ORDER BY 1").format(sql.SQL(table)))
            found[table] = [row for (row,) in cursor.fetchall()]
    return found


BACKLOG = 10
RELATIONS = """
    SELECT c.oid, c.oid::regclass::text FROM pg_class AS c
    WHERE c.oid >= 16384 AND c.relkind IN ('r', 'p', 'S', 'v')
      -- A sequence of an identity column is locked after its table by everybody.
      AND NOT (c.relkind = 'S' AND EXISTS (
          SELECT FROM pg_depend AS d
          WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'i'
      ))
"""
# Other lock modes block no call.
LOCKED = """
    SELECT l.relation FROM pg_locks AS l
    WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.mode = ANY (%s)
"""
MODES = {
    "shared": ["ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"],
    "alone": ["AccessExclusiveLock"],
}


def remove(database: BaseDatabaseWrapper) -> None:
    with database.cursor() as cursor:
        for statement in schema.removal_statements():
            cursor.execute(statement)


UP_TO_DATE = import_module("psqlmessages.migrations.0010_bring_up_to_date").TABLES
ACTS: dict[str, tuple[str, Callable[[BaseDatabaseWrapper], None]]] = {
    "install": ("some", schema.install),
    "remove": ("all", remove),
    "bring up to date": ("some", lambda database: database.cursor().execute(UP_TO_DATE)),
}


def test_removed_functions_come_back_and_gaps_show(own_world: World, database: BaseDatabaseWrapper):
    own_world.rules("user1 PUB Topic T W 10", "user2 SUB Topic T R 10", "user1 PUB Queue Q RW 1")
    publisher, reader = own_world.program("user1"), own_world.program("user2")
    reader.read("SUB", "T")
    for number in range(2 * BACKLOG):
        publisher.ok("publish", "PUB", "T", str(number))
    assert len(reader.got("SUB", "T", 60, BACKLOG)) == BACKLOG
    publisher.ok("push", "PUB", "Q", "kept")
    before = contents(database)
    migrate("0002_queues")
    migrate(LATEST)
    after = contents(database)
    for name in ("auth", "topic", "element", "queue"):
        assert after[f"psqlmessages_{name}"] == before[f"psqlmessages_{name}"]
    assert not after["psqlmessages_streammessage"]
    publisher.ok("publish", "PUB", "T", "after")
    assert reader.got("SUB", "T") == ["after"]
    assert reader.ok("subscription", "SUB", "T")["Recovered"] is False
    report(FAULT, "functions removed and installed again", missed=BACKLOG, not_reported=0)


def replace(database: BaseDatabaseWrapper, work: Workload, rounds: int) -> None:
    for _ in range(rounds):
        with transaction.atomic(using=ALIAS):
            schema.install(database)
        work.wait_for_writes(20)


def test_calls_wait_while_functions_are_replaced(own_world: World, database: BaseDatabaseWrapper):
    rounds, before = size(2, 10), count_logged(own_world.server)
    with Workload(own_world, *LOSSLESS, *LIVE) as work:
        work.wait_for_writes(20)
        replace(database, work, rounds)
    work.report(
        FAULT, "functions replaced while streams, queues and live messages are in use",
        installations=rounds, refused=work.refused.total(),
        longest_wait_seconds=work.longest_seconds,
    )  # fmt: skip
    assert not work.refused
    assert count_logged(own_world.server) == before


@pytest.mark.nightly  # eight processes start; every day the test above
@pytest.mark.timeout(300)
def test_upgrades_stop_no_client(own_world: World, database: BaseDatabaseWrapper, tmp_path_factory):
    before, rounds, removals = count_logged(own_world.server), size(2, 20), size(1, 5)
    with run_deployment(own_world.server, tmp_path_factory.mktemp("site")) as made:
        made.use_everything("before")
        with Workload(own_world, *BY_CLIENTS, tolerates=(MessagesError,)) as work:
            replace(database, work, rounds)
            refused, longest = work.refused.total(), work.longest_seconds
            # Large bodies are stored in tables that are removed with the functions.
            work.large_bodies_percent = 0
            work.wait_for_writes(100)
            for _ in range(removals):
                migrate("0002_queues")
                migrate(LATEST)
                # The exchange and the user's identity were removed.
                made.write_definitions()
                work.wait_for_writes(20)
        made.use_everything("after")
    streams = [each for each in work.readers if not each.queue and not each.is_live]
    missed = sum(len(work.missing(each)) for each in streams)
    others = {each.name: len(work.missing(each)) for each in work.readers if each not in streams}
    doubled = sum(work.duplicates(each) for each in work.readers if not each.may_repeat)
    report(
        FAULT,
        "functions replaced, removed and installed again while 36 nodes, an exchange, `run` and a"
        " site are running",
        installations=rounds, refused_during_installations=refused, longest_wait_seconds=longest,
        removals=removals, refused=work.refused.total(), messages=work.counts()["messages"],
        lost=sum(others.values()), duplicated=doubled,
        deadlocks=count_logged(own_world.server) - before,
        stream_messages_lost_without_notice=0 if work.has_reported_gap else missed,
    )  # fmt: skip
    assert refused == 0
    assert others == dict.fromkeys(others, 0)
    assert (doubled, count_logged(own_world.server) - before) == (0, 0)
    assert work.has_reported_gap or not missed


def test_locks_that_calls_wait_for_are_taken_first(own_world: World, database: BaseDatabaseWrapper):
    """If a migration took a lock later, calls that hold it would cause a deadlock."""
    later: dict[tuple[str, str], set[str]] = {}
    for (name, (which, act)), (kind, modes) in product(ACTS.items(), MODES.items()):
        database.set_autocommit(False)
        with database.cursor() as cursor:
            cursor.execute(RELATIONS)
            there = dict(cursor.fetchall())
            schema.prepare_tables(cursor, which)
            first = locked(cursor, modes)
            act(database)
            found = (locked(cursor, modes) - first) & there.keys()
        database.rollback()
        database.set_autocommit(True)
        assert first
        later[name, kind] = {there[oid] for oid in found}
    assert later == {key: set() for key in product(ACTS, MODES)}


def locked(cursor: Any, modes: list[str]) -> set[int]:
    cursor.execute(LOCKED, [modes])
    return {oid for (oid,) in cursor.fetchall()}


# The tables that docs/how-to/upgrade.md lists as removed.
REMOVED = {
    "0017_rule_timeout": {"psqlmessages_refusedcall"},
    "0014_exchange_no_route": {
        "psqlmessages_historyperiod", "psqlmessages_queueminute", "psqlmessages_topicminute",
    },
    "0005_exchanges": {"psqlmessages_traffic", "psqlmessages_pipelinejob"},
    "0004_web": {
        "psqlmessages_exchange", "psqlmessages_destination", "psqlmessages_exchangecount",
    },
    "0003_sql": {"psqlmessages_webidentity"},
    "0002_queues": {
        "psqlmessages_streammessage", "psqlmessages_body", "messages._batch", "messages.staged",
        "messages._secret", "messages._settings", "messages._rules_lock", "messages._rules",
        "messages._housekeeping_request", "messages._recheck", "messages._unfinished",
        "messages._queues", "messages._role_memberships", "messages._stream",
        "messages._last_removed_message", "messages._removed_topic", "messages._clock_gap",
        "messages._scan_start",
    },
    "0001_initial": {
        "psqlmessages_queue", "psqlmessages_element", "psqlmessages_elementkey",
        "psqlmessages_queuecount",
    },
    "zero": {
        "psqlmessages_auth", "psqlmessages_topic", "psqlmessages_session", "psqlmessages_client",
        "psqlmessages_membership", "psqlmessages_observation", "psqlmessages_subscription",
    },
}  # fmt: skip
# Tables that calls change all the time.
MOVING = {
    "psqlmessages_subscription", "messages._queues", "messages._stream", "messages._clock_gap",
}  # fmt: skip
STAGE = """
    INSERT INTO messages.staged (staging, place, bodies) VALUES (gen_random_uuid(), 1, '{"a"}');
    INSERT INTO messages._batch (role, query, batch) VALUES ('user1', gen_random_uuid()::text, 1)
"""
COUNTS = "SELECT row_to_json(q)::text FROM messages.queues AS q"


def fill(world: World) -> None:
    write_exchange(world.server, "ship", EXCHANGE)
    user, _ = User.objects.using(ALIAS).get_or_create(username="wanda")
    WebIdentity.objects.using(ALIAS).get_or_create(user=user, ident="wanda")
    PipelineJob.objects.using(ALIAS).get_or_create(name="job", state="running")
    figures = ("size_p50", "size_p95", "size_p99", "latency_p50", "latency_p95", "latency_p99")
    Traffic.objects.using(ALIAS).create(
        topic="T", sender="N", window_seconds=10, starts_at=now(), count=1, bytes=1,
        **dict.fromkeys(figures, 1.0),
    )  # fmt: skip
    world.owner.connection.execute(STAGE)
    publisher = world.program("user1")
    read_and_keep(world)
    publisher.ok("publish", "PUB", "NEWS", "kept")
    publisher.ok("topic_send_as", "PUB", "T", "x" * 20_000)
    publisher.ok("push", "PUB", "Q", "kept", None, None, None, None, 0, "key")
    publisher.ok("push", "PUB", "Q", "taken")


def read_and_keep(world: World) -> None:
    """Read as SUB; KEEPER reads nothing, so that no message is removed."""
    reader = world.program("user2")
    if not world.owner.query("SELECT count(*) FROM messages.stream_subscriptions"):
        reader.read("KEEPER", "NEWS", 3_600)
    reader.read("SUB", "NEWS")


def revert_and_migrate(state: str, world: World, database: BaseDatabaseWrapper) -> int:
    """Migrate back to a state and forward again; return how many rows that removed."""
    before, queues = contents(database), world.owner.query(COUNTS)
    migrate(state)
    gone = contents(database)
    states = list(REMOVED)
    removed = set[str]().union(*(REMOVED[step] for step in states[: states.index(state) + 1]))
    assert before.keys() - gone.keys() == removed
    migrate(LATEST)
    after = contents(database)
    assert before.keys() == after.keys()
    for name in gone.keys() - MOVING:
        assert before[name] == after[name], name
        # Columns of exchanges are removed.
        assert gone[name] == before[name] or name.startswith("psqlmessages_exchange"), name
    if state not in ("0001_initial", "zero"):
        assert world.owner.query(COUNTS) == queues
    return sum(len(rows) for name, rows in before.items() if name not in gone)


def hear(node: Node, word: str) -> None:
    for message in node.messages(timeout=SOON):
        assert message.event != "reconnected"
        if message.body == word:
            return
    raise AssertionError(f"no node received {word}")


@pytest.mark.nightly  # every migration back and forward; every day those of functions
@pytest.mark.timeout(300)
def test_each_step_back_and_forward_again_works(own_world: World, database: BaseDatabaseWrapper):
    rules = ("user1 SYNC Topic T RW 60", "user1 PUB Topic * W 60")
    own_world.rules(
        *rules, "user2 SUB Topic NEWS R 60", "user2 KEEPER Topic NEWS R 60",
        "user1 PUB Queue Q RW 60",
    )  # fmt: skip
    removed = {}
    with Node("SYNC", own_world.server.url("user1")) as node:
        node.topic_listen("T")
        read_and_keep(own_world)
        own_world.program("user1").ok("publish", "PUB", "NEWS", "that there is the topic")
        for state in REMOVED:
            fill(own_world)
            hear(node, "x" * 20_000)
            removed[state] = revert_and_migrate(state, own_world, database)
            if state != "zero":
                own_world.program("user1").ok("topic_send_as", "PUB", "T", f"after {state}")
                hear(node, f"after {state}")
        own_world.rules(*rules)
        with pytest.raises(NotInitialized):
            node.topic_listen("T")
        with Node("SYNC", own_world.server.url("user1")) as other:
            assert other.topic_listen("T")
    report(
        FAULT, "each migration reverted and applied again while a node is connected",
        steps=len(removed), rows_removed_as_documented=sum(removed.values()), other_rows_removed=0,
        nodes_ended=0,
    )  # fmt: skip


RULES = (
    "user1 ONE Topic T RW 60", "user2 TWO Topic T RW 60", "user2 TWO Rpc ONE W 60",
    "user1 ONE Topic NEWS RW 3600", "user2 TWO Topic NEWS R 3600", "user2 TWO Queue Q RW 60",
)  # fmt: skip
JSON_FUNCTIONS = """
    SELECT p.oid::regprocedure::text, p.proname, pg_get_function_arguments(p.oid),
           ARRAY(SELECT '$' || n FROM generate_series(1, p.pronargs) AS n)
    FROM pg_proc AS p
    WHERE p.pronamespace = 'messages'::regnamespace AND p.proname = ANY (%s)
      AND p.prorettype = 'json'::regtype AND NOT p.proretset AND p.provariadic = 0
"""
# Each answer has one more field, each function one more parameter, and there is one more error.
NEWER = """
    ALTER FUNCTION {signature} SET SCHEMA older;
    CREATE FUNCTION messages.{name}({arguments}newer text DEFAULT NULL) RETURNS json
    LANGUAGE sql AS $newer$
        SELECT CASE WHEN {first}::text = 'NEWER' THEN '{{"Err": 999, "Errstr": "newer"}}'::json
               ELSE (older.{name}({values})::jsonb || '{{"Newer": {{"a": [1]}}}}')::json END
    $newer$;
    GRANT EXECUTE ON FUNCTION {newer} TO PUBLIC
"""


def newer_of(signature: str) -> str:
    return signature.removesuffix(")") + ("text)" if signature.endswith("()") else ",text)")


@pytest.fixture
def newer(own_world: World) -> Iterator[World]:
    own_world.rules(*RULES)
    connection, owner = own_world.superuser().connection, own_world.server.server.owner
    connection.execute(
        f"CREATE SCHEMA older AUTHORIZATION {owner}; SET ROLE {owner};"
        " GRANT USAGE ON SCHEMA older TO PUBLIC"
    )
    functions = connection.execute(JSON_FUNCTIONS, [FUNCTIONS]).fetchall()
    for signature, name, arguments, values in functions:
        connection.execute(NEWER.format(
            signature=signature, name=name, arguments=f"{arguments}, " if arguments else "",
            first=values[0] if values else "''", values=", ".join(values),
            newer=newer_of(signature),
        ))  # fmt: skip
    yield own_world
    for signature, *_ in functions:
        older = signature.replace("messages.", "older.", 1)
        connection.execute(f"DROP FUNCTION {newer_of(signature)}")
        connection.execute(f"ALTER FUNCTION {older} SET SCHEMA messages")
    connection.execute("DROP SCHEMA older; RESET ROLE")


def tell(world: World, ident: str, header: dict[str, object], body: str = "") -> None:
    world.owner.connection.execute(
        "SELECT pg_notify(s.channel, %s) FROM psqlmessages_client AS c"
        " JOIN psqlmessages_session AS s ON s.id = c.session_id WHERE c.ident = %s",
        [json.dumps(header, separators=(",", ":")) + "\n" + body, ident],
    )


def test_a_client_that_is_older_than_the_functions_works_as_before(newer: World):
    url1, url2 = newer.server.url("user1"), newer.server.url("user2")
    with Node("ONE", url1) as one:
        one.topic_listen("T")
        with Node("TWO", url2) as two:
            two.topic_notify("T")
            for number in range(20):
                two.topic_send("T", {"number": number})
            assert [next_message(one).body["number"] for _ in range(20)] == list(range(20))
            with pytest.raises(MessagesError, match="newer"):
                two.topic_send("NEWER", "x")
            tell(newer, "ONE", {"Type": "Newer", "From": "TWO", "Newer": 1})
            tell(newer, "ONE", {"Type": "Event", "Evt": "newer", "Ident": "TWO", "Newer": [1]})
            two.topic_send("T", "x" * 20_000)
            assert next_message(one).body == "x" * 20_000
            assert one.topic_status("T").listeners == ("ONE",)

            one.publish_many("NEWS", range(2))
            news = two.subscribe("NEWS")
            one.publish_many("NEWS", range(2, 5))
            assert [message.body for message in islice(news, 3)] == [2, 3, 4]

            two.push_many("Q", range(3))
            assert two.pop("Q")[0].body == 0
            (kept,) = two.reserve("Q", 1, SOON)
            two.commit(kept)
            assert [element.body for element in two.pop("Q", 5)] == [2]
        one.on_rpc(lambda message: [message.body])
        with in_background(one.run), Node("TWO", url2) as two:
            assert [two.call("ONE", n, timeout=SOON) for n in range(20)] == [[n] for n in range(20)]
            one.stop()
        report(FAULT, "an older client with newer functions", calls=53, failed=0)
