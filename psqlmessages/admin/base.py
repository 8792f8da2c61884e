"""Shared parts of the admin: base class, columns, SQL calls, history entries, warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, wraps
from typing import Any, ClassVar

import psycopg
from django.contrib import admin, messages
from django.contrib.admin import AdminSite, ModelAdmin, ShowFacets, helpers
from django.contrib.admin.actions import delete_selected
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import Model, QuerySet
from django.db.models.expressions import RawSQL
from django.forms import CharField, Media, ModelForm
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop as noop
from django.views.decorators.cache import never_cache
from django.views.decorators.gzip import gzip_page

from psqlmessages.client.calls import is_transient
from psqlmessages.models import Auth
from psqlmessages.models.rules import database
from psqlmessages.rules.document import RuleEntry

LOCK_TIMEOUT = "10s"
# A list counts and shows at most this number of rows, also of those that a filter or search finds.
MAX_ROWS = 10_000
# The page of a topic or queue shows at most this number of rules.
MAX_RULES = 100
FRAGMENT = "fragment"  # query parameter that asks for a part of a page
# Context of all templates that have actions.
_CONTEXT = {"checkbox": helpers.ACTION_CHECKBOX_NAME}
# Django derives these names from the names of models and fields, and does not translate them.
_NAMES = frozenset((
    noop("bytes"), noop("changed at"), noop("connected at"), noop("dead letter queue"),
    noop("destination"), noop("destinations"), noop("error"), noop("exchange"), noop("exchanges"),
    noop("group"), noop("key timeout"), noop("lag seconds"), noop("last batch"),
    noop("last batch at"), noop("latency p50"), noop("latency p95"), noop("latency p99"),
    noop("listeners"), noop("mode"), noop("name"), noop("namespace"),
    noop("parallel"), noop("pid"), noop("position"), noop("queue"),
    noop("queues"), noop("reserve"), noop("retention"), noop("role"), noop("rows"),
    noop("rows per second"), noop("seen at"), noop("selector"), noop("sender"), noop("session"),
    noop("size p50"), noop("size p95"), noop("size p99"), noop("source queue"),
    noop("started at"), noop("starts at"), noop("state"), noop("subscription"),
    noop("subscriptions"), noop("timeout"), noop("topic"), noop("topics"),
    noop("type"), noop("user"),
))  # fmt: skip
# Labels that differ from the names of the fields.
_LABELS = {"ident": _("node"), "max tries": _("max attempts"), "pinged at": _("last read")}


class BoundedPaginator(Paginator):
    """Pages of the first `MAX_ROWS` rows, because counting all rows would take too long."""

    @cached_property
    def count(self) -> int:
        """The number of rows that the list shows."""
        return min(self._counted, MAX_ROWS)

    @property
    def has_more(self) -> bool:
        """Whether there are rows that the list does not show."""
        return self._counted > MAX_ROWS

    @cached_property
    def _counted(self) -> int:
        return self.object_list.order_by().values("pk")[: MAX_ROWS + 1].count()


class BaseAdmin(ModelAdmin):
    """Base of all our admins.

    ``denied_permissions``: permissions that no user has here, such as "add". ``pages``: the route
    of each further page by its name; the method ``NAME_view`` shows the page. ``fragments``: names
    of the parts of an object's page that a script updates, with the template ``_NAME.html``.
    """

    denied_permissions: ClassVar[tuple[str, ...]] = ()
    pages: ClassVar[dict[str, str]] = {}
    fragments: ClassVar[tuple[str, ...]] = ()
    actions = ("delete_selected",)
    paginator = BoundedPaginator
    list_per_page = 50
    # By default each list and each filter would count all rows.
    show_full_result_count = False
    show_facets = ShowFacets.NEVER

    def __init__(self, model: type[Model], admin_site: AdminSite) -> None:
        super().__init__(model, admin_site)
        for each in (model, *(inline.model for inline in self.inlines)):
            if str(each._meta.verbose_name_plural) in _NAMES:
                each._meta.verbose_name_plural = _(str(each._meta.verbose_name_plural))
            for named in (each._meta, *each._meta.fields):
                name = named.verbose_name
                if name in _NAMES or name in _LABELS:
                    named.verbose_name = _LABELS.get(name) or _(name)

    @property
    def media(self) -> Media:
        """Leave out the scripts for prepopulated fields: compressed, they are 50 kB.

        A project's subclass gets them, because it may have such fields or scripts of its own.
        """
        media = super().media
        if not type(self).__module__.startswith(f"{__package__}."):
            return media
        unused = ("/urlify.js", "/prepopulate.js", "/xregexp")
        return Media(
            js=[each for each in media._js if not any(part in str(each) for part in unused)]
        )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read the database that holds the rules, even if the project reads from a replica."""
        return super().get_queryset(request).using(database())

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may add objects."""
        return "add" not in self.denied_permissions and super().has_add_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may change this object; if it is None, any object."""
        is_denied = "change" in self.denied_permissions
        return not is_denied and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete this object; if it is None, any object."""
        is_denied = "delete" in self.denied_permissions
        return not is_denied and super().has_delete_permission(request, obj)

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs of ``pages`` and of Django's admin, with views that explain errors."""
        prefix = f"{self.opts.app_label}_{self.opts.model_name}"
        view = self.admin_site.admin_view
        own = [
            path(route, view(getattr(self, f"{name}_view")), name=f"{prefix}_{name}")
            for name, route in self.pages.items()
        ]
        patterns = [*own, *super().get_urls()]
        for pattern in patterns:
            pattern.callback = self._explain_errors(pattern.callback)
        return patterns

    def _explain_errors(self, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        """Wrap a view, to explain its errors.

        If a permission is missing, a page names it. If a fragment is requested and PostgreSQL
        cannot be reached, the answer has the status 503.
        """

        @wraps(view)
        def explained(request: HttpRequest, *arguments: Any, **keywords: Any) -> HttpResponse:
            try:
                return view(request, *arguments, **keywords)
            except PermissionDenied as error:
                response = self.page(
                    request,
                    "forbidden",
                    _("You may not do this"),
                    permission=self._find_permission(request, error),
                )
                response.status_code = 403
                return response
            except (OperationalError, InterfaceError):
                if FRAGMENT not in request.GET:
                    raise
                return HttpResponse(_("PostgreSQL cannot be reached."), status=503)

        return explained

    def _find_permission(self, request: HttpRequest, error: PermissionDenied) -> str:
        """Return the permission that the user lacks, or "" if no user can have it."""
        if error.args:
            return str(error.args[0])
        page = request.resolver_match.url_name.rpartition("_")[2]
        action = {"add": "add", "delete": "delete"}.get(page, "view")
        if action == "view" and request.method == "POST":
            action = "change"
        if action in self.denied_permissions:
            return ""
        return f"{self.opts.app_label}.{get_permission_codename(action, self.opts)}"

    # 50 rules are 80 kB uncompressed. Against BREACH, the CSRF token and the length vary.
    @method_decorator(gzip_page)
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list, compressed."""
        return super().changelist_view(request, extra_context)

    # 40 destinations are 120 kB uncompressed.
    @method_decorator(gzip_page)
    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show one object with its `object_context`, or a fragment of its page, compressed."""
        if (obj := self.get_object(request, unquote(object_id))) is not None:
            if FRAGMENT in request.GET:
                return self._fragment(request, obj)
            extra_context = _CONTEXT | self.object_context(request, obj) | (extra_context or {})
        return super().change_view(request, object_id, form_url, extra_context)

    def _fragment(self, request: HttpRequest, obj: Any) -> HttpResponse:
        """Return the fragment that the query names; answer 404 to an unknown name."""
        if not self.has_view_permission(request, obj):
            raise PermissionDenied
        if request.GET[FRAGMENT] not in self.fragments:
            raise Http404
        template = f"admin/psqlmessages/{self.opts.model_name}/_{request.GET[FRAGMENT]}.html"
        context = {**self.object_context(request, obj), "original": obj}
        return never_cache(render)(request, template, context)

    @admin.action(description=delete_selected.short_description, permissions=["delete"])
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        """Run Django's action in one transaction, together with its entries in the history."""
        with transaction.atomic(using=database()):
            return delete_selected(self, request, queryset)

    def object_context(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return further context for the template of an object's page."""
        return {}

    def page(
        self, request: HttpRequest, template: str, title: str, **context: Any
    ) -> TemplateResponse:
        """Return a page in the layout of the admin."""
        request.current_app = self.admin_site.name
        defaults = {"title": title, "opts": self.opts, **_CONTEXT}
        context = {**self.admin_site.each_context(request), **defaults, **context}
        return TemplateResponse(request, f"admin/psqlmessages/{template}.html", context)

    def redirect(self, page: str, *arguments: Any) -> HttpResponse:
        """Redirect to a page of this model in the admin, for instance "changelist"."""
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return HttpResponseRedirect(reverse(name, args=arguments))

    def after_action(self, request: HttpRequest, objects: list[Any]) -> HttpResponse | None:
        """Redirect to the object's page if the action was started there; else return None."""
        if "from_change_page" not in request.POST or len(objects) != 1:
            return None
        return self.redirect("change", objects[0].pk)

    def report_transient_error(self, request: HttpRequest, error: OperationalError) -> None:
        """Show the user that nothing was saved; re-raise an error that is not transient."""
        self.message_user(request, error_text(error), messages.ERROR)


def column(
    description: str, value_of: Callable[[Any], Any], *, order: Any = None
) -> Callable[..., Any]:
    """Create a column of a list, or a field of a page, that shows ``value_of(object)``."""

    @admin.display(description=description, ordering=order)
    def show(_admin: ModelAdmin, obj: Any) -> Any:
        return value_of(obj)

    return show


class VerbatimForm(ModelForm):
    """A form that keeps spaces at both ends of texts, because they may be part of a name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            if isinstance(field, CharField):
                field.strip = False


def try_lock_rules() -> str:
    """Call `lock_rules`; return the error text, or "" if it succeeds."""
    try:
        with transaction.atomic(using=database()):
            lock_rules()
    except OperationalError as error:
        return error_text(error)
    return ""


def error_text(error: OperationalError, sentence: str = _("Nothing was saved: {error}.")) -> str:
    """Return a sentence about a transient error from PostgreSQL; re-raise any other error."""
    cause = error.__cause__
    if not (isinstance(cause, psycopg.Error) and is_transient(cause)):
        raise error
    text = cause.diag.message_primary or str(cause)
    hint = f" {cause.diag.message_hint}" if cause.diag.message_hint else ""
    return sentence.format(error=text) + hint


def current_role() -> str:
    """Return the role that Django connects as."""
    ((name,),) = fetch_rows("SELECT session_user::text")
    return str(name)


def lock_rules() -> None:
    """Block other changes of rules until this transaction ends; wait up to 10 s for the lock.

    Raises OperationalError if the lock is not granted. A second lock blocks nodes from registering,
    disconnecting and changing topics. If other transactions hold the second lock for longer than
    300 ms, this transaction continues without it.
    """
    fetch_rows("SELECT messages._lock_rules()")


# Within a query: the ids of the sessions whose connection is open.
LIVE_SESSIONS = RawSQL("SELECT messages._live_sessions()", [])


def rules_context(kind: str, name: str) -> dict[str, Any]:
    """Return the first rules that match a topic or queue, for the template ``_rules.html``."""
    ((patterns,),) = fetch_rows("SELECT messages._patterns(%s)", [name])
    matching = Auth.objects.using(database()).filter(type=kind, dest__in=patterns)
    rules = list(matching[: MAX_RULES + 1])
    return {"rules": rules[:MAX_RULES], "has_more_rules": len(rules) > MAX_RULES}


def limit_lock_waits() -> None:
    """Limit each lock wait to 10 s until the transaction ends."""
    fetch_rows("SELECT set_config('lock_timeout', %s, true)", [LOCK_TIMEOUT])


def disconnect(client_id: int) -> bool:
    """Disconnect a node and send the event `disconnect`; False if the node is not registered.

    Raises OperationalError after waiting 10 s for a lock, for instance during a change of rules.
    """
    with transaction.atomic(using=database()):
        limit_lock_waits()
        rows = fetch_rows(
            "SELECT messages._disconnect(c.ident) FROM psqlmessages_client AS c WHERE c.id = %s",
            [client_id],
        )
        return bool(rows and rows[0][0])


def fetch_rows(
    statement: str, parameters: list[Any] | dict[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """Run a statement in the database that holds the rules; return all rows."""
    with connections[database()].cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()


# Lock timeouts of a save


class LockTimeoutMixin:
    """Shows lock timeouts to the user, because calls of nodes lock rows of queues and topics."""

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show or save one object; report a save that fails with a transient error."""
        try:
            return super().changeform_view(request, *args, **kwargs)
        except OperationalError as error:
            if request.method != "POST":
                raise
            self.report_transient_error(request, error)
            return HttpResponseRedirect(request.get_full_path())


# Entries in the admin's history

_BATCH = 1000


def record_history(request: HttpRequest, entries: Iterable[tuple[Model, int, str]]) -> None:
    """Write an entry for each triple of object, action flag and text, in few statements.

    Call it last in the transaction of the action. If both are in one database, neither is saved
    without the other.
    """
    LogEntry.objects.bulk_create(
        [
            LogEntry(
                user_id=request.user.pk,
                content_type_id=get_content_type_for_model(entry).pk,
                object_id=entry.pk,
                object_repr=str(entry)[:200],
                action_flag=flag,
                change_message=text,
            )
            for entry, flag, text in entries
        ],
        _BATCH,
    )


class HistoryMixin:
    """Writes added and deleted objects, and changed values, to the history."""

    def construct_change_message(
        self, request: HttpRequest, form: ModelForm, formsets: Any, add: bool = False
    ) -> str:
        """Describe an added object, or each changed field with its old and new value."""
        if add:
            return f"Added {form.instance}."
        changes = (
            f"{form.fields[name].label or name}: {form.initial.get(name)} → "
            f"{getattr(form.cleaned_data.get(name), 'pk', form.cleaned_data.get(name))}"
            for name in form.changed_data
        )
        return "; ".join(changes) or "Nothing changed."

    def log_deletions(self, request: HttpRequest, queryset: Iterable[Model]) -> None:
        """Record the texts of the deleted objects."""
        record_history(request, ((obj, DELETION, f"Deleted {obj}.") for obj in queryset))


# Warnings about values that are saved, but probably not intended


def find_remarks(rules: Iterable[RuleEntry]) -> list[str]:
    """Return the warnings about rules, each text once."""
    rules = list(rules)
    missing = fetch_rows(
        "SELECT DISTINCT g.role FROM unnest(%s::text[]) AS g (role)"
        " WHERE g.role NOT IN (SELECT r.rolname::text FROM pg_roles AS r) ORDER BY g.role",
        [[rule.role for rule in rules]],
    )
    sentences = [
        _("PostgreSQL has no role {role}: the rule has no effect until the role exists.").format(
            role=role
        )
        for (role,) in missing
    ]
    return list(dict.fromkeys([*sentences, *(text for rule in rules for text in rule.remarks())]))
