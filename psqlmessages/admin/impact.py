"""Impact of a rule change: nodes that it disconnected, and nodes that it applies to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from django.contrib import messages
from django.contrib.postgres.fields import ArrayField
from django.db.models import F, Func, QuerySet, TextField, Value
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from psqlmessages.admin import base, open_transactions
from psqlmessages.models import Client, Membership, Observation
from psqlmessages.models.names import isolate, list_names

_MAX_NAMES = 20
_ENDED_TEXTS = {
    "": _("{node} is disconnected"),
    Membership.Kind.LISTEN: _("{node} no longer listens to {topic}"),
    Membership.Kind.NOTIFY: _("{node} no longer sends to {topic}"),
    "observe": _("{node} no longer observes {topic}"),
}

# Client id, ident, kind and topic of a membership or observation. Kind and topic are empty for the
# registration of a node.
Activity = tuple[int, str, str, str]


class RuleImpact:
    """Collects the impact of all changes of one request, within their transaction.

    ``ended``: sentences about activities that have ended; ``idents``: connected nodes that the new
    rules apply to; ``remarks``: warnings.
    """

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.idents: set[str] = set()
        self.remarks: list[str] = []
        self.is_changed = False

    @contextmanager
    def compare(self, idents: Iterable[str]) -> Iterator[None]:
        """Compare the nodes of these idents and patterns before and after the body of `with`."""
        # Unless `lock_rules` skips its second lock, nodes cannot register, disconnect or change
        # topics between the two reads.
        base.lock_rules()
        nodes = list(_find_nodes(list(set(idents))))
        before = _read_activities(nodes)
        yield
        self.is_changed = True
        self.ended += _describe_ended(before, _read_activities(nodes))

    def add_connected_nodes(self, rule_ids: Iterable[int]) -> None:
        """Add the connected nodes that these rules apply to now."""
        ((nodes,),) = base.fetch_rows("SELECT messages._nodes_of_rules(%s)", [list(rule_ids)])
        clients = Client.objects.using(base.database()).filter(id__in=nodes)
        self.idents |= set(_connected(clients).values_list("ident", flat=True))

    def messages(self) -> Iterator[tuple[int, str]]:
        """Yield levels and texts to show to the user; nothing if no rule was changed."""
        if not self.is_changed:
            return
        if self.ended:
            ended = list_names(self.ended, _MAX_NAMES, "; ")
            yield messages.WARNING, _("Immediately: {changes}.").format(changes=ended)
        if self.idents:
            text = ngettext(
                "Applies to the connected node {nodes}.",
                "Applies to the connected nodes {nodes}.",
                len(self.idents),
            )
            idents = list_names(sorted(self.idents), _MAX_NAMES)
            yield messages.INFO, text.format(nodes=idents)
        if not self.ended and not self.idents:
            yield messages.INFO, _("No connected node is affected.")
        for remark in self.remarks:
            yield messages.WARNING, remark
        if warning := open_transactions.describe_delays():
            yield messages.WARNING, warning


def list_affected_nodes(rule_ids: Iterable[int]) -> str:
    """List, as text, the connected nodes that these rules apply to now; "" if there are none."""
    impact = RuleImpact()
    impact.add_connected_nodes(rule_ids)
    return list_names(sorted(impact.idents), _MAX_NAMES)


def _find_nodes(idents: list[str]) -> QuerySet[Client, int]:
    """Return the ids of the connected nodes that rules with these idents may affect."""
    patterns = Func(F("ident"), function="messages._patterns", output_field=ArrayField(TextField()))
    clients = Client.objects.using(base.database()).annotate(patterns=patterns)
    return _connected(clients.filter(patterns__overlap=idents)).values_list("id", flat=True)


def _connected(clients: QuerySet[Client]) -> QuerySet[Client]:
    return clients.filter(session__in=base.LIVE_SESSIONS).order_by()


def _read_activities(nodes: list[int]) -> set[Activity]:
    using = base.database()
    clients = Client.objects.using(using).filter(id__in=nodes).order_by()
    memberships = Membership.objects.using(using).filter(client__in=nodes)
    observations = Observation.objects.using(using).filter(client__in=nodes)
    return {
        *((client, ident, "", "") for client, ident in clients.values_list("id", "ident")),
        *memberships.values_list("client", "client__ident", "kind", "topic__name"),
        *observations.values_list("client", "client__ident", Value("observe"), "pattern"),
    }


def _describe_ended(before: set[Activity], after: set[Activity]) -> list[str]:
    """Describe the ended activities, sorted; of a disconnected node, only the disconnection."""
    ended = sorted(before - after, key=lambda activity: activity[1:])
    disconnected = {client for client, _ident, kind, _topic in ended if not kind}
    return [
        _ENDED_TEXTS[kind].format(node=isolate(ident), topic=isolate(topic))
        for client, ident, kind, topic in ended
        if not kind or client not in disconnected
    ]
