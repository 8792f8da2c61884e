"""Exchange pages: a trial of an element, and the rules that an exchange lacks."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from psqlmessages.admin import calls, history
from psqlmessages.admin.exchange_figures import duration
from psqlmessages.admin.exchange_forms import TrialForm
from psqlmessages.graph import stored
from psqlmessages.graph.entries import MalformedExchanges
from psqlmessages.graph.rights import add_missing_rules, ident_of, lacking
from psqlmessages.graph.trial import Copy, Trial, tried
from psqlmessages.models import Exchange

_OUTCOMES = {
    "no_route": "No destination agrees: it would go to {}.",
    "too_many_hops": "It has made too many hops: it would go to {}, and no selector is asked.",
}


class PagesMixin:
    """The pages try/ and rules/ below an exchange's page."""

    def get_urls(self) -> list[URLPattern]:
        """Return the admin's own addresses, after those of the pages."""
        view = self.admin_site.admin_view
        return [
            path("<int:key>/try/", view(self.trial_view), name="psqlmessages_exchange_try"),
            path("<int:key>/rules/", view(self.rules_view), name="psqlmessages_exchange_rules"),
            *super().get_urls(),
        ]

    def trial_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Take an element that is in no queue, and show where it would go and why."""
        exchange = self._exchange(key)
        if not self.has_view_permission(request, exchange):
            raise PermissionDenied
        form = TrialForm(request.POST or None)
        trial, faults = None, []
        if form.is_valid():
            try:
                compiled = stored.compiled(exchange)
            except MalformedExchanges as error:
                faults = [str(fault) for fault in error.faults]
            else:
                trial = _shown(tried(compiled, form.message(compiled.source)))
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": f"Try {exchange}",
            "opts": self.opts,
            "media": self.media,
            "exchange": exchange,
            "form": form,
            "trial": trial,
            "faults": faults,
        }
        return TemplateResponse(request, "admin/psqlmessages/exchange/try.html", context)

    def rules_view(self, request: HttpRequest, key: int) -> HttpResponse:
        """Add the rules that are missing in this database; each change of rules is logged."""
        exchange = self._exchange(key)
        if request.method != "POST" or not self._may_add_rules(request, exchange):
            raise PermissionDenied
        try:
            added = add_missing_rules(stored.definition(exchange), calls.database())
        except OperationalError as error:
            self.message_user(request, calls.refusal(error), messages.ERROR)
        else:
            history.log(
                request, [(exchange, CHANGE, f"Rule added: {rule.statement}") for rule in added]
            )
            text = f"Added: {len(added)} rule{'' if len(added) == 1 else 's'}."
            self.message_user(request, text, messages.SUCCESS)
        return HttpResponseRedirect(reverse("admin:psqlmessages_exchange_change", args=[key]))

    def rights_context(self, request: HttpRequest, exchange: Exchange) -> dict[str, Any]:
        """Collect what the page says about the rules of the exchange."""
        found = lacking(stored.definition(exchange), calls.database())
        here = [rule for rule in found.rules if rule.namespace == calls.database()]
        return {
            "ident": ident_of(exchange.name),
            "lacking": found.rules,
            "unasked": found.unasked,
            "may_add_rules": bool(here) and self._may_add_rules(request, exchange),
        }

    def _may_add_rules(self, request: HttpRequest, exchange: Exchange) -> bool:
        wanted = ("psqlmessages.add_auth", "psqlmessages.change_auth")
        return self.has_view_permission(request, exchange) and request.user.has_perms(wanted)

    def _exchange(self, key: int) -> Exchange:
        exchange = stored.rows(calls.database()).filter(pk=key).first()
        if exchange is None:
            raise Http404("There is no such exchange.")
        return exchange


def _shown(trial: Trial) -> dict[str, Any]:
    """Turn a trial into what the page shows, all of it text."""
    sentence = _OUTCOMES.get(trial.outcome, "")
    return {
        "sentence": sentence.format(trial.stray.place) if trial.stray else "",
        "stray": trial.stray and _copy(trial.stray),
        "rows": [
            {
                "place": str(asked.place),
                "is_taken": asked.verdict.is_taken,
                "why": asked.verdict.error or asked.verdict.why,
                "took": duration(asked.verdict.seconds),
                "copy": asked.copy and _copy(asked.copy),
            }
            for asked in trial.asked
        ],
    }


def _copy(copy: Copy) -> dict[str, Any]:
    body = copy.body
    return {
        "headers": json.dumps(copy.headers, ensure_ascii=False, indent=1),
        "body": body
        if isinstance(body, str)
        else json.dumps(body, ensure_ascii=False, indent=1, default=repr),
        "options": [
            f"{name}: {value:g} s" if name != "tries" else f"tries: {value}"
            for name in ("delay", "mature", "tries")
            if (value := getattr(copy, name))
        ],
    }
