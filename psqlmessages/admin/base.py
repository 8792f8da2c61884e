"""Shared parts of the admin: SQL calls, filters, history entries, warnings."""

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
    """The lock that a request takes before it reads rules to change them.

    After one timeout the request does not wait for it again.
    """

    @cached_property
    def problem(self) -> str:
        """Take the lock until the end of the transaction: "" or the error text."""
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
    """Return the text of a transient error from PostgreSQL; re-raise any other error."""
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
    """Block other changes of rules until this transaction ends; wait up to 10 s for the lock.

    Also blocks changes of state, unless open transactions have already made one.
    """
    rows("SELECT messages._lock_rules()")


def live_sessions() -> list[int]:
    """Return the sessions whose connection is open."""
    return [session for (session,) in rows("SELECT messages._live_sessions()")]


def clients_of(rules: Iterable[int]) -> list[int]:
    """Return the registrations that rules apply to."""
    return rows("SELECT messages._nodes_of_rules(%s)", [list(rules)])[0][0]


def patterns(name: str) -> list[str]:
    """Return the name and the patterns by which a rule can match it."""
    return rows("SELECT messages._patterns(%s)", [name])[0][0]


def missing_roles(roles: Iterable[str]) -> list[str]:
    """Return the roles that do not exist in PostgreSQL."""
    found = rows(
        "SELECT DISTINCT g.role FROM unnest(%s::text[]) AS g (role)"
        " WHERE g.role NOT IN (SELECT r.rolname::text FROM pg_roles AS r) ORDER BY g.role",
        [list(roles)],
    )
    return [role for (role,) in found]


def bound_waits() -> None:
    """Limit each lock wait to 10 s until the transaction ends."""
    rows("SELECT set_config('lock_timeout', %s, true)", [_PATIENCE])


def disconnect(client: int) -> bool:
    """Disconnect a node with the event `disconnect`; False if it is not registered.

    Raises OperationalError if a change of rules holds the lock for 10 s.
    """
    with transaction.atomic(using=database()):
        bound_waits()
        found = rows(
            "SELECT messages._disconnect(c.ident) FROM psqlmessages_client AS c WHERE c.id = %s",
            [client],
        )
        return bool(found and found[0][0])


def evaluate() -> None:
    """Run housekeeping: find nodes whose connection has ended, and report their crash."""
    rows("SELECT messages.evaluate()")


def execute(statement: str) -> None:
    """Run a statement without parameters and without a result."""
    with connections[database()].cursor() as cursor:
        cursor.execute(statement)


def rows(statement: str, parameters: Parameters = None) -> list[tuple[Any, ...]]:
    """Run a statement in the database that holds the rules; return all rows."""
    with connections[database()].cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()


# Filters of long lists, limited to the most frequent values of a field

_SHOWN = 20


class _FrequentValues(SimpleListFilter):
    """The values with the most rows; the search finds the others."""

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin) -> list[tuple[str, str]]:
        """Return the most frequent values, and always the chosen one."""
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


# Lock timeouts of a save


class HeldUpMixin:
    """Reports lock timeouts: nodes lock the rows of queues and topics until they commit."""

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show or save one object; report a save that fails because of a lock."""
        try:
            return super().changeform_view(request, *args, **kwargs)
        except OperationalError as error:
            if request.method != "POST":
                raise
            self.message_user(request, refusal(error), messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())


# Entries in the admin's history

_BATCH = 1000


def log(request: HttpRequest, entries: Iterable[tuple[Model, int, str]]) -> None:
    """Write an entry for each object, action flag and text, in few statements."""
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
    """Describe the changes of a form: each field with its old and new value."""
    return "; ".join(
        f"{form.fields[name].label or name}: {form.initial.get(name)} → {_shown(form, name)}"
        for name in form.changed_data
    )


def _shown(form: ModelForm, name: str) -> Any:
    value = form.cleaned_data.get(name)
    return value.pk if isinstance(value, Model) else value


# Warnings about values that are saved, but probably not intended


def remarks_of(rules: Iterable[RuleEntry]) -> list[str]:
    """Return the warnings about rules, without duplicates."""
    rules = list(rules)
    sentences = [
        f"PostgreSQL has no role {role}: the rule has no effect until the role exists."
        for role in missing_roles(rule.role for rule in rules)
    ]
    return list(dict.fromkeys([*sentences, *(text for rule in rules for text in rule.remarks())]))
