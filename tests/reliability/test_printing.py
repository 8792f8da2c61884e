"""A role makes the server print what its functions do, and no secret of others is in it."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from uuid import UUID

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from tests.reliability.counts import report, size
from tests.reliability.marked_data import MARK, MarkedData, fill_stores
from tests.sql.conftest import Program, World
from tests.sql.public import public_functions
from tests.sql.test_hostile_settings import ARGUMENTS

pytestmark = pytest.mark.versions
# Settings of a role that make the server print. Each is tested alone: one may hide another.
PRINTING = (
    "trace_notify", "trace_sort", "debug_print_parse", "debug_print_rewritten", "debug_print_plan",
    "debug_print_raw_parse",
)  # fmt: skip
LEVELS = ("log", "debug1", "debug5")
BEGINNINGS = {
    "autocommit": None,
    "transaction": "SELECT",
    "immediate constraints": "SET CONSTRAINTS ALL IMMEDIATE",
}
# With these arguments the calls succeed, and notify other nodes.
MEANT = ARGUMENTS | {
    "ident": "MAL", "node": "N2", "topic": "T1", "topics": ["T1"], "queue": "Q1", "source": "Q1",
    "client_id": "MAL", "token": "mine", "names": ["*"],
}  # fmt: skip
RULES = ("Topic T1 W 30", "Topic H1 RW 30", "Queue Q1 W 30", "Rpc N2 W 30")


class Printed:
    """Collects the notices of a connection."""

    def __init__(self, program: Program) -> None:
        self.notices: list[str] = []
        program.connection.add_notice_handler(self._note)

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        parts = (notice.message_primary, notice.message_detail, notice.context)
        self.notices.append(compact(" ".join(part for part in parts if part)))

    def secrets(self, secrets: dict[str, str]) -> set[str]:
        """Return the beginnings of notices that contain a secret."""
        return {
            f"{notice[:60]} … {secret}"
            for notice in self.notices
            for form, secret in secrets.items()
            if compact(form) in notice
        }


def compact(text: str) -> str:
    """Remove blanks: printed plans break lines within words and numbers."""
    return "".join(text.split())


def forms(secret: str) -> Iterator[str]:
    """Return a secret as text, and as the bytes of a constant of its type."""
    yield secret
    yield decimals(secret.encode())
    if re.fullmatch(r"[0-9a-f]{128}", secret):
        yield decimals(bytes.fromhex(secret))
    elif re.fullmatch(r"[0-9a-f-]{36}", secret):
        yield decimals(UUID(secret).bytes)


def decimals(data: bytes) -> str:
    """Format bytes as constants of plans: as signed numbers."""
    return " ".join(str(byte - 256 if byte > 127 else byte) for byte in data)


@pytest.fixture
def marked(world: World) -> Iterator[MarkedData]:
    """Data of others in every store; they also listen to what the hostile role may send."""
    with fill_stores(world, *(f"hostile MAL {rule}" for rule in RULES)) as marked:
        world.program("user2").ok("queue_listen", "N2", "Q1")
        yield marked


def call_all(program: Program, world: World, beginning: str | None) -> int:
    """Call every public function as MAL; return how many calls succeeded."""
    functions = public_functions(world)
    last = ["topic_unlisten", "topic_unnotify", "unsubscribe", "crash", "deinit"]
    names = ["init", *sorted(functions.keys() - {"init", *last}), *last]
    done = 0
    with program.connection.transaction() if beginning else nullcontext():
        if beginning:
            program.connection.execute(beginning)
        for name in names:
            arguments = [
                [] if kind == "integer[]" else MEANT[parameter]
                for parameter, kind in functions[name].parameters.items()
            ]
            with program.connection.transaction() if beginning else nullcontext():
                done += program.call(name, *arguments)["Err"] == "0"
                if program.connection.info.transaction_status == TransactionStatus.INERROR:
                    raise psycopg.Rollback
    return done


def test_nothing_that_a_role_lets_the_server_print_holds_a_secret(marked: MarkedData):
    world = marked.world
    names = world.owner.connection.execute(
        "SELECT name FROM pg_settings WHERE name = ANY (%s) ORDER BY 1", [list(PRINTING)]
    ).fetchall()
    levels = {name: LEVELS if name == "trace_notify" else LEVELS[:1] for (name,) in names}
    settings = [(name, level) for name, each in levels.items() for level in each]
    cases = [*product(settings, BEGINNINGS)]
    if not size(0, 1):
        # In the small size, each setting once.
        cases = [(each, [*BEGINNINGS][n % len(BEGINNINGS)]) for n, each in enumerate(settings)]
    leaks: dict[str, set[str]] = {}
    calls = notices = 0
    for (setting, level), mode in cases:
        # A session prints a plan only once.
        program = world.program("hostile", is_fresh=True)
        printed = Printed(program)
        program.connection.execute(f"SET {setting} = on; SET client_min_messages = {level}")
        done = call_all(program, world, BEGINNINGS[mode])
        assert done > 20, f"only {done} calls did something"
        calls += done
        notices += len(printed.notices)
        secrets = {form: each for each in marked.secrets() for form in forms(each)}
        if found := printed.secrets(secrets):
            leaks[f"{setting}, {level}, {mode}"] = found
        program.close()
    report(
        "a hostile role", "settings that make the server print, with calls of every function",
        calls=calls, notices_searched=notices, secrets_found=len(leaks),
    )  # fmt: skip
    assert leaks == {}
    assert notices > 0
    # A superuser prints secrets: they are recognized.
    program = world.superuser()
    printed = Printed(program)
    program.connection.execute("SET debug_print_plan = on; SET client_min_messages = log")
    known = marked.secrets()
    lease = next(each for each in known if re.fullmatch(r"[0-9a-f-]{36}", each))
    pad = next(each for each in known if re.fullmatch(r"[0-9a-f]{128}", each))
    program.connection.execute(f"SELECT '{MARK}'::text, '{lease}'::uuid, '\\x{pad}'::bytea")
    found = printed.secrets({form: each for each in known for form in forms(each)})
    assert {each.partition(" … ")[2] for each in found} == {MARK, lease, pad}


def test_every_function_with_the_rights_of_its_owner_is_silent(world: World):
    off = "SELECT array_agg(name || '=off') FROM pg_settings WHERE name = ANY (%s)"
    known = world.owner.query(off, list(PRINTING))
    talking = world.owner.query(
        "SELECT array_agg(p.oid::regprocedure::text) FROM pg_proc AS p"
        " WHERE p.pronamespace = 'messages'::regnamespace"
        " AND (p.prosecdef OR p.prorettype = 'trigger'::regtype)"
        " AND NOT coalesce(p.proconfig, '{}') @> %s",
        known,
    )
    assert len(known) >= 5
    assert talking is None
