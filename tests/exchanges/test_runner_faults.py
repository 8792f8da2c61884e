"""Faults: a copy that cannot be made holds up itself alone, and is not lost."""

import logging
import re

import pytest

from project.postgres import Server
from psqlmessages.exceptions import ServerUnreachable
from psqlmessages.exchanges.engine.batch import ExchangePlan, RoutedBatch
from psqlmessages.exchanges.engine.counters import ExchangeCounters
from psqlmessages.exchanges.engine.runner import ExchangeLog
from psqlmessages.exchanges.selectors import selector
from psqlmessages.exchanges.store import repository
from psqlmessages.exchanges.store.stats import read_missing_rules
from psqlmessages.models import Exchange, ExchangeCount
from tests.exchanges.conftest import TypeIn
from tests.exchanges.field import Field, flow, working
from tests.sql.conftest import INSERT_RULE

pytestmark = pytest.mark.usefixtures("committing")

DUE = """
    UPDATE psqlmessages_element SET available_at = clock_timestamp()
    WHERE queue_id = (SELECT id FROM psqlmessages_queue WHERE name = %s) RETURNING 1
"""
STATE = """
    SELECT e.tries || ' ' || e.headers || ' ' || e.body FROM psqlmessages_element AS e
    JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = %s
"""


def forbid(field: Field, *allowed: str) -> None:
    field.default.connection.execute("DELETE FROM messages.auth WHERE ident LIKE 'exchange.%'")
    for rule in allowed:
        fields = (Server.owner, "exchange.x1", "Queue", *rule.split(), 60)
        field.default.connection.execute(INSERT_RULE, fields)


def test_a_missing_rule_holds_up_its_copies(field: Field, caplog):
    field.define(x1=flow("a", "b", "c", "b"))
    forbid(field, "a R", "b W")
    field.default.push("a", "it", lane=1)
    with working():
        field.until(lambda: len(field.default.bodies("b")) == 2)
        field.until(lambda: "('psqlmessages', 'exchange.x1', 'Queue', 'c', 'W', 60)" in caplog.text)
    tries, state = field.default.query(STATE, "a").split(" ", 1)
    assert (tries > "0", state) == (True, '{"lane": 1} it')
    forbid(field, "a R", "b W", "c W")
    field.default.query(DUE, "a")
    with working():
        field.until(lambda: field.default.bodies("c"))
    assert [field.default.bodies(queue) for queue in "abc"] == [[], ["it", "it"], ["it"]]
    for outcome, number in (("ok", 1), ("failed", int(tries))):
        assert sum(row.count for row in ExchangeCount.objects.filter(outcome=outcome)) == number


def test_an_exchange_that_lacks_a_rule_is_blocked_until_it_is_added(field: Field, type_in: TypeIn):
    field.define(x1=flow("a", "b", "c"))
    forbid(field, "a R", "b W")
    with working():
        field.until(lambda: "x1 is blocked" in type_in("list").stdout)
        row, sentence = type_in("list").stdout.splitlines()[1:]
        assert row.split()[:3] == ["x1", "blocked", "1"]
        assert ExchangeCount.objects.exclude(failing_since=None).count() == 1
        start = "x1 is blocked: missing rule in default: INSERT INTO messages.auth "
        assert sentence.startswith(start)
        field.default.connection.execute(sentence.split("default: ")[1])
        field.until(lambda: "x1  " in type_in("list").stdout and not read_missing_rules())
        assert type_in("list").stdout.splitlines()[1].split()[:3] == ["x1", "running", "1"]
        assert not ExchangeCount.objects.exclude(failing_since=None)


def test_a_repeatedly_failing_element_becomes_a_dead_letter(field: Field):
    field.define(x1=flow("a", "b", "c"))
    forbid(field, "a R", "b W")
    field.default.push("a", "it", lane=1)
    field.default.connection.execute("UPDATE psqlmessages_queue SET max_tries = 2")
    with working():
        field.until(lambda: field.default.query(DUE, "a") or field.default.bodies("__deadletter__"))
        field.until(lambda: field.default.bodies("__deadletter__"))
    assert field.default.bodies("a") == []
    assert field.default.bodies("b") == ["it"]
    ((body, headers),) = field.default.contents("__deadletter__")
    assert (body, headers["lane"], headers["x-dl-tries"]) == ("it", 1, 2)
    assert "x-hop-count" not in headers


