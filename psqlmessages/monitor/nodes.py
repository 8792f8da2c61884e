"""Pages of nodes: all connected nodes, and one node with its topics, queues, streams and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_safe

from psqlmessages.models import Auth, RefusedCall
from psqlmessages.models.names import patterns
from psqlmessages.models.rules import database
from psqlmessages.monitor.formats import allow_command
from psqlmessages.monitor.listing import (
    PAGE_SIZE,
    Column,
    ListDefinition,
    ListPage,
    ListQuery,
    check_parameters,
    fetch,
    limit_query_time,
    read_shared,
    render_page,
)
from psqlmessages.monitor.names import find_url
from psqlmessages.monitor.queries import CALLER_ROLE
from psqlmessages.monitor.stream_status import SubscriptionStatus, read_subscriptions
from psqlmessages.monitor.views import (
    admin_page,
    common_context,
    require_monitor_access,
    require_name,
)

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
    {"connected": gettext_lazy("connected"), "closed": gettext_lazy("connection lost")},
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
    return _LIST.render(request, _read_page, common_context(request))


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
        "state": query.state,
        "size": PAGE_SIZE,
        "offset": query.offset,
    }
    rows = fetch(statement, parameters)
    return ListPage(query, [NodeRow(*row[1:]) for row in rows], rows[0][0] if rows else 0)


# One node


@dataclass(frozen=True, slots=True)
class NodeConnection:
    """A registered node and its session. The fields from ``program`` on are None if unknown.

    ``sends`` and ``listens``: topics. ``observes``: patterns. ``neighbours``: other nodes of the
    session. ``transaction_seconds``: age of the open transaction; None also if none is open.
    """

    role: str
    since: datetime
    pid: int
    is_connected: bool
    sends: list[str]
    listens: list[str]
    observes: list[str]
    neighbours: list[str]
    program: str | None
    address: str | None
    state: str | None
    transaction_seconds: float | None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Status of a node. ``connection`` is None if the node is not registered.

    ``queues``: existing queues that the node's rules allow. ``refused``: refused calls, each with
    the command that adds the missing rule.
    """

    connection: NodeConnection | None
    queues: list[str]
    subscriptions: list[SubscriptionStatus]
    rules: list[Auth]
    refused: list[tuple[RefusedCall, str]]


_TOPICS: Final = f"""ARRAY(
            SELECT t.name::text FROM psqlmessages_membership AS m
            JOIN psqlmessages_topic AS t ON t.id = m.topic_id
            WHERE m.client_id = c.id AND m.kind = '{{}}' ORDER BY t.name LIMIT {_MAX_NAMES}
        )"""  # noqa: S608 - built from constants
_CONNECTION_QUERY: Final = f"""
    SELECT c.role::text, c.connected_at, s.pid, s.id IN (SELECT messages._live_sessions()),
        {_TOPICS.format("notify")}, {_TOPICS.format("listen")},
        ARRAY(
            SELECT o.pattern::text FROM psqlmessages_observation AS o
            WHERE o.client_id = c.id ORDER BY o.pattern LIMIT {_MAX_NAMES}
        ),
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
_QUEUES_QUERY: Final = f"""
    SELECT q.name::text FROM psqlmessages_queue AS q
    WHERE NOT q.is_removed AND q.id IN (
        SELECT messages._queues_like(a.dest) FROM psqlmessages_auth AS a
        WHERE a.ident = ANY (%s) AND a.type = 'Queue'
    )
    ORDER BY q.name LIMIT {_MAX_NAMES}
"""  # noqa: S608
_ROLE_QUERY: Final = f"SELECT {CALLER_ROLE.format('%(ident)s')}"


@require_safe
@require_monitor_access
def node(request: HttpRequest, name: str = "") -> HttpResponse:
    """Show one node, also if it is not connected."""
    check_parameters(request, ["name"])
    name = require_name(name or request.GET.get("name", ""))
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
        "new_rule_url": find_url("admin:psqlmessages_auth_add"),
    }
    fragments = {"node": "psqlmessages/monitor/_node.html"}
    return render_page(request, "psqlmessages/monitor/node.html", fragments, context)


def _read_node(name: str) -> NodeStatus:
    connections = fetch(_CONNECTION_QUERY, [name])
    names, alias = patterns(name), database()
    with transaction.atomic(using=alias):
        limit_query_time()
        rules = Auth.objects.using(alias).filter(ident__in=names)
        refused = RefusedCall.objects.using(alias).filter(ident=name).order_by("-last_at", "id")
        calls = list(refused[:_MAX_NAMES])
        role = fetch(_ROLE_QUERY, {"ident": name})[0][0] if calls else ""
        return NodeStatus(
            NodeConnection(*connections[0]) if connections else None,
            queues=[queue for (queue,) in fetch(_QUEUES_QUERY, [names])],
            subscriptions=read_subscriptions(node=name)[0],
            rules=list(rules[:_MAX_NAMES]),
            refused=[
                (call, allow_command(role, call.ident, call.type, call.dest, call.mode))
                for call in calls
            ],
        )
