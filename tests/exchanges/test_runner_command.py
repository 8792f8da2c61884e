"""manage.py psqlmessages exchange run: a process that routes until it is told to end."""

import signal
import subprocess
from collections.abc import Iterator
from threading import Event
from time import monotonic
from typing import Any

import pytest

from tests.client.proxy import Proxy
from tests.django.processes import start
from tests.exchanges.conftest import TypeIn
from tests.exchanges.field import Field, flow
from tests.reliability.counts import report, size
from tests.sql.conftest import Program

pytestmark = pytest.mark.usefixtures("committing")

# A trigger waits for a lock at each push, so a transaction of the runner stays open.
HOLD = """
    CREATE FUNCTION hold_copies() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
    CREATE TRIGGER hold_copies AFTER INSERT ON psqlmessages_element
    FOR EACH STATEMENT EXECUTE FUNCTION hold_copies();
"""
WAITS = "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def started(field: Field, *names: str, **given: Any) -> tuple[subprocess.Popen[str], str]:
    """Start it; return the process and its first line of output."""
    process = start(field.default.server, "psqlmessages", "exchange", "run", *names, **given)
    return process, process.stderr.readline()


def ended(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return said


@pytest.fixture
def held(committing: None, field: Field) -> Iterator[Program]:
    """A program whose lock delays every push until it is released."""
    field.default.connection.execute(HOLD)
    holder = Program(field.default.server.url())
    holder.query("SELECT pg_advisory_lock(4711)")
    yield holder
    holder.close()
    field.default.connection.execute("DROP FUNCTION hold_copies CASCADE")


def test_it_goes_on_after_a_firewall_forgot_its_connections(field: Field, proxy: Proxy):
    field.define(x1=flow("a", "b"))
    process, _ = started(field, port=proxy.port, ANSWER_SECONDS=size(1, 10))
    proxy.stall(new=True)
    cut_at = monotonic()
    Event().wait(size(1, 15))
    proxy.forget()
    field.define(x2=flow("c", "d"))
    field.default.push_many("c", ["it"] * 5)
    field.until(lambda: len(field.default.bodies("d")) == 5, 90)
    seconds = monotonic() - cut_at
    said = ended(process)
    report(
        "a firewall drops connections", "`exchange run`: time until it routes again",
        seconds=seconds,
    )  # fmt: skip
    assert process.returncode == 0, said
    assert seconds < 60


def test_it_ends_in_time_despite_hung_connections(field: Field, proxy: Proxy):
    field.define(x1=flow("a", "b"))
    process, _ = started(field, port=proxy.port, STOP_SECONDS=2)
    proxy.stall(new=True)
    # It reads the definitions twice a second.
    Event().wait(1)
    began = monotonic()
    said = ended(process)
    assert monotonic() - began < 10
    assert process.returncode == 1, said


def test_without_exchanges_it_waits_for_some(field: Field, type_in: TypeIn):
    process, said = started(field)
    assert said == "running no exchange (define some with exchange load); press Ctrl-C to stop\n"
    field.define(x1=flow("a", "b"))
    assert process.stderr.readline() == "running x1; press Ctrl-C to stop\n"
    ended(process)
    done = type_in("run", "x1", "moon")
    assert (done.returncode, done.stderr) == (1, "psqlmessages: there is no exchange moon\n")


def push_unheld(field: Field, *bodies: str) -> None:
    field.default.connection.execute("ALTER TABLE psqlmessages_element DISABLE TRIGGER hold_copies")
    for body in bodies:
        field.default.push("a", body)
    field.default.connection.execute("ALTER TABLE psqlmessages_element ENABLE TRIGGER hold_copies")


def told_to_end(field: Field, number: int = signal.SIGTERM) -> subprocess.Popen[str]:
    process, _ = started(field)
    field.until(lambda: field.default.query(WAITS))
    process.send_signal(number)
    assert "Stopping after the current batch" in process.stderr.readline()
    return process


def test_a_signal_ends_the_worker_after_the_current_batch(field: Field, held: Program):
    field.define(x1=flow("a", "b", wsize=1))
    push_unheld(field, "current", "too late")
    process = told_to_end(field)
    held.query("SELECT pg_advisory_unlock(4711)")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert (field.default.bodies("a"), field.default.bodies("b")) == (["too late"], ["current"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.usefixtures("held")
def test_a_second_signal_ends_it_and_changes_nothing(field: Field, number: int, code: int):
    field.define(x1=flow("a", "b"))
    push_unheld(field, "it")
    process = told_to_end(field, number)
    ended(process, number)
    assert process.returncode == code
    assert (field.default.bodies("a"), field.default.bodies("b")) == (["it"], [])
