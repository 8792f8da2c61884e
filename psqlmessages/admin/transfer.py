"""Transfer: export and import of the definitions, as pages of the rules' admin."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone

from psqlmessages.admin import calls, importing
from psqlmessages.admin.remarks import remarks_of
from psqlmessages.definitions import changes, document

_TEMPLATE = "admin/psqlmessages/auth/import.html"


class UploadForm(forms.Form):
    """Which document, and what of the rules that it does not name."""

    document = forms.FileField(help_text="As Export writes it.")
    replace = forms.BooleanField(
        required=False,
        label="Remove what the document does not name",
        help_text="Without it, rules and web identities that it does not name stay.",
    )

    def __init__(self, *args: Any, may_replace: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["replace"].disabled = not may_replace

    def clean_document(self) -> bytes:
        """Read the document, unless it is too large to be one."""
        upload = self.cleaned_data["document"]
        if upload.size > document.MOST_BYTES:
            raise forms.ValidationError(
                f"The document has {upload.size:,} bytes; {document.MOST_BYTES:,} are the most."
            )
        return upload.read()


class TransferMixin:
    """The pages export/ and import/ beside the list of the rules."""

    def get_urls(self) -> list[URLPattern]:
        """Return the admin's own addresses, after those of the two pages."""
        view = self.admin_site.admin_view
        return [
            path("export/", view(self.export_view), name="psqlmessages_auth_export"),
            path("import/", view(self.import_view), name="psqlmessages_auth_import"),
            *super().get_urls(),
        ]

    def transfer_context(self, request: HttpRequest) -> dict[str, bool]:
        """Return which of the two pages the list offers."""
        return {"may_export": self.has_view_permission(request), "may_import": self._may(request)}

    def export_view(self, request: HttpRequest) -> HttpResponse:
        """Hand out the rules as a file, and the web identities to who may see them."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = changes.present(calls.database())
        if not request.user.has_perm("psqlmessages.view_webidentity"):
            found = document.Definitions(found.rules)
        name = f"psqlmessages-{timezone.now():%Y-%m-%d}.json"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return HttpResponse(document.write(found), content_type="application/json", headers=headers)

    def import_view(self, request: HttpRequest) -> HttpResponse:
        """Take a document, show what it would change, and then do exactly that."""
        if not self._may(request):
            raise PermissionDenied
        if "plan" in request.POST:
            return self._import(request)
        form = UploadForm(
            request.POST or None,
            request.FILES or None,
            may_replace=self.has_delete_permission(request),
        )
        if form.is_valid():
            try:
                wanted = document.read(form.cleaned_data["document"])
                changes.see_that_names_are_known(wanted, calls.database())
            except document.MalformedDefinitions as error:
                form.add_error("document", error.faults)
            else:
                plan = importing.Plan.of(wanted, is_replacing=form.cleaned_data["replace"])
                return self._preview(request, plan)
        return self._page(request, form=form)

    def _import(self, request: HttpRequest) -> HttpResponse:
        try:
            plan = importing.Plan.loads(request.POST["plan"], request.user)
        except importing.PlanNotUsable as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(reverse("admin:psqlmessages_auth_import"))
        if plan.is_stale:
            return self._changed_meanwhile(request, plan)
        if plan.lacking(request.user):
            raise PermissionDenied
        try:
            touched = plan.carry_out(request)
        except changes.DefinitionsChanged:
            return self._changed_meanwhile(request, plan)
        except OperationalError as error:
            self.message_user(request, calls.refusal(error), messages.ERROR)
            return self._preview(request, plan)
        self.message_user(request, f"Imported: {plan.todo.summary()}.", messages.SUCCESS)
        for level, text in touched.messages():
            self.message_user(request, text, level)
        return HttpResponseRedirect(reverse("admin:psqlmessages_auth_changelist"))

    def _changed_meanwhile(self, request: HttpRequest, plan: importing.Plan) -> HttpResponse:
        self.message_user(
            request,
            "Nothing was saved: somebody changed rules or web identities meanwhile. This is the"
            " difference as it is now.",
            messages.ERROR,
        )
        return self._preview(request, plan.anew())

    def _preview(self, request: HttpRequest, plan: importing.Plan) -> HttpResponse:
        todo = plan.todo
        text = plan.dumps(request.user)
        return self._page(
            request,
            todo=todo,
            plan=text,
            is_too_large=importing.is_too_large(text),
            lacking=sorted(plan.lacking(request.user)),
            remarks=remarks_of([*todo.rules_added, *(new for _, new in todo.rules_changed)]),
        )

    def _page(self, request: HttpRequest, **context: Any) -> TemplateResponse:
        request.current_app = self.admin_site.name
        common = self.admin_site.each_context(request)
        title = {"title": "Import of rules", "opts": self.opts, "media": self.media}
        return TemplateResponse(request, _TEMPLATE, {**common, **title, **context})

    def _may(self, request: HttpRequest) -> bool:
        return self.has_add_permission(request) and self.has_change_permission(request)
