"""History: what the admin's log says of a change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.db.models import Model
from django.forms import ModelForm
from django.http import HttpRequest

_BATCH = 1000


def log(request: HttpRequest, entries: Iterable[tuple[Model, int, str]]) -> None:
    """Write an entry for each object, flag and text, in few statements."""
    LogEntry.objects.bulk_create(
        [
            LogEntry(
                user_id=request.user.pk,
                content_type_id=get_content_type_for_model(touched).pk,
                object_id=touched.pk,
                object_repr=str(touched)[:200],
                action_flag=flag,
                change_message=text,
            )
            for touched, flag, text in entries
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
