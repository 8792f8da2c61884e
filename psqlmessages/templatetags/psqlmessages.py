"""Template tags and filters: the common navigation, URLs of pages, durations and counts."""

from __future__ import annotations

from typing import Any, Final

from django import template
from django.utils.translation import gettext_lazy as _

from psqlmessages.monitor import formats, names
from psqlmessages.monitor.access import load_access
from psqlmessages.orm import with_zone

register = template.Library()
register.filter(formats.format_age)
register.filter(formats.format_count)
register.filter(with_zone)

# Each page: its label, the name of its URL, and the names of the URLs of its subpages.
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
)


@register.inclusion_tag("psqlmessages/navigation.html", takes_context=True)
def navigation(context: template.Context) -> dict[str, Any]:
    """Show links to the pages of the monitor, to the admin and to the page of the API.

    The monitor is linked if the user has its permission, the admin if the user is a staff user.
    A page without a URL is not linked.
    """
    request = context["request"]
    match = request.resolver_match
    url_name = match.url_name if match else ""
    namespace = match.namespace if match else ""
    may_view_monitor = load_access(request.user).can_view
    entries = [
        (label, f"psqlmessages:{name}", _aria_current(url_name == name, url_name in subpages))
        for label, name, subpages in (_MONITOR if may_view_monitor else ())
    ]
    if request.user.is_staff:
        is_admin = namespace == "admin"
        entries.append((_("Admin"), "admin:index", _aria_current(url_name == "index", is_admin)))
    entries.append(
        ("API", "psqlmessages:api:openapi-view", _aria_current(url_name == "openapi-view"))
    )
    links = [(label, names.find_url(name), current) for label, name, current in entries]
    return {"links": [link for link in links if link[1]]}


def _aria_current(is_page: bool, is_subpage: bool = False) -> str:
    """Return the value of ``aria-current``; "" for a link to a page that is not open."""
    return "page" if is_page else "true" if is_subpage else ""


@register.filter
def object_url(name: str, kind: str) -> str:
    """Return the URL of the page of an object: ``{{ name|object_url:"node" }}``."""
    return names.object_url(kind, name)
