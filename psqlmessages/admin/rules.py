"""Rules in the admin; each change shows the connected nodes that it affects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import ValidationError
from django.db import OperationalError, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.html import escape
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin import base
from psqlmessages.admin.base import BaseAdmin, HistoryMixin, VerbatimForm, find_remarks
from psqlmessages.admin.impact import RuleImpact, list_affected_nodes
from psqlmessages.admin.lists import NameFilter
from psqlmessages.admin.rule_transfer import TransferMixin
from psqlmessages.models import Auth
from psqlmessages.rules.document import RuleEntry

# Form of a rule, for its own page and for the list


class RuleForm(VerbatimForm):
    """A rule. The form refuses invalid rules, and refuses to overwrite concurrent changes."""

    # Locks the rules; returns the error text, or "". For each request, the admin creates a form
    # class and sets a cached function, so that the request locks only once, even for many forms.
    try_lock: ClassVar[Callable[[], str]]

    class Meta:
        model = Auth
        fields: ClassVar = list(RuleEntry._fields)
        help_texts: ClassVar = {
            "role": _("The PostgreSQL role that connects, or a group role that it is a member of."),
            "mode": _(
                "W: send or push. R: listen or take. RW: both. O: receive all messages without"
                " counting as a listener (topics only). A: RW, change settings and remove (queues"
                " only). Type Rpc needs mode W: call. Answering needs no rule."
            ),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk:
            for field in self.fields.values():
                # Also submit the value that the page showed, for _read_current_rule.
                field.show_hidden_initial = True

    def clean(self) -> dict[str, Any]:
        """Check the complete rule, and block other changes of rules until this change commits."""
        cleaned = super().clean() or self.cleaned_data
        if self.errors or (self.instance.pk and not self.has_changed()):
            return cleaned
        if error := self.try_lock():
            raise ValidationError(error)
        values = {**self._read_current_rule(), **cleaned}
        for name, sentence in RuleEntry(
            **{field: values[field] for field in RuleEntry._fields}
        ).errors():
            self.add_error(name if name in self.fields else None, sentence)
        return cleaned

    def _read_current_rule(self) -> dict[str, Any]:
        """Read the saved rule, {} if it is new; raise ValidationError if somebody changed it."""
        if not self.instance.pk:
            return {}
        rules = Auth.objects.using(base.database()).filter(pk=self.instance.pk)
        current = rules.values(*RuleEntry._fields).first()
        if current is None:
            raise ValidationError(_("Somebody else deleted this rule."))
        changed = [
            _("{field} is now {value}").format(
                field=self.fields[name].label or name, value=current[name]
            )
            for name in self.fields
            if name in current
            and self.data.get(self.add_initial_prefix(name), str(current[name]))
            != str(current[name])
        ]
        if changed:
            raise ValidationError(
                _(
                    "Somebody else changed this rule: {changes}. Reload the page, and repeat your"
                    " change if it is still needed."
                ).format(changes=", ".join(changed))
            )
        return current


class RuleRowForm(RuleForm):
    """A row of the list. Its modes are shown as letters, to save space."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["mode"].choices = [(mode, mode) for mode in Auth.Mode.values]
        for name, field in self.fields.items():
            label = _("{field} of {rule}").format(field=field.label or name, rule=self.instance)
            field.widget.attrs["aria-label"] = label


@admin.register(Auth)
class AuthAdmin(HistoryMixin, TransferMixin, BaseAdmin):
    """The rules. Users can add, change, delete, export and import them."""

    form = RuleForm
    list_display = ("role", "ident", "type", "dest", "mode", "timeout")
    list_display_links = ("role", "ident")
    list_editable = ("mode", "timeout")
    list_filter = (("role", NameFilter), ("ident", NameFilter), "type", "mode")
    actions = ("delete_selected",)
    search_fields = ("ident", "dest", "role")
    search_help_text = _("Searches the node, the destination and the role.")

    def get_form(
        self, request: HttpRequest, obj: Auth | None = None, change: bool = False, **kwargs: Any
    ) -> type[forms.ModelForm]:
        """Return the form class of the request, with its own `try_lock`."""
        form = super().get_form(request, obj, change, **kwargs)
        form.try_lock = staticmethod(cache(base.try_lock_rules))
        if field := form.base_fields.get("role"):
            # The admin renders help texts as HTML.
            sentence = _("This site connects as {role}.").format(role=escape(base.current_role()))
            field.help_text = f"{field.help_text} {sentence}"
        return form

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> type[forms.ModelForm]:
        """Return the form class of the list's rows. All rows share one `try_lock`."""
        form = super().get_changelist_form(request, form=RuleRowForm, **kwargs)
        form.try_lock = staticmethod(cache(base.try_lock_rules))
        return form

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list; save its edited rows, or run an action."""
        context = {**self.transfer_context(request), **(extra_context or {})}
        view = super().changelist_view
        return self._with_impact(request, lambda: view(request, context))

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show or save one rule."""
        view = super().changeform_view
        return self._with_impact(request, lambda: view(request, *args, **kwargs))

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Ask for confirmation, and name the affected nodes; then delete one rule."""
        view, rule = super().delete_view, self.get_object(request, unquote(object_id))
        context = {**(extra_context or {}), **_affected(request, [rule.pk] if rule else [])}
        return self._with_impact(request, lambda: view(request, object_id, context))

    @admin.action(description=_("Delete selected rules"), permissions=["delete"])
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Auth]) -> Any:
        """Ask for confirmation, and name the affected nodes; then delete the rules."""
        response = super().delete_selected(request, queryset)
        if isinstance(response, TemplateResponse):
            response.context_data |= _affected(request, queryset.values_list("pk", flat=True))
        return response

    def save_model(
        self, request: HttpRequest, obj: Auth, form: forms.ModelForm, change: bool
    ) -> None:
        """Save the changed fields, and collect the impact."""
        if change and not form.changed_data:
            return
        with request.impact.compare({obj.ident, form.initial.get("ident", obj.ident)}):
            obj.save(update_fields=form.changed_data if change else None)
        request.impact.add_connected_nodes([obj.pk])
        rule = RuleEntry(obj.role, obj.ident, obj.type, obj.dest, obj.mode, obj.timeout)
        request.impact.remarks += find_remarks([rule])

    def delete_model(self, request: HttpRequest, obj: Auth) -> None:
        """Delete a rule, and collect the impact."""
        with request.impact.compare([obj.ident]):
            super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Auth]) -> None:
        """Delete many rules, and collect the impact."""
        with request.impact.compare(queryset.values_list("ident", flat=True)):
            super().delete_queryset(request, queryset)

    def _with_impact(self, request: HttpRequest, view: Callable[[], HttpResponse]) -> HttpResponse:
        """Run a view. A POST runs in a transaction; show the impact after the commit."""
        if request.method != "POST":
            return view()
        request.impact = RuleImpact()
        try:
            with transaction.atomic(using=base.database()):
                response = view()
        except OperationalError as error:
            self.report_transient_error(request, error)
            return HttpResponseRedirect(request.get_full_path())
        self.show_impact(request, request.impact)
        return response


def _affected(request: HttpRequest, rule_ids: Iterable[int]) -> dict[str, Any]:
    """Return the context of the confirmation: the connected nodes that the rules apply to."""
    if "post" in request.POST:
        return {}
    return {"is_about_rules": True, "affected": list_affected_nodes(rule_ids)}
