"""Pages of topics; access and template context of all pages of the monitor."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.contrib.messages import get_messages
from django.db import DatabaseError, InterfaceError, OperationalError, connection
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import NoReverseMatch, get_script_prefix, reverse
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from psqlmessages.models import Auth
from psqlmessages.models.names import is_name
from psqlmessages.monitor.access import (
    SEND_TEST_MESSAGES,
    VIEW_BODIES,
    VIEW_MONITOR,
    content_security_policy,
    load_access,
)
from psqlmessages.monitor.listing import FRAGMENT
from psqlmessages.monitor.minutes import history_url
from psqlmessages.monitor.names import ident_pattern

ADD_RULE: Final = "psqlmessages.add_auth"
# The timeout in the monitor's rule has no effect, since observing stores no bodies.
_RULE_TIMEOUT_SECONDS: Final = 60

View = Callable[..., HttpResponse]


def require_monitor_access(view: View) -> View:
    """Restrict a view to users of the monitor; redirect to the login, or answer 403 to other users.

    A request for a fragment gets 401 if the user is logged out, and 503 if the database fails.
    """

    @wraps(view)
    def restricted(request: HttpRequest, *arguments: Any, **keywords: Any) -> HttpResponse:
        try:
            return respond(request, *arguments, **keywords)
        except (OperationalError, InterfaceError):
            if FRAGMENT not in request.GET:
                raise
            return HttpResponse(gettext("PostgreSQL cannot be reached."), status=503)

    def respond(request: HttpRequest, *arguments: Any, **keywords: Any) -> HttpResponse:
        if not request.user.is_authenticated and FRAGMENT in request.GET:
            response = HttpResponse(gettext("You are logged out."), status=401)
        elif not request.user.is_authenticated:
            login_url = find_url("admin:login") or settings.LOGIN_URL
            response = redirect_to_login(request.get_full_path(), login_url)
        elif not load_access(request.user).can_view:
            response = forbidden(request, VIEW_MONITOR)
        else:
            response = view(request, *arguments, **keywords)
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
    name = require_topic_name(name or request.GET.get("name", ""))
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


@require_POST
@require_monitor_access
def add_rule(request: HttpRequest) -> HttpResponse:
    """Add the rule that lets the monitor observe all topics; it takes effect within two seconds."""
    if not request.user.has_perm(ADD_RULE):
        text = gettext("The permission {permission} is missing.").format(permission=ADD_RULE)
        return JsonResponse({"error": text}, status=403)
    with connection.cursor() as cursor:
        cursor.execute("SELECT session_user::text")
        (role,) = cursor.fetchone()
    try:
        rule, is_new = Auth.objects.get_or_create(
            role=role,
            ident=ident_pattern(),
            type=Auth.Type.TOPIC,
            dest="*",
            defaults={"mode": Auth.Mode.OBSERVE, "timeout": _RULE_TIMEOUT_SECONDS},
        )
    except DatabaseError as error:
        return JsonResponse({"error": str(error).strip()}, status=503)
    if is_new:
        _log_added_rule(request, rule)
    elif rule.mode != Auth.Mode.OBSERVE:
        text = gettext("The rule exists with mode {mode}: change its mode to O.")
        text = text.format(mode=rule.mode)
        return JsonResponse({"error": text}, status=409)
    return JsonResponse({"error": ""})


def require_topic_name(name: str) -> str:
    """Return the given topic name; raise Http404 if it is not valid."""
    if not is_name(name) or name.endswith("*"):
        raise Http404("This is not a valid topic name.")
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
        "rule_ident": ident_pattern(),
        "rule_url": admin_page(request, "auth", is_change_page=True),
    }


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
    if not request.user.has_perm(f"psqlmessages.view_{model}"):
        return ""
    if is_change_page:
        return find_url(f"admin:psqlmessages_{model}_change", "0")
    url = find_url(f"admin:psqlmessages_{model}_changelist")
    return f"{url}?{urlencode(query)}" if url and query else url


def find_url(name: str, *arguments: str) -> str:
    """Return the URL of a view, or "" if the project has no such view."""
    try:
        return reverse(name, args=arguments)
    except NoReverseMatch:
        return ""


def _log_added_rule(request: HttpRequest, rule: Auth) -> None:
    """Add an entry to the rule's history in the admin, if the project uses the admin."""
    if not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import ADDITION, LogEntry

    LogEntry.objects.log_actions(
        request.user.pk, [rule], ADDITION, [{"added": {}}], single_object=True
    )