IMPOSSIBLE: list[dict[str, object]] = [
    {"body": "x" * 70_000_000}, {"headers": {"x": "\0"}}, {"headers": {"x": "y" * 70_000}},
    {"body": "a\0b"}, {"body": object()}, {"headers": {"x": float("nan")}},
    {"headers": {"x": "\ud800"}}, {"mature": 1e300},
]  # fmt: skip


def test_a_copy_that_cannot_be_fails_alone(field: Field):
    @selector("impossible")
    def impossible(env: object) -> object:
        number = env.msg.headers.get("bad")
        return True if number is None else IMPOSSIBLE[number]

    field.define(x1=flow("a", "b", "c"))
    Exchange.objects.get().destinations.filter(queue="c").update(selector="@impossible")
    for number in range(len(IMPOSSIBLE)):
        field.default.push("a", str(number))
        field.default.push("a", f"bad {number}", bad=number)
    field.run_until_idle()
    numbers = [str(number) for number in range(len(IMPOSSIBLE))]
    assert sorted(field.default.bodies("b")) == [*numbers, *(f"bad {each}" for each in numbers)]
    assert field.default.bodies("c") == numbers
    # The remaining elements have their headers, and were tried.
    for body, headers in field.default.contents("a"):
        assert body == f"bad {headers['bad']}"
    assert field.default.query(STATE.replace("SELECT", "SELECT e.tries > 0,"), "a")


def test_a_process_fails_after_an_error_until_an_attempt_succeeds(field: Field):
    field.define(x1=flow("a", "b"))
    plan = ExchangePlan.of(repository.compile_exchange(Exchange.objects.get()))
    log = ExchangeLog(plan, ExchangeCounters())
    failed = RoutedBatch(plan, outcome_of={"1": ("ok", 0.0)}, failed={"1"})
    for succeed in (log.on_queue_empty, lambda: log.on_batch_finished(failed, 0.1)):
        log.on_error(ServerUnreachable("down"))
        assert log.is_failing
        succeed()
        assert not log.is_failing, "failed elements wait, and the others are delivered"


def test_an_exchange_fails_while_it_cannot_take_elements(field: Field):
    field.define(x1=flow("a", "b"))
    failing = ExchangeCount.objects.exclude(failing_since=None)
    with working():
        field.default.connection.execute("ALTER FUNCTION messages.take RENAME TO moved")
        try:
            field.until(lambda: field.default.push("a", "it") or failing.exists())
        finally:
            field.default.connection.execute("ALTER FUNCTION messages.moved RENAME TO take")
        field.until(lambda: field.default.bodies("b") and not failing.exists())


def test_failing_selectors_are_logged_once(field: Field, caplog):
    caplog.set_level(logging.WARNING, "psqlmessages")
    failing = "msg.headers.gone == 1"
    field.define(x1=flow("a", ("b", failing), ("d", failing), "c"))
    field.default.push_many("a", ["it"] * 500)
    with working() as thread:
        field.until_idle()
    (tally,) = thread.worker.counter_store.counters.values()
    assert tally.selector_failures == 1000
    logged = [re.findall("default/.", text) for text in caplog.messages]
    assert logged == [["default/b"], ["default/d"]]


@pytest.mark.parametrize("other", ["c", "eu/c"])
def test_an_element_that_fails_its_batch_comes_back_later(wide_field: Field, other: str):
    field = wide_field
    field.define(x1=flow("a", "b", other))
    check = "CONSTRAINT no_hop CHECK (NOT headers ?& '{bad,x-hop-count}')"
    field.default.connection.execute(f"ALTER TABLE psqlmessages_element ADD {check}")
    try:
        bodies = [str(number) for number in range(60)]
        field.default.push_many("a", bodies[:30])
        field.default.push("a", "bad", bad=1)
        field.default.push_many("a", bodies[30:])
        with working():
            field.until_idle()
        assert sorted(field.default.bodies("b"), key=int) == bodies
        assert re.fullmatch(r'[1-9]\d* {"bad": 1} bad', field.default.query(STATE, "a"))
    finally:
        field.default.connection.execute("ALTER TABLE psqlmessages_element DROP CONSTRAINT no_hop")
