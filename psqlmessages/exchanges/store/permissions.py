"""Missing rules of exchanges, in each database that they use."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from time import monotonic
from typing import Any, NamedTuple

import psycopg
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, transaction
from psycopg import sql
from psycopg.conninfo import make_conninfo

from psqlmessages.exceptions import insert_rules
from psqlmessages.exchanges.model import ident_of
from psqlmessages.exchanges.store.definitions import DefinedExchange, namespace_error
from psqlmessages.models import Auth
from psqlmessages.orm import database_dsn
from psqlmessages.retry import error_line

logger = logging.getLogger("psqlmessages")

# A rule must have a timeout, which has no effect for a queue.
_RULE_TIMEOUT_SECONDS = 60
_CONNECT_SECONDS = 3
_CHECK_SECONDS = 5.0
# Limit of the missing rules that are stored for an exchange, which may have 1,000 destinations.
_MAX_DESCRIBED = 20
_LIMIT_QUERY_TIME = "SET statement_timeout = '5s'"
_PERMISSIONS = """
    SELECT session_user::text, needed.ident, needed.queue, coalesce(rights.can_read, false),
           coalesce(rights.can_write, false), rule.mode
    FROM unnest(%(idents)s::text[], %(queues)s::text[]) AS needed (ident, queue)
    CROSS JOIN LATERAL messages._permissions(session_user, needed.ident, 'Queue', needed.queue)
        AS rights
    LEFT JOIN messages.auth AS rule
        ON rule.role = session_user AND rule.ident = needed.ident
        AND rule.type = 'Queue' AND rule.dest = needed.queue
    ORDER BY needed.ident, needed.queue
"""


class MissingRule(NamedTuple):
    """The namespace in which a rule is missing, and the statement that adds or extends the rule."""

    namespace: str
    statement: str

    def __str__(self) -> str:
        return f"{self.namespace}: {self.statement}"


class MissingRuleCheck:
    """Finds the missing rules of an exchange, and logs each rule once while it is missing."""

    def __init__(self) -> None:
        self.rules: set[MissingRule] = set()
        self._next_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last check."""
        return monotonic() >= self._next_at

    def check(self, exchange: DefinedExchange, using: str) -> None:
        """Find the missing rules, and log those that the last check did not find."""
        self._next_at = monotonic() + _CHECK_SECONDS
        result = find_missing_rules([exchange], using)
        # Nothing is known about a database that could not be queried, so keep its missing rules.
        missing = {*result.rules, *(rule for rule in self.rules if rule.namespace in result.errors)}
        for rule in sorted(missing - self.rules):
            logger.warning(
                "exchange %s: a rule is missing in database %s. Add it with: %s",
                exchange.name, *rule,
            )  # fmt: skip
        self.rules = missing

    def describe(self) -> list[str]:
        """Return at most _MAX_DESCRIBED missing rules, as texts."""
        return list(map(str, sorted(self.rules)[:_MAX_DESCRIBED]))


class MissingRules(NamedTuple):
    """The missing rules, and an error for each namespace that could not be queried."""

    rules: list[MissingRule]
    errors: dict[str, str]


class _MissingPermission(NamedTuple):
    """A rule to add, or an existing rule whose mode must be extended."""

    role: str
    ident: str
    queue: str
    mode: str
    has_rule: bool

    @property
    def statement(self) -> str:
        if not self.has_rule:
            return insert_rules((self.role, self.ident, "Queue", self.queue, self.mode)) + ";"
        update = sql.SQL(
            "UPDATE messages.auth SET mode = {mode} WHERE role = {role} AND ident = {ident}"
            " AND type = 'Queue' AND dest = {queue};"
        )
        values = {name: sql.Literal(value) for name, value in self._asdict().items()}
        return update.format(**values).as_string()


def find_missing_rules(
    exchanges: Iterable[DefinedExchange], using: str = DEFAULT_DB_ALIAS
) -> MissingRules:
    """Return the rules that are missing for the role of Django's connection in each namespace.

    The database `using` stores the exchanges. It is queried on Django's connection, within its
    transaction. Other databases are queried on separate connections with timeouts of a few seconds,
    so that an unreachable database causes little delay.
    """
    exchanges = list(exchanges)
    missing = MissingRules([], {})
    for namespace in sorted({queue.namespace for each in exchanges for queue in each.queues}):
        try:
            permissions = _find_missing_permissions(exchanges, namespace, using)
        except (DatabaseError, psycopg.Error) as error:
            missing.errors[namespace] = error_line(error)
        else:
            missing.rules.extend(MissingRule(namespace, each.statement) for each in permissions)
    return missing


def add_missing_rules(
    exchange: DefinedExchange, using: str = DEFAULT_DB_ALIAS
) -> list[MissingRule]:
    """Add the rules that an exchange lacks in the database `using`; return them.

    This does not add rules in other databases. Raise OperationalError if another change of rules
    holds the lock for too long.
    """
    added = []
    with transaction.atomic(using=using):
        for permission in _find_missing_permissions([exchange], using, using):
            Auth.objects.using(using).update_or_create(
                role=permission.role,
                ident=permission.ident,
                type=Auth.Type.QUEUE,
                dest=permission.queue,
                defaults={"mode": permission.mode},
                create_defaults={"mode": permission.mode, "timeout": _RULE_TIMEOUT_SECONDS},
            )
            added.append(MissingRule(using, permission.statement))
    return added


def _find_missing_permissions(
    exchanges: Iterable[DefinedExchange], namespace: str, using: str
) -> list[_MissingPermission]:
    needed = _needed_modes(exchanges, namespace)
    if not needed:
        return []
    idents, queues = map(list, zip(*needed, strict=True))
    rows = _query_permissions(namespace, using, {"idents": idents, "queues": queues})
    missing = []
    for role, ident, queue, can_read, can_write, rule_mode in rows:
        modes = needed[ident, queue]
        is_allowed = ("R" not in modes or can_read) and ("W" not in modes or can_write)
        if not is_allowed:
            modes |= set(rule_mode or "")
            mode = "RW" if len(modes) > 1 else "".join(modes)
            has_rule = rule_mode is not None
            missing.append(_MissingPermission(role, ident, queue, mode, has_rule))
    return missing


def _needed_modes(
    exchanges: Iterable[DefinedExchange], namespace: str
) -> dict[tuple[str, str], set[str]]:
    """Return the modes that are needed in a namespace, for each pair of node name and queue."""
    needed: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for exchange in exchanges:
        ident = ident_of(exchange.name)
        destinations = [(destination.queue, "W") for destination in exchange.destinations]
        for queue, mode in ((exchange.source, "R"), *destinations):
            if queue.namespace == namespace:
                needed[ident, queue.name].add(mode)
    return needed


def _query_permissions(
    namespace: str, using: str, parameters: dict[str, Any]
) -> list[tuple[Any, ...]]:
    if problem := namespace_error(namespace):
        raise DatabaseError(problem)
    if namespace == using:
        # A savepoint: an error here does not abort the surrounding transaction.
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(_PERMISSIONS, parameters)
            return cursor.fetchall()
    info = make_conninfo(database_dsn(namespace), connect_timeout=_CONNECT_SECONDS)
    with psycopg.connect(info) as connection:
        connection.execute(_LIMIT_QUERY_TIME)
        return connection.execute(_PERMISSIONS, parameters).fetchall()
