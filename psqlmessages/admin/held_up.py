"""Held up: a save that waits for somebody else's transaction ends, and says so."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from psqlmessages.admin import calls


class HeldUpMixin:
    """Waits of a save are bounded: nodes lock the rows of queues and topics until they commit."""

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show or save one object; say why where it cannot be saved now."""
        try:
            return super().changeform_view(request, *args, **kwargs)
        except OperationalError as error:
            if request.method != "POST":
                raise
            self.message_user(request, calls.refusal(error), messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
