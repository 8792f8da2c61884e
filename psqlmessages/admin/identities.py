"""Web identities in the admin: the nodes that a user or a group may use."""

from __future__ import annotations

from typing import ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.auth import get_user_model
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from psqlmessages.admin.base import BaseAdmin, HistoryMixin, VerbatimForm
from psqlmessages.admin.lists import NameFilter
from psqlmessages.models import WebIdentity
from psqlmessages.rules.document import Identity


class WebIdentityForm(VerbatimForm):
    """A web identity. Spaces at the ends of the node name are saved, with a warning."""

    class Meta:
        model = WebIdentity
        fields = ("user", "group", "ident")
        help_texts: ClassVar = {
            "user": _("Choose either a user or a group."),
            "group": _("Applies to every member of the group."),
        }


@admin.register(WebIdentity)
class WebIdentityAdmin(HistoryMixin, BaseAdmin):
    """The nodes that users and groups may use. Deleting one closes its WebSockets."""

    form = WebIdentityForm
    list_display = ("ident", "user", "group")
    list_display_links = list_display
    list_filter = (("ident", NameFilter), "group")
    list_select_related = ("user", "group")
    raw_id_fields = ("user", "group")
    search_fields = ("ident", f"user__{get_user_model().USERNAME_FIELD}", "group__name")
    search_help_text = _("Searches the node, the user name and the group name.")

    def get_autocomplete_fields(self, request: HttpRequest) -> list[str]:
        """Return the fields whose model the project's admin can search.

        For the other fields, the form asks for a primary key: a list of all users or groups may be
        too long.
        """
        admins = {
            name: self.admin_site._registry.get(self.opts.get_field(name).related_model)
            for name in self.raw_id_fields
        }
        return [name for name, each in admins.items() if each and each.search_fields]

    def save_model(
        self, request: HttpRequest, obj: WebIdentity, form: forms.ModelForm, change: bool
    ) -> None:
        """Save, and warn about values that are probably not intended."""
        super().save_model(request, obj, form, change)
        for remark in identity_of(obj).remarks():
            self.message_user(request, remark, messages.WARNING)


def identity_of(entry: WebIdentity) -> Identity:
    """Convert a row to an entry of a definitions file."""
    user = entry.user.get_username() if entry.user else None
    return Identity(user, entry.group.name if entry.group else None, entry.ident)
