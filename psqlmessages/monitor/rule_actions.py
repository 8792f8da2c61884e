"""Action that adds a missing rule: for the monitor's observing node, or for a refused call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from psqlmessages.models import Auth
from psqlmessages.models.names import isolate
from psqlmessages.monitor.actions import RULE_FIELDS, Action, Fields, perform
from psqlmessages.monitor.views import ADD_RULE, require_monitor_access

_TIMEOUT_SECONDS: Final = 60


def _describe(rule: Auth, _fields: Fields) -> Sequence[str]:
    rule.full_clean()
    text = _("The role {role} may act as the node {node}, with mode {mode} for the {type} {dest}.")
    return (
        text.format(
            role=isolate(rule.role),
            node=isolate(rule.ident),
            mode=rule.mode,
            type=rule.type,
            dest=isolate(rule.dest),
        ),
        _("The rule takes effect immediately, also for connected nodes."),
    )


def _add(rule: Auth, _fields: Fields) -> str:
    rule.full_clean()
    rule.save()
    return _("Added {rule}.").format(rule=rule)


ADD: Final[Action[Auth]] = Action(
    gettext_lazy("Add this rule"), (ADD_RULE,), _describe, _add, is_addition=True
)


@require_POST
@require_monitor_access
def add_rule(request: HttpRequest) -> HttpResponse:
    """Add the posted rule, after a confirmation; then open the page in the field ``back``."""
    values = {name: request.POST.get(name, "") for name in RULE_FIELDS}
    back_url = request.POST.get("back", "")
    if not url_has_allowed_host_and_scheme(back_url, None):
        back_url = reverse("psqlmessages:monitor")
    return perform(request, ADD, Auth(**values, timeout=_TIMEOUT_SECONDS), back_url)
