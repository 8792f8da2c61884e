"""The pages of the example project: what to do in two minutes, and a small chat."""

from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache

from project.example import BOARD_RULE, CHAT_TOPIC
from psqlmessages.models import Auth


@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """Say what there is to see, with links."""
    rule = Auth.objects.filter(**_board_rule("role", "ident", "type", "dest")).first()
    return render(
        request,
        "index.html",
        {
            "rule": BOARD_RULE,
            "is_rule_there": rule is not None,
            "rule_url": _change_url(rule) if rule is not None else _add_url(),
            "topic_url": reverse("psqlmessages:monitor_topic", args=[BOARD_RULE["dest"]]),
        },
    )


def _board_rule(*fields: str) -> dict[str, Any]:
    return {field: BOARD_RULE[field] for field in fields}


def _change_url(rule: Auth) -> str:
    return reverse("admin:psqlmessages_auth_change", args=[rule.pk])


def _add_url() -> str:
    """Lead to the form that adds the rule again, filled in."""
    return f"{reverse('admin:psqlmessages_auth_add')}?{urlencode(BOARD_RULE)}"


@never_cache
@login_required
def chat(request: HttpRequest) -> HttpResponse:
    """Show the room; the page itself connects as a node of the user's, see chat.js."""
    return render(request, "chat.html", {"topic": CHAT_TOPIC})
