"""What the doctor asks of server and connection: version, digest, clock, listening, pooler."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from time import monotonic

from psycopg import sql

from psqlmessages.client.pooling import Pooling, connect, probe
from psqlmessages.commands.doctor_findings import INSTALL, MIGRATE, Finding, Patient, State
from psqlmessages.scripts import LEAST_VERSION, MIGRATIONS, digest

CLOCK_SECONDS = 5.0
LISTEN_SECONDS = 3.0


def server(patient: Patient) -> Iterator[Finding]:
    """Tell which server it is, and whether it is new enough."""
    text = str(patient.value("SELECT version()"))
    name = " ".join(text.split()[:2])
    version = int(patient.value("SELECT current_setting('server_version_num')"))
    if name.startswith("PostgreSQL") and version >= LEAST_VERSION * 10_000:
        yield Finding("server", State.OK, name)
        return
    yield Finding(
        "server",
        State.WRONG,
        name,
        f"the functions need PostgreSQL {LEAST_VERSION} or newer",
        f"upgrade the server: pg_upgrade to PostgreSQL {LEAST_VERSION} or newer",
    )


def installed(patient: Patient) -> Iterator[Finding]:
    """Compare the digest of the installed functions with this package's."""
    comment = patient.value("SELECT obj_description(to_regnamespace('messages'), 'pg_namespace')")
    found = str(comment or "").removeprefix("psqlmessages ")
    if found == digest():
        yield Finding("installed", State.OK, f"the functions of this version ({found})")
        return
    is_recorded = not _unapplied(patient)
    cure = INSTALL if is_recorded else MIGRATE
    if not found:
        recorded = ", although Django's migrations are recorded as applied" if is_recorded else ""
        yield Finding(
            "installed",
            State.WRONG,
            f"the schema messages is not there{recorded}",
            "nothing can be sent or received in this database",
            cure,
        )
        return
    yield Finding(
        "installed",
        State.WRONG,
        f"functions of another version: {found}, this package has {digest()}",
        "calls may fail or behave differently than this version documents",
        f"{cure} (or use the version of psqlmessages that the database has)",
    )


def _unapplied(patient: Patient) -> bool:
    """Return whether a migration of this package has yet to be applied to the database."""
    if patient.value("SELECT to_regclass('django_migrations')") is None:
        return True
    applied = patient.rows("SELECT name FROM django_migrations WHERE app = 'psqlmessages'")
    written = {path.stem for path in MIGRATIONS.glob("[0-9]*.py")}
    return not written <= {name for (name,) in applied}


def clock(patient: Patient) -> Iterator[Finding]:
    """Compare the server's clock with this machine's."""
    before = datetime.now(UTC)
    there = datetime.fromtimestamp(
        float(patient.value("SELECT extract(epoch FROM clock_timestamp())")), UTC
    )
    here = before + (datetime.now(UTC) - before) / 2
    ahead = (there - here).total_seconds()
    if abs(ahead) < CLOCK_SECONDS:
        yield Finding("clock", State.OK, f"the server's differs by {ahead:+.3f} s")
        return
    yield Finding(
        "clock",
        State.WRONG,
        f"the server's is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} ours",
        "bodies expire by the server's clock, and logs of the two cannot be compared",
        "timedatectl set-ntp true (on the machine whose clock is wrong)",
    )


def listening(patient: Patient) -> Iterator[Finding]:
    """Notify one connection from another, and see whether it arrives."""
    channel = f"doctor_{secrets.token_hex(8)}"
    with connect(patient.dsn) as listener, connect(patient.dsn) as sender:
        listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        began = monotonic()
        sender.execute("SELECT pg_notify(%s, '')", (channel,))
        arrived = list(listener.notifies(timeout=LISTEN_SECONDS, stop_after=1))
        took = monotonic() - began
        listener.execute("UNLISTEN *")
    if arrived:
        yield Finding("listening", State.OK, f"a notification arrived after {took * 1000:.1f} ms")
        return
    yield Finding(
        "listening",
        State.WRONG,
        f"a notification did not arrive within {LISTEN_SECONDS:g} s",
        "nodes on this connection receive nothing",
        "connect nodes to PostgreSQL itself, or through a pooler with pool_mode = session",
    )


def pooler(patient: Patient) -> Iterator[Finding]:
    """Find out whether backends are shared between clients."""
    found = probe(patient.dsn)
    if found is Pooling.NONE:
        yield Finding("pooler", State.OK, "none in between")
    elif found is Pooling.SESSION:
        yield Finding("pooler", State.OK, "one that gives each client its own session")
    else:
        yield Finding(
            "pooler",
            State.WRONG,
            f"one that shares connections by {found.value}",
            "a node lives on one connection: it would lose its registration and its messages"
            " (topic_send_as, and send in Django, work all the same)",
            "connect nodes to PostgreSQL itself, or set pool_mode = session in pgbouncer.ini",
        )
