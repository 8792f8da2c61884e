"""Pages of the example project: a two-minute introduction, and a small chat."""

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
    """Show the introduction, with links."""
    key = {field: BOARD_RULE[field] for field in ("role", "ident", "type", "dest")}
    rule = Auth.objects.filter(**key).first()
    return render(
        request,
        "index.html",
        {
            "rule": BOARD_RULE,
            "rule_exists": rule is not None,
            "rule_url": _rule_form_url(rule),
            "topic_url": reverse("psqlmessages:monitor_topic", args=[BOARD_RULE["dest"]]),
        },
    )


def _rule_form_url(rule: Auth | None) -> str:
    """Return the URL of the rule's form, or of a filled-in form that adds the deleted rule."""
    if rule is not None:
        return reverse("admin:psqlmessages_auth_change", args=[rule.pk])
    return f"{reverse('admin:psqlmessages_auth_add')}?{urlencode(BOARD_RULE)}"


@never_cache
@login_required
def chat(request: HttpRequest) -> HttpResponse:
    """Show the chat. The script chat.js connects as one of the user's nodes."""
    return render(request, "chat.html", {"topic": CHAT_TOPIC})
