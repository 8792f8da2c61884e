"""Admin page: open transactions that hold locks on our tables; a button ends a connection."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

import psycopg
from django.contrib import messages
from django.contrib.admin.models import DELETION, LogEntry
from django.core.exceptions import PermissionDenied
from django.db import ProgrammingError, router, transaction
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin import base
from psqlmessages.admin.base import BaseAdmin
from psqlmessages.models import Session
from psqlmessages.models.names import isolate, list_names

# Do not warn of younger transactions, because they will probably end soon.
_MIN_OPEN_SECONDS = 1
_MAX_NAMES = 5


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction that holds locks. Fields that PostgreSQL hides from our role are None.

    ``prepared``: the name of a prepared transaction, which has no ``pid``; ``prepared_literal``:
    this name as an SQL literal; ``waiter_count``: number of processes that wait for a lock.
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
    waiter_count: int

    def __str__(self) -> str:
        if self.prepared is not None:
            text = _("prepared transaction {name} of {role}")
            return text.format(name=isolate(self.prepared), role=isolate(self.role))
        program = isolate(self.program) or _("no application_name")
        return f"pid {self.pid} ({isolate(self.role)}, {program})"


def open_transactions(*, min_seconds: float = 0) -> list[OpenTransaction]:
    """Return the transactions open for at least this time, or for an unknown time; oldest first."""
    # If began_at and state are null, PostgreSQL hides them from our role: include the transaction.
    # If only began_at is null, the transaction has just ended.
    rows = base.fetch_rows(
        "SELECT pid, transaction, prepared, quote_literal(prepared), role, program, state,"
        " began_at, query, waiting"
        " FROM messages._open_transactions()"
        " WHERE coalesce(began_at <= clock_timestamp() - make_interval(secs => %(secs)s),"
        " %(secs)s = 0 OR state IS NULL)",
        {"secs": min_seconds},
    )
    return [OpenTransaction(*row) for row in rows]


def describe_delays() -> str:
    """Return a warning if open transactions delay the end of revoked registrations; else "".

    A change of rules ends the registrations and memberships of nodes that no rule allows any
    longer. If a transaction has locked their rows, housekeeping ends them after the transaction.
    """
    ((is_unfinished,),) = base.fetch_rows(
        "SELECT EXISTS (SELECT FROM messages._unfinished) OR EXISTS (SELECT FROM messages._recheck)"
    )
    if not is_unfinished or not (holders := open_transactions(min_seconds=_MIN_OPEN_SECONDS)):
        return ""
    names = list_names(holders, _MAX_NAMES, "; ")
    return _(
        "The rules apply from now on. But some nodes may be shown as connected until these open"
        " transactions end: {transactions}. See Connected nodes / Open transactions."
    ).format(transactions=names)


class OpenTransactionsAdmin(BaseAdmin):
    """Base class with a page of open transactions and buttons that end their connections."""

    pages: ClassVar = {"open_transactions": "open-transactions/"}

    def open_transactions_view(self, request: HttpRequest) -> HttpResponse:
        """Show the open transactions; end the connection of one after a confirmation."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        transactions = open_transactions()
        selected = None
        if request.method == "POST":
            if not request.user.has_perm("psqlmessages.terminate_session"):
                raise PermissionDenied("psqlmessages.terminate_session")
            key = request.POST.get("pid"), request.POST.get("transaction")
            matching = (each for each in transactions if (str(each.pid), each.transaction) == key)
            selected = next(matching, None)
            if selected is None:
                self.message_user(request, _("This transaction has already ended."), messages.INFO)
            elif "confirmed" in request.POST:
                self._terminate(request, selected)
            if selected is None or "confirmed" in request.POST:
                return self.redirect("open_transactions")
        return self.page(
            request,
            "client/open_transactions",
            _("End a connection") if selected else _("Open transactions"),
            transactions=transactions,
            selected=selected,
        )

    def _terminate(self, request: HttpRequest, selected: OpenTransaction) -> None:
        session = Session(id=selected.pid, pid=selected.pid, role=selected.role or "")
        text = f"Ended the connection of {selected}, in a transaction since {selected.began_at}."
        log_database = router.db_for_write(LogEntry)
        try:
            with transaction.atomic(using=log_database):
                # First, because a rollback cannot bring the connection back.
                base.record_history(request, [(session, DELETION, text)])
                ((is_ended,),) = base.fetch_rows(
                    "SELECT messages._terminate(%s, %s)", [selected.pid, selected.transaction]
                )
                if not is_ended:
                    transaction.set_rollback(True, using=log_database)
        except ProgrammingError as error:
            if not isinstance(cause := error.__cause__, psycopg.errors.InsufficientPrivilege):
                raise
            text = f"{cause.diag.message_primary}. {cause.diag.message_hint or ''}"
            self.message_user(request, _("Not ended: {reason}").format(reason=text), messages.ERROR)
            return
        if is_ended:
            text = _("Ended: {connection}.").format(connection=selected)
            self.message_user(request, text, messages.SUCCESS)
        else:
            self.message_user(request, _("This transaction has already ended."), messages.INFO)
