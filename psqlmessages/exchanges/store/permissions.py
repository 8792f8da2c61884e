"""Missing rules of exchanges, in each database that they use."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, NamedTuple

import psycopg
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, transaction
from psycopg import sql
from psycopg.conninfo import make_conninfo

from psqlmessages.exchanges.store.definitions import DefinedExchange, namespace_error
from psqlmessages.models import Auth
from psqlmessages.orm import dsn
from psqlmessages.retry import error_line

logger = logging.getLogger("psqlmessages")

# A rule must have a timeout, which has no effect for a queue.
_RULE_SECONDS = 60
_CONNECT_SECONDS = 3
_REPORT_SECONDS = 10.0
_ANSWER = "SET statement_timeout = '5s'"
_RIGHTS = """
    SELECT session_user::text, wanted.ident, wanted.queue, coalesce(rights.can_read, false),
           coalesce(rights.can_write, false), own.mode
    FROM unnest(%(idents)s::text[], %(queues)s::text[]) AS wanted (ident, queue)
    CROSS JOIN LATERAL messages._rights(session_user, wanted.ident, 'Queue', wanted.queue)
        AS rights
    LEFT JOIN messages.auth AS own
        ON own.role = session_user AND own.ident = wanted.ident
        AND own.type = 'Queue' AND own.dest = wanted.queue
    ORDER BY wanted.ident, wanted.queue
"""


class MissingRule(NamedTuple):
    """The namespace in which a rule is missing, and the statement that adds it."""

    namespace: str
    statement: str


class MissingRuleLog:
    """Logs the missing rules of an exchange, each once."""

    def __init__(self) -> None:
        self._reported: set[MissingRule] = set()
        self._next_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the last report is long enough ago for another one."""
        return monotonic() >= self._next_at

    def report(self, exchange: DefinedExchange, using: str) -> None:
        """Log the rules that are missing and were not at the last report."""
        self._next_at = monotonic() + _REPORT_SECONDS
        missing = set(missing_rules(exchange, using))
        for rule in sorted(missing - self._reported):
            logger.warning(
                "exchange %s: a rule is missing in database %s. Add it with: %s",
                exchange.name, *rule,
            )  # fmt: skip
        self._reported = missing


class MissingRules(NamedTuple):
    """The missing rules, and the namespaces that could not be queried, with the reason."""

    rules: list[MissingRule]
    unasked: dict[str, str]


@dataclass(frozen=True)
class _MissingPermission:
    """A rule to add, or an existing rule whose mode must be extended."""

    role: str
    ident: str
    queue: str
    mode: str
    is_there: bool

    @property
    def statement(self) -> str:
        if self.is_there:
            text = (
                "UPDATE messages.auth SET mode = {mode} WHERE role = {role} AND ident = {ident}"
                " AND type = 'Queue' AND dest = {queue};"
            )
        else:
            text = (
                "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES"
                " ({role}, {ident}, 'Queue', {queue}, {mode}, {seconds});"
            )
        values = {name: sql.Literal(value) for name, value in asdict(self).items()}
        return sql.SQL(text).format(**values, seconds=sql.Literal(_RULE_SECONDS)).as_string()


def ident_of(exchange: str) -> str:
    """Return the node name of an exchange."""
    return f"exchange.{exchange}"


def missing_rules(exchange: DefinedExchange, using: str = DEFAULT_DB_ALIAS) -> list[MissingRule]:
    """List the missing rules of the databases that answer: see `lacking_together`."""
    return lacking(exchange, using).rules


def lacking(exchange: DefinedExchange, using: str = DEFAULT_DB_ALIAS) -> MissingRules:
    """Return the missing rules of one exchange: see `lacking_together`."""
    return lacking_together([exchange], using)


def lacking_together(
    exchanges: Sequence[DefinedExchange], using: str = DEFAULT_DB_ALIAS
) -> MissingRules:
    """Return the rules that are missing for the role of Django's connection in each namespace.

    `using` is the alias that the exchanges are read from. It is queried on Django's connection,
    within its transaction. Other databases are queried on separate connections with timeouts of
    a few seconds, so that an unreachable database causes little delay.
    """
    found = MissingRules([], {})
    places = {place for exchange in exchanges for place in exchange.places}
    for namespace in sorted({place.namespace for place in places}):
        try:
            lacks = list(_lacks(exchanges, namespace, using))
        except (DatabaseError, psycopg.Error) as error:
            found.unasked[namespace] = error_line(error)
        else:
            found.rules.extend(MissingRule(namespace, lack.statement) for lack in lacks)
    return found


def add_missing_rules(
    exchange: DefinedExchange, using: str = DEFAULT_DB_ALIAS
) -> list[MissingRule]:
    """Add the rules that are missing in this database; return them.

    The rules of other databases are left to their administrators. Raise OperationalError if rules
    cannot be changed now.
    """
    added = []
    with transaction.atomic(using=using):
        for lack in _lacks([exchange], using, using):
            Auth.objects.using(using).update_or_create(
                role=lack.role,
                ident=lack.ident,
                type=Auth.Type.QUEUE,
                dest=lack.queue,
                defaults={"mode": lack.mode},
                create_defaults={"mode": lack.mode, "timeout": _RULE_SECONDS},
            )
            added.append(MissingRule(using, lack.statement))
    return added


def _lacks(
    exchanges: Iterable[DefinedExchange], namespace: str, using: str
) -> Iterator[_MissingPermission]:
    wanted = _wanted(exchanges, namespace)
    if not wanted:
        return
    idents, queues = map(list, zip(*wanted, strict=True))
    parameters = {"idents": idents, "queues": queues}
    for role, ident, queue, can_read, can_write, own in _rows(namespace, using, parameters):
        modes = wanted[ident, queue]
        if modes <= {mode for mode, may in (("R", can_read), ("W", can_write)) if may}:
            continue
        together = modes | set(own or "")
        mode = "RW" if len(together) > 1 else "".join(together)
        yield _MissingPermission(role, ident, queue, mode, own is not None)


def _wanted(
    exchanges: Iterable[DefinedExchange], namespace: str
) -> dict[tuple[str, str], set[str]]:
    """Return the modes that each node name and queue of a namespace needs."""
    wanted: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for exchange in exchanges:
        ident = ident_of(exchange.name)
        targets = [(destination.place, "W") for destination in exchange.destinations]
        for place, mode in ((exchange.source, "R"), *targets):
            if place.namespace == namespace:
                wanted[ident, place.queue].add(mode)
    return wanted


def _rows(namespace: str, using: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    if problem := namespace_error(namespace):
        raise DatabaseError(problem)
    if namespace == using:
        # A savepoint: an error here does not abort the surrounding transaction.
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(_RIGHTS, parameters)
            return cursor.fetchall()
    info = make_conninfo(dsn(namespace), connect_timeout=_CONNECT_SECONDS)
    with psycopg.connect(info) as connection:
        connection.execute(_ANSWER)
        return connection.execute(_RIGHTS, parameters).fetchall()
