"""Navigation that all pages share."""

from __future__ import annotations

from typing import Any, Final

from django import template
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext_lazy as _

register = template.Library()

VIEW_MONITOR: Final = "psqlmessages.view_monitor"
# For each page its label, its URL, and the names of the URLs below it.
_MONITOR: Final = (
    (_("Now"), "monitor", ()),
    (_("Topics"), "monitor_topics", ("monitor_topic", "monitor_send")),
    (_("Queues"), "monitor_queues", ("monitor_queue",)),
    (
        _("Streams"),
        "monitor_streams",
        ("monitor_stream", "monitor_stored", "monitor_subscription_action"),
    ),
    (_("Nodes"), "monitor_nodes", ("monitor_node",)),
    (_("Exchanges"), "monitor_exchanges", ()),
    (_("Traffic"), "monitor_traffic", ("monitor_traffic_topic",)),
    (_("Jobs"), "monitor_jobs", ()),
)


@register.inclusion_tag("psqlmessages/navigation.html", takes_context=True)
def navigation(context: template.Context) -> dict[str, Any]:
    """Show links to the pages of the monitor, the admin and the API that the user may open.

    A page without a URL has no link.
    """
    request = context["request"]
    match = request.resolver_match
    url_name = match.url_name if match else ""
    namespace = match.namespace if match else ""
    may_watch = request.user.is_staff and request.user.has_perm(VIEW_MONITOR)
    entries = [
        (label, f"psqlmessages:{name}", _current(url_name == name, url_name in below))
        for label, name, below in (_MONITOR if may_watch else ())
    ]
    if request.user.is_staff:
        is_admin = namespace == "admin"
        entries.append((_("Admin"), "admin:index", _current(url_name == "index", is_admin)))
    entries.append(("API", "psqlmessages:api:openapi-view", _current(url_name == "openapi-view")))
    links = [(label, _find_url(name), current) for label, name, current in entries]
    return {"links": [link for link in links if link[1]]}


def _current(is_page: bool, is_below: bool = False) -> str:
    """Return the value of ``aria-current``."""
    return "page" if is_page else "true" if is_below else ""


def _find_url(name: str) -> str:
    try:
        return reverse(name)
    except NoReverseMatch:
        return ""
