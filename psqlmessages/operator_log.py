"""Entries in Django's log for actions of operators."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from django.apps import apps
from django.db.models import Model


class ActionFlag(IntEnum):
    """The flags of LogEntry, which cannot be imported in a project without the admin."""

    ADDITION = 1
    CHANGE = 2
    DELETION = 3


def log_action(user: Any, target: Model, flag: ActionFlag, text: str) -> None:
    """Add an entry to the history of an object, if the project uses the admin.

    Call it last in the transaction of the action. If both are in one database, neither is saved
    without the other.
    """
    if not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import LogEntry

    LogEntry.objects.log_actions(user.pk, [target], flag, text, single_object=True)
