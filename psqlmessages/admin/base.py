"""Shared parts of the admin: calls of SQL, filters, history entries, hints."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import psycopg
from django.contrib import messages
from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.db import OperationalError, connections, router, transaction
from django.db.models import Count, Model, QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from psqlmessages.client.calls import is_transient
from psqlmessages.models import Auth
from psqlmessages.rules.document import RuleEntry

_PATIENCE = "10s"

Parameters = list[Any] | dict[str, Any] | None


class RuleLock:
    """What must be closed before rules are looked at that are to be changed.

    Whoever waited for it in vain once does not wait again within the same request.
    """

    @cached_property
    def problem(self) -> str:
        """Close it until the end of the transaction: "" or why it cannot be closed now."""
        try:
            with transaction.atomic(using=database()):
                close_gate()
        except OperationalError as error:
            return refusal(error)
        return ""


def database() -> str:
    """Return the alias of the database that holds the rules."""
    return router.db_for_write(Auth)


def refusal(error: OperationalError) -> str:
    """Return why PostgreSQL refused what may succeed later; raise any other error."""
    cause = error.__cause__
    if not (isinstance(cause, psycopg.Error) and is_transient(cause)):
        raise error
    text = cause.diag.message_primary or str(cause)
    hint = f" {cause.diag.message_hint}" if cause.diag.message_hint else ""
    return f"Nothing was saved: {text}.{hint}"


def role() -> str:
    """Return the role that Django connects as."""
    ((name,),) = rows("SELECT session_user::text")
    return str(name)


def close_gate() -> None:
    """Block other changes of rules until this transaction ends; wait 10 s at most to do so.

    Changes of state are blocked too, unless open transactions have already made one.
    """
    rows("SELECT messages._lock_rules()")


def live_sessions() -> list[int]:
    """Return the sessions whose connection is there."""
    return [session for (session,) in rows("SELECT messages._live_sessions()")]


def clients_of(rules: Iterable[int]) -> list[int]:
    """Return the registrations that rules apply to."""
    return rows("SELECT messages._nodes_of_rules(%s)", [list(rules)])[0][0]


def patterns(name: str) -> list[str]:
    """Return what a rule may hold to match a name."""
    return rows("SELECT messages._patterns(%s)", [name])[0][0]


def missing_roles(roles: Iterable[str]) -> list[str]:
    """Return those of these roles that PostgreSQL does not know."""
    found = rows(
        "SELECT DISTINCT g.role FROM unnest(%s::text[]) AS g (role)"
        " WHERE g.role NOT IN (SELECT r.rolname::text FROM pg_roles AS r) ORDER BY g.role",
        [list(roles)],
    )
    return [role for (role,) in found]


def bound_waits() -> None:
    """Wait 10 s at most for each lock, until the transaction ends."""
    rows("SELECT set_config('lock_timeout', %s, true)", [_PATIENCE])


def disconnect(client: int) -> bool:
    """End a registration, with the event `disconnect`; False where it is no more.

    Raises OperationalError where a change of rules holds it up for 10 s.
    """
    with transaction.atomic(using=database()):
        bound_waits()
        found = rows(
            "SELECT messages._disconnect(c.ident) FROM psqlmessages_client AS c WHERE c.id = %s",
            [client],
        )
        return bool(found and found[0][0])


def evaluate() -> None:
    """Have nodes found whose connection has ended, and their crash told."""
    rows("SELECT messages.evaluate()")


def execute(statement: str) -> None:
    """Run a statement without parameters or rows."""
    with connections[database()].cursor() as cursor:
        cursor.execute(statement)


def rows(statement: str, parameters: Parameters = None) -> list[tuple[Any, ...]]:
    """Run a statement in the database that holds the rules; return all rows."""
    with connections[database()].cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()


# Filters of long lists: the most frequent values of a field, and no more than fit.

_SHOWN = 20


class _FrequentValues(SimpleListFilter):
    """The values with the most rows; what is not among them, the search finds."""

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the values offered, and the chosen one in any case."""
        values = model_admin.model._default_manager.order_by().values_list(self.parameter_name)
        frequent = values.annotate(rows=Count("pk")).order_by("-rows", self.parameter_name)
        found = {value for value, _ in frequent[:_SHOWN]}
        if self.value():
            found.add(self.value())
        return [(value, value) for value in sorted(found)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the rows with the chosen value."""
        return queryset.filter(**{self.parameter_name: self.value()}) if self.value() else queryset


class RoleFilter(_FrequentValues):
    """By role."""

    title = "role"
    parameter_name = "role"


class IdentFilter(_FrequentValues):
    """By ident."""

    title = "ident"
    parameter_name = "ident"


# Held up: a save that waits for somebody else's transaction ends, and says so.


class HeldUpMixin:
    """Waits of a save are bounded: nodes lock the rows of queues and topics until they commit."""

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show or save one object; say why where it cannot be saved now."""
        try:
            return super().changeform_view(request, *args, **kwargs)
        except OperationalError as error:
            if request.method != "POST":
                raise
            self.message_user(request, refusal(error), messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())


# History: what the admin's log says of a change.

_BATCH = 1000


def log(request: HttpRequest, entries: Iterable[tuple[Model, int, str]]) -> None:
    """Write an entry for each object, flag and text, in few statements."""
    LogEntry.objects.bulk_create(
        [
            LogEntry(
                user_id=request.user.pk,
                content_type_id=get_content_type_for_model(impact).pk,
                object_id=impact.pk,
                object_repr=str(impact)[:200],
                action_flag=flag,
                change_message=text,
            )
            for impact, flag, text in entries
        ],
        _BATCH,
    )


def changes(form: ModelForm) -> str:
    """Say what a form changed: each field as it was and as it is."""
    return "; ".join(
        f"{form.fields[name].label or name}: {form.initial.get(name)} → {_shown(form, name)}"
        for name in form.changed_data
    )


def _shown(form: ModelForm, name: str) -> Any:
    value = form.cleaned_data.get(name)
    return value.pk if isinstance(value, Model) else value


# Remarks: what is saved all the same, and hardly meant.


def remarks_of(rules: Iterable[RuleEntry]) -> list[str]:
    """Return the sentences about some rules, each once."""
    rules = list(rules)
    sentences = [
        f"PostgreSQL has no role {role}: a rule for it lets nobody in until the role is made."
        for role in missing_roles(rule.role for rule in rules)
    ]
    return list(dict.fromkeys([*sentences, *(text for rule in rules for text in rule.remarks())]))
