"""Pages of nodes: all connected nodes, and one node with its topics, queues, streams and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_safe

from psqlmessages.models.names import is_name, patterns
from psqlmessages.monitor.formats import format_age, rule_statement
from psqlmessages.monitor.listing import (
    PAGE_SIZE,
    Column,
    ListDefinition,
    ListPage,
    ListQuery,
    check_parameters,
    fetch,
    read_shared,
    render_page,
)
from psqlmessages.monitor.stream_status import SubscriptionStatus, read_subscriptions
from psqlmessages.monitor.views import admin_page, common_context, require_monitor_access

# The page of a node shows at most this number of entries of each kind.
_MAX_NAMES: Final = 100

# The list

_LIST: Final = ListDefinition(
    "nodes",
    gettext_lazy("Nodes"),
    (
        Column(gettext_lazy("Node"), "node"),
        Column(gettext_lazy("State")),
        Column(gettext_lazy("Role"), "role", "wide"),
        Column(gettext_lazy("Sends to"), kind="number wide"),
        Column(gettext_lazy("Listens to"), kind="number wide"),
        Column(gettext_lazy("Observes"), kind="number wide"),
        Column(gettext_lazy("Session"), "session", "number wide"),
        Column(gettext_lazy("Since"), "since"),
    ),
    "node",
    {
        "state": {
            "connected": gettext_lazy("connected"),
            "closed": gettext_lazy("closed"),
        }
    },
)
_ORDERS: Final[Mapping[str, str]] = {
    "node": "c.ident",
    "role": "c.role",
    "session": "s.pid",
    "since": "c.connected_at",
}


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A registered node, with the numbers of its topics and observed patterns."""

    id: int
    name: str
    role: str
    since: datetime
    pid: int
    is_connected: bool
    sent_topics: int
    listened_topics: int
    observed_patterns: int


@require_safe
@require_monitor_access
def nodes(request: HttpRequest) -> HttpResponse:
    """Show the registered nodes, or the node in ``?name=``."""
    if "name" in request.GET:
        return node(request)
    return _LIST.render(request, "nodes", _read_page, common_context(request))


def _read_page(query: ListQuery) -> ListPage:
    direction = "DESC" if query.is_descending else "ASC"
    statement = f"""
        WITH live AS MATERIALIZED (SELECT messages._live_sessions() AS id),
        page AS MATERIALIZED (
            SELECT c.id, c.ident::text, c.role::text, c.connected_at, s.pid,
                s.id IN (SELECT l.id FROM live AS l) AS is_connected,
                count(*) OVER () AS total,
                row_number() OVER (ORDER BY {_ORDERS[query.column]} {direction}, c.ident) AS number
            FROM psqlmessages_client AS c
            JOIN psqlmessages_session AS s ON s.id = c.session_id
            WHERE (%(search)s = '' OR strpos(lower(c.ident), lower(%(search)s)) > 0
                   OR strpos(lower(c.role), lower(%(search)s)) > 0)
              AND (%(state)s = ''
                   OR (%(state)s = 'connected') = (s.id IN (SELECT l.id FROM live AS l)))
            ORDER BY number LIMIT %(size)s OFFSET %(offset)s
        )
        SELECT p.total, p.id, p.ident, p.role, p.connected_at, p.pid, p.is_connected,
            (SELECT count(*) FROM psqlmessages_membership AS m
             WHERE m.client_id = p.id AND m.kind = 'notify'),
            (SELECT count(*) FROM psqlmessages_membership AS m
             WHERE m.client_id = p.id AND m.kind = 'listen'),
            (SELECT count(*) FROM psqlmessages_observation AS o WHERE o.client_id = p.id)
        FROM page AS p ORDER BY p.number
    """  # noqa: S608 - built from constants
    parameters = {
        "search": query.search,
        "state": query.chosen["state"],
        "size": PAGE_SIZE,
        "offset": query.offset,
    }
    rows = fetch(statement, parameters)
    return ListPage(query, [NodeRow(*row[1:]) for row in rows], rows[0][0] if rows else 0)


# One node


@dataclass(frozen=True, slots=True)
class NodeConnection:
    """The session of a node. The fields from ``program`` on are None if they are unknown.

    ``neighbours``: other nodes of the session. ``transaction_seconds``: age of its transaction.
    """

    id: int
    role: str
    since: datetime
    pid: int
    is_connected: bool
    neighbours: list[str]
    program: str | None
    address: str | None
    state: str | None
    transaction_seconds: float | None

    @property
    def transaction_text(self) -> str:
        """The age of the open transaction, as text."""
        seconds = self.transaction_seconds
        return "" if seconds is None else format_age(timedelta(seconds=seconds))


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Status of a node. ``connection`` is None if the node is not registered.

    ``sends`` and ``listens`` are topics, ``queues`` those in the node's rules.
    """

    connection: NodeConnection | None
    sends: list[str] = field(default_factory=list)
    listens: list[str] = field(default_factory=list)
    observes: list[str] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    subscriptions: list[SubscriptionStatus] = field(default_factory=list)
    rules: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)


_CONNECTION_QUERY: Final = f"""
    SELECT c.id, c.role::text, c.connected_at, s.pid,
        s.id IN (SELECT messages._live_sessions()),
        ARRAY(
            SELECT o.ident::text FROM psqlmessages_client AS o
            WHERE o.session_id = c.session_id AND o.id <> c.id ORDER BY o.ident LIMIT {_MAX_NAMES}
        ),
        a.application_name, host(a.client_addr), a.state,
        extract(epoch FROM statement_timestamp() - a.xact_start)::float8
    FROM psqlmessages_client AS c
    JOIN psqlmessages_session AS s ON s.id = c.session_id
    -- Another backend may have got the pid of a lost session.
    LEFT JOIN pg_stat_get_activity(s.pid) AS a ON s.id IN (SELECT messages._live_sessions())
    WHERE c.ident = %s
