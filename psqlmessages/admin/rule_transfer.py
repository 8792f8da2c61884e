"""Export and import of rules and web identities in the admin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.admin.models import ADDITION, CHANGE, DELETION
from django.contrib.auth.models import AbstractBaseUser
from django.core import signing
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin import base
from psqlmessages.admin.base import find_remarks
from psqlmessages.admin.identities import identity_of
from psqlmessages.admin.impact import RuleImpact, list_affected_nodes
from psqlmessages.models import Auth, WebIdentity
from psqlmessages.rules import changes, document
from psqlmessages.rules.document import Identity, RuleEntry

# Import plan: the page shows the changes; the user sends the signed plan back to apply them

_SALT = "psqlmessages.import.2"
_LIFETIME = timedelta(hours=1)
# Maximum size of the other fields of the request.
_OTHER_FIELDS_BYTES = 10_000


class UnusablePlan(Exception):
    """The plan expired, was altered, or names an unknown user or group. The user sees the text."""


@dataclass(frozen=True)
class ImportPlan:
    """A document to import, and the current definitions that it changes.

    ``is_replacing``: whether to remove entries that the document does not contain;
    ``fingerprint``: fingerprint of the definitions when the page was shown.
    """

    wanted: document.Definitions
    is_replacing: bool
    current: document.Definitions
    fingerprint: str

    @classmethod
    def of(cls, wanted: document.Definitions, *, is_replacing: bool) -> ImportPlan:
        """Compare a document with the current definitions."""
        current = changes.read_current(base.database())
        return cls(wanted, is_replacing, current, changes.fingerprint(current))

    @classmethod
    def loads(cls, text: str, user: AbstractBaseUser) -> ImportPlan:
        """Parse a plan that `dumps` signed for this user; raise UnusablePlan if this fails."""
        try:
            fields = signing.loads(text, salt=_SALT + str(user.pk), max_age=_LIFETIME)
            wanted = document.read(fields["document"])
            changes.check_users_and_groups(wanted, base.database())
        except signing.BadSignature as error:
            raise UnusablePlan(
                _(
                    "Nothing was saved: the page has expired or was altered. Choose the document"
                    " again."
                )
            ) from error
        except document.MalformedDefinitions as error:
            raise UnusablePlan(f"{_('Nothing was saved.')} {error}") from error
        current = changes.read_current(base.database())
        return cls(wanted, fields["replace"], current, fields["fingerprint"])

    def dumps(self, user: AbstractBaseUser) -> str:
        """Sign the plan, so that only this user can submit it, unaltered and within an hour."""
        fields = {
            "document": document.write(self.wanted),
            "replace": self.is_replacing,
            "fingerprint": self.fingerprint,
        }
        return signing.dumps(fields, salt=_SALT + str(user.pk), compress=True)

    @cached_property
    def difference(self) -> changes.RuleDifference:
        """The changes to apply."""
        return changes.difference(self.current, self.wanted, is_replacing=self.is_replacing)

    @property
    def saved_rules(self) -> list[RuleEntry]:
        """The rules that will be added or changed, with their new values."""
        difference = self.difference
        return [*difference.rules_added, *(new for _old, new in difference.rules_changed)]

    def missing_permissions(self, user: AbstractBaseUser) -> set[str]:
        """Return the permissions that the changes need and the user lacks."""
        return {name for name in self.difference.permissions() if not user.has_perm(name)}

    def apply(self, request: HttpRequest) -> RuleImpact:
        """Apply the plan in one transaction; raise DefinitionsChanged if it is outdated."""
        impact, using, difference = RuleImpact(), base.database(), self.difference
        with transaction.atomic(using=using):
            with impact.compare(rule.ident for rule in difference.rules):
                rules, identities = _rules(using), _identities(using)
                removed = [rules.get(rule.key) for rule in difference.rules_removed]
                removed += [identities.get(entry) for entry in difference.identities_removed]
                changes.apply(difference, self.fingerprint, using)
            rules = _rules(using)
            impact.add_connected_nodes(rules[rule.key].pk for rule in self.saved_rules)
            deletions = [(row, DELETION, f"Import: deleted {row}.") for row in removed if row]
            entries = _history_entries(difference, rules, _identities(using))
            base.record_history(request, [*deletions, *entries])
        return impact


def _rules(using: str) -> dict[tuple[str, str, str, str], Auth]:
    rules = Auth.objects.using(using)
    return {(rule.role, rule.ident, rule.type, rule.dest): rule for rule in rules}


def _identities(using: str) -> dict[Identity, WebIdentity]:
    identities = WebIdentity.objects.using(using).select_related("user", "group")
    return {identity_of(entry): entry for entry in identities}


def _history_entries(
    difference: changes.RuleDifference,
    rules: dict[tuple[str, str, str, str], Auth],
    identities: dict[Identity, WebIdentity],
) -> Iterator[tuple[Model, int, str]]:
    """Yield the history entries of additions and changes."""
    for rule in difference.rules_added:
        yield rules[rule.key], ADDITION, f"Import: added {rule}."
    for old, new in difference.rules_changed:
        values = zip(RuleEntry._fields, old, new, strict=True)
        texts = [
            f"{field}: {before} → {after}" for field, before, after in values if before != after
        ]
        yield rules[new.key], CHANGE, f"Import: {'; '.join(texts)}."
    for identity in difference.identities_added:
        yield identities[identity], ADDITION, f"Import: added {identity}."


_TEMPLATE, _TITLE = "auth/import", _("Import of rules")


class UploadForm(forms.Form):
    """A document, and whether to remove rules and web identities that it does not contain."""

    document = forms.FileField(label=_("Document"), help_text=_("A file written by Export."))
    replace = forms.BooleanField(
        required=False,
        label=_("Remove entries that the document does not contain"),
        help_text=_("Entries are rules and web identities."),
    )

    def __init__(self, *args: Any, may_replace: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["replace"].disabled = not may_replace

    def clean_document(self) -> bytes:
        """Read the document; refuse a document that is too large."""
        upload = self.cleaned_data["document"]
        if upload.size > document.MAX_BYTES:
            raise forms.ValidationError(
                _("The document has {size} bytes; at most {limit} are allowed.").format(
                    size=f"{upload.size:,}", limit=f"{document.MAX_BYTES:,}"
                )
            )
        return upload.read()


class TransferMixin:
    """Adds the pages export/ and import/ to the admin of rules."""

    pages: ClassVar = {"export": "export/", "import": "import/"}

    def transfer_context(self, request: HttpRequest) -> dict[str, bool]:
        """Return the context of the list: whether to show the links to export and import."""
        return {
            "may_export": self.has_view_permission(request),
            "may_import": self._may_import(request),
        }

    def export_view(self, request: HttpRequest) -> HttpResponse:
        """Export the rules, and the web identities if the user may view them."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        current = changes.read_current(base.database())
        if not request.user.has_perm("psqlmessages.view_webidentity"):
            current = document.Definitions(current.rules)
        name = f"psqlmessages-{timezone.now():%Y-%m-%d}.json"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return HttpResponse(document.write(current), "application/json", headers=headers)

    def import_view(self, request: HttpRequest) -> HttpResponse:
        """Show the changes that an uploaded document makes, or apply the shown changes."""
        if not self._may_import(request):
            raise PermissionDenied("psqlmessages.add_auth, psqlmessages.change_auth")
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
                changes.check_users_and_groups(wanted, base.database())
            except document.MalformedDefinitions as error:
                form.add_error("document", error.errors)
            else:
                plan = ImportPlan.of(wanted, is_replacing=form.cleaned_data["replace"])
                return self._preview(request, plan)
        return self.page(request, _TEMPLATE, _TITLE, form=form)

    def _import(self, request: HttpRequest) -> HttpResponse:
        try:
            plan = ImportPlan.loads(request.POST["plan"], request.user)
        except UnusablePlan as error:
            self.message_user(request, str(error), messages.ERROR)
            return self.redirect("import")
        if changes.fingerprint(plan.current) != plan.fingerprint:
            return self._show_conflict(request, plan)
        if missing := plan.missing_permissions(request.user):
            raise PermissionDenied(", ".join(sorted(missing)))
        try:
            impact = plan.apply(request)
        except changes.DefinitionsChanged:
            return self._show_conflict(request, plan)
        except OperationalError as error:
            self.report_transient_error(request, error)
            return self._preview(request, plan)
        text = _("Imported: {changes}.").format(changes=plan.difference.summary())
        self.message_user(request, text, messages.SUCCESS)
        self.show_impact(request, impact)
        return self.redirect("changelist")

    def show_impact(self, request: HttpRequest, impact: RuleImpact) -> None:
        """Show the nodes that a change of rules affects."""
        for level, text in impact.messages():
            self.message_user(request, text, level)

    def _show_conflict(self, request: HttpRequest, plan: ImportPlan) -> HttpResponse:
        self.message_user(
            request,
            _(
                "Nothing was saved: somebody else changed rules or web identities. The differences"
                " below are up to date."
            ),
            messages.ERROR,
        )
        return self._preview(request, ImportPlan.of(plan.wanted, is_replacing=plan.is_replacing))

    def _preview(self, request: HttpRequest, plan: ImportPlan) -> HttpResponse:
        difference = plan.difference
        # The rules that nodes lose, or that allow something else from now on.
        losing = [*difference.rules_removed, *(old for old, _new in difference.rules_changed)]
        rules = _rules(base.database()) if losing else {}
        text, max_bytes = plan.dumps(request.user), settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        return self.page(
            request,
            _TEMPLATE,
            _TITLE,
            difference=difference,
            is_about_rules=bool(losing),
            affected=list_affected_nodes(
                rules[rule.key].pk for rule in losing if rule.key in rules
            ),
            is_destructive=difference.rules_removed or difference.identities_removed,
            plan=text,
            # Whether Django would refuse the request that submits the plan.
            is_too_large=max_bytes is not None and len(text) + _OTHER_FIELDS_BYTES > max_bytes,
            missing_permissions=sorted(plan.missing_permissions(request.user)),
            remarks=find_remarks(plan.saved_rules),
        )

    def _may_import(self, request: HttpRequest) -> bool:
        return self.has_add_permission(request) and self.has_change_permission(request)
