"""Admin page: open transactions that hold locks on our tables; a button ends a connection."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

import psycopg
from django.contrib import messages
from django.contrib.admin.models import DELETION
from django.core.exceptions import PermissionDenied
from django.db import ProgrammingError, transaction
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin import base
from psqlmessages.admin.base import BaseAdmin
from psqlmessages.admin.queue_elements import VIEW_BODIES
from psqlmessages.models import Session

# A transaction that has been open for less time will most likely commit soon.
_MIN_OPEN_SECONDS = 1


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction that holds locks. A field is None if PostgreSQL hides it from our role.

    ``prepared``: the name of a prepared transaction; ``prepared_literal``: the same, quoted;
    ``waiting``: the number of processes that wait for it.
    """

    pid: int | None
    transaction: str
    prepared: str | None
    prepared_literal: str | None
    role: str | None
    program: str | None
    state: str | None
    began_at: datetime | None
    query: str | None
    waiting: int

    def __str__(self) -> str:
        if self.prepared is not None:
            text = _("prepared transaction {name} of {role}")
            return text.format(name=self.prepared, role=self.role)
        return f"pid {self.pid} ({self.role}, {self.program or _('no application_name')})"


def open_transactions(*, min_seconds: float = 0) -> list[OpenTransaction]:
    """Return the transactions that have been open for at least this time, the oldest first."""
    found = base.fetch_rows(
        "SELECT pid, transaction, prepared, quote_literal(prepared), role, program, state,"
        " began_at, query, waiting"
        " FROM messages._open_transactions()"
        " WHERE coalesce(began_at <= clock_timestamp() - make_interval(secs => %(secs)s),"
        " %(secs)s = 0 OR state IS NULL)",
        {"secs": min_seconds},
    )
    return [OpenTransaction(*row) for row in found]


def warn_of_delays() -> str:
    """Return a warning that open transactions delay events of a change of rules, or ""."""
    ((has_delayed_events,),) = base.fetch_rows(
        "SELECT EXISTS (SELECT FROM messages._unfinished) OR EXISTS (SELECT FROM messages._recheck)"
    )
    if not has_delayed_events or not (holders := open_transactions(min_seconds=_MIN_OPEN_SECONDS)):
        return ""
    names = "; ".join(map(str, holders[:5]))
    return _(
        "The rules apply from now on. But open transactions may delay the events for some nodes,"
        " which are shown as connected until then: {transactions}. See Connected nodes / Open"
        " transactions."
    ).format(transactions=names)


class OpenTransactionsMixin(BaseAdmin):
    """Adds a page with the open transactions, and a button to end their connections."""

    pages: ClassVar = {"open_transactions": "open-transactions/"}

    def has_terminate_permission(self, request: HttpRequest) -> bool:
        """Return whether the user has the permission to end connections."""
        return request.user.has_perm("psqlmessages.terminate_session")

    def open_transactions_view(self, request: HttpRequest) -> HttpResponse:
        """Show the open transactions; end a connection after a confirmation."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = open_transactions()
        chosen = None
        if request.method == "POST":
            if not self.has_terminate_permission(request):
                raise PermissionDenied("psqlmessages.terminate_session")
            key = request.POST.get("pid"), request.POST.get("transaction")
            matching = (each for each in found if (str(each.pid), each.transaction) == key)
            chosen = next(matching, None)
            if chosen is None:
                self.message_user(request, _("This transaction has already ended."), messages.INFO)
            elif "confirmed" in request.POST:
                self._terminate(request, chosen)
            if chosen is None or "confirmed" in request.POST:
                return self.redirect("open_transactions")
        may_see_bodies = request.user.has_perm(VIEW_BODIES)
        return self.page(
            request,
            "client/open_transactions",
            _("End a connection") if chosen else _("Open transactions"),
            transactions=found,
            chosen=chosen,
            may_terminate=self.has_terminate_permission(request),
            # A statement may contain bodies, leases and reply tokens.
            may_see_bodies=may_see_bodies,
            bodies_permission=VIEW_BODIES,
        )

    def _terminate(self, request: HttpRequest, chosen: OpenTransaction) -> None:
        try:
            with transaction.atomic(using=base.database()):
                ((is_ended,),) = base.fetch_rows(
                    "SELECT messages._terminate(%s, %s)", [chosen.pid, chosen.transaction]
                )
        except ProgrammingError as error:
            if not isinstance(cause := error.__cause__, psycopg.errors.InsufficientPrivilege):
                raise
            text = f"{cause.diag.message_primary}. {cause.diag.message_hint or ''}"
            self.message_user(request, _("Not ended: {reason}").format(reason=text), messages.ERROR)
            return
        if not is_ended:
            self.message_user(request, _("This transaction has already ended."), messages.INFO)
            return
        session = Session(id=chosen.pid, pid=chosen.pid, role=chosen.role or "")
        text = f"Ended the connection of {chosen}, in a transaction since {chosen.began_at}."
        base.record_history(request, [(session, DELETION, text)])
        self.message_user(
            request, _("Ended: {connection}.").format(connection=chosen), messages.SUCCESS
        )
