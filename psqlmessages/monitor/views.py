"""Pages of topics; access and template context of all pages of the monitor."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.contrib.messages import get_messages
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import get_script_prefix
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from psqlmessages.models.names import is_name
from psqlmessages.monitor.access import (
    SEND_TEST_MESSAGES,
    VIEW_BODIES,
    VIEW_MONITOR,
    content_security_policy,
    has_admin_permission,
    load_access,
)
from psqlmessages.monitor.listing import FRAGMENT
from psqlmessages.monitor.minutes import history_url
from psqlmessages.monitor.names import find_url, ident_pattern

ADD_RULE: Final = "psqlmessages.add_auth"

View = Callable[..., HttpResponse]


def require_monitor_access(view: View) -> View:
    """Restrict a view to users of the monitor; redirect to the login, or answer 403 to other users.

    A request for a fragment gets 401 if the user is logged out, and 503 if the database fails.
    """

    @wraps(view)
    def restricted(request: HttpRequest, *arguments: Any, **keywords: Any) -> HttpResponse:
        is_fragment = FRAGMENT in request.GET
        try:
            if not request.user.is_authenticated and is_fragment:
                response = HttpResponse(gettext("You are logged out."), status=401)
            elif not request.user.is_authenticated:
                login_url = find_url("admin:login") or settings.LOGIN_URL
                response = redirect_to_login(request.get_full_path(), login_url)
            elif not load_access(request.user).can_view:
                response = forbidden(request, VIEW_MONITOR)
            else:
                response = view(request, *arguments, **keywords)
        except (OperationalError, InterfaceError):
            if not is_fragment:
                raise
            response = HttpResponse(gettext("PostgreSQL cannot be reached."), status=503)
        response.headers["Content-Security-Policy"] = content_security_policy()
        return response

    return never_cache(restricted)


def forbidden(request: HttpRequest, permission: str) -> HttpResponse:
    """Answer 403, and explain which permission is missing."""
    context = {**common_context(request), "permission": permission, "view_monitor": VIEW_MONITOR}
    return render(request, "psqlmessages/monitor/forbidden.html", context, status=403)


@require_safe
@require_monitor_access
def topics(request: HttpRequest) -> HttpResponse:
    """Show the topic list, or the topic in ``?name=``."""
    if "name" in request.GET:
        return topic(request)
    return render(request, "psqlmessages/monitor/topics.html", common_context(request))


@require_safe
@require_monitor_access
def topic(request: HttpRequest, name: str = "") -> HttpResponse:
    """Show one topic. Its name is in the path, or in ``?name=`` if it cannot be part of a path."""
    name = require_name(name or request.GET.get("name", ""))
    context = {
        **common_context(request),
        "topic": name,
        "history_url": history_url("topic", name),
        "admin_topics_url": admin_page(request, "topic", {"q": name}),
        "admin_rules_url": admin_page(request, "auth", {"q": name}),
        "may_send": request.user.has_perm(SEND_TEST_MESSAGES),
        "may_see_bodies": request.user.has_perm(VIEW_BODIES),
        "bodies_permission": VIEW_BODIES,
    }
    return render(request, "psqlmessages/monitor/topic.html", context)


def require_name(name: str) -> str:
    """Return the given name of a topic or node; raise Http404 if it is not valid."""
    if not is_name(name) or name.endswith("*"):
        raise Http404("This is not a valid name.")
    return name


def common_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context that all monitor pages share."""
    return {
        "notices": get_messages(request),
        "socket_path": f"{get_script_prefix()}ws/monitor/",
        "admin_url": find_url("admin:index"),
        "logout_url": find_url("admin:logout") or find_url("logout"),
        "may_add_rule": request.user.has_perm(ADD_RULE),
        "rule_permission": ADD_RULE,
        "observing_rule": {
            # The page inserts the role.
            "role": "", "ident": ident_pattern(), "type": "Topic", "dest": "*", "mode": "O",
            "back": request.get_full_path(),
        },
        "rule_url": admin_page(request, "auth", is_change_page=True),
    }  # fmt: skip


def admin_page(
    request: HttpRequest,
    model: str,
    query: dict[str, str] | None = None,
    *,
    is_change_page: bool = False,
) -> str:
    """Return the URL of a model's list in the admin; "" without permission or without the admin.

    ``is_change_page``: return the URL of the object with key 0 instead; callers replace the 0.
    """
    if not has_admin_permission(request.user, f"psqlmessages.view_{model}"):
        return ""
    if is_change_page:
        return find_url(f"admin:psqlmessages_{model}_change", "0")
    url = find_url(f"admin:psqlmessages_{model}_changelist")
    return f"{url}?{urlencode(query)}" if url and query else url