"""  # noqa: S608 - built from constants
_TOPICS_QUERY: Final = f"""
    SELECT t.name::text FROM psqlmessages_membership AS m
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id
    WHERE m.client_id = %s AND m.kind = %s ORDER BY t.name LIMIT {_MAX_NAMES}
"""  # noqa: S608
_PATTERNS_QUERY: Final = f"""
    SELECT o.pattern::text FROM psqlmessages_observation AS o
    WHERE o.client_id = %s ORDER BY o.pattern LIMIT {_MAX_NAMES}
"""  # noqa: S608
_RULES_QUERY: Final = f"""
    SELECT a.id, a.role::text, a.ident::text, a.type::text, a.dest::text, a.mode::text, a.timeout
    FROM psqlmessages_auth AS a WHERE a.ident = ANY (%s)
    ORDER BY a.type, a.dest, a.ident, a.role LIMIT {_MAX_NAMES}
"""  # noqa: S608
_QUEUES_QUERY: Final = f"""
    SELECT q.name::text FROM psqlmessages_queue AS q
    WHERE NOT q.is_removed AND q.id IN (
        SELECT messages._queues_like(a.dest) FROM psqlmessages_auth AS a
        WHERE a.ident = ANY (%s) AND a.type = 'Queue'
    )
    ORDER BY q.name LIMIT {_MAX_NAMES}
"""  # noqa: S608
_REFUSED_QUERY: Final = f"""
    SELECT r.type::text, r.dest::text, r.mode::text, r.count, r.first_at, r.last_at
    FROM psqlmessages_refusedcall AS r
    WHERE r.ident = %s ORDER BY r.last_at DESC, r.id LIMIT {_MAX_NAMES}
"""  # noqa: S608
_REFUSED_NAMES: Final = ("type", "dest", "mode", "count", "first_at", "last_at")
_RULE_NAMES: Final = ("id", "role", "ident", "type", "dest", "mode", "timeout")


@require_safe
@require_monitor_access
def node(request: HttpRequest, name: str = "") -> HttpResponse:
    """Show one node, also if it is not connected."""
    check_parameters(request, ["name"])
    name = name or request.GET.get("name", "")
    if not is_name(name) or name.endswith("*"):
        raise Http404("This is not a valid node name.")
    status = read_shared(("node", name), lambda: _read_node(name))
    if not (status.connection or status.rules or status.subscriptions or status.refused):
        raise Http404("This node is not registered, and has no rule, subscription or refused call.")
    context = {
        **common_context(request),
        "node": name,
        "status": status,
        "max_names": _MAX_NAMES,
        "admin_nodes_url": admin_page(request, "client", {"q": name}),
        "admin_rules_url": admin_page(request, "auth", {"q": name}),
    }
    fragments = {"node": "psqlmessages/monitor/_node.html"}
    return render_page(request, "psqlmessages/monitor/node.html", fragments, context)


def _read_node(name: str) -> NodeStatus:
    rows = fetch(_CONNECTION_QUERY, [name])
    connection = NodeConnection(*rows[0]) if rows else None
    names = patterns(name)
    status = NodeStatus(
        connection,
        queues=_first_column(fetch(_QUEUES_QUERY, [names])),
        subscriptions=read_subscriptions(node=name)[0],
        rules=[dict(zip(_RULE_NAMES, row, strict=True)) for row in fetch(_RULES_QUERY, [names])],
        refused=[_describe_refused(name, row) for row in fetch(_REFUSED_QUERY, [name])],
    )
    if connection is not None:
        for kind, topics in (("notify", status.sends), ("listen", status.listens)):
            topics.extend(_first_column(fetch(_TOPICS_QUERY, [connection.id, kind])))
        status.observes.extend(_first_column(fetch(_PATTERNS_QUERY, [connection.id])))
    return status


def _describe_refused(name: str, row: tuple[Any, ...]) -> dict[str, Any]:
    values = dict(zip(_REFUSED_NAMES, row, strict=True))
    statement = rule_statement(name, values["type"], values["dest"], values["mode"])
    return {**values, "statement": statement}


def _first_column(rows: list[tuple[Any, ...]]) -> list[str]:
    return [row[0] for row in rows]
