"""Actions of operators: permission, confirmation, call, and an entry in Django's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import DatabaseError, transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware
from django.utils.translation import gettext as _

from psqlmessages.exceptions import MessagesError
from psqlmessages.models.rules import database
from psqlmessages.monitor.views import common_context, forbidden
from psqlmessages.operator_log import ActionFlag, log_action
from psqlmessages.orm import fetch
from psqlmessages.wire import EncodedBody, MalformedText, parse_strict_json

RULE_FIELDS: Final = ("role", "ident", "type", "dest", "mode")

_LOCK_TIMEOUT: Final = "10s"
_CONFIRMED: Final = "confirmed"

Target = TypeVar("Target", bound=Model)
# The posted fields: each name has one or more values. ``describe`` may replace them.
Fields = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Action(Generic[Target]):
    """An action on an object, which asks for confirmation first.

    The user needs all ``permissions``.
    ``describe`` returns sentences about what the action will affect, with numbers and names. It may
    change the posted fields: the confirmation posts the changed fields. ``run`` returns a sentence
    for the log about what the action did. Both raise ValidationError if a field is wrong, and
    MessagesError if a call fails, for instance because a rule is missing. ``is_addition``: ``run``
    saves ``target``, which is a new object.
    """

    label: Any
    permissions: tuple[str, ...]
    describe: Callable[[Target, Fields], Sequence[str]]
    run: Callable[[Target, Fields], str]
    _: KW_ONLY
    is_destructive: bool = False
    is_addition: bool = False


def perform(
    request: HttpRequest, action: Action[Target], target: Target, back_url: str, **overrides: str
) -> HttpResponse:
    """Show a page that asks for confirmation; once confirmed, run the action and redirect.

    ``overrides`` replace posted fields. If ``describe`` or ``run`` fails, the page shows the error
    instead of a button.
    """
    for permission in action.permissions:
        if not request.user.has_perm(permission):
            return forbidden(request, permission)
    fields = dict(request.POST.lists())
    is_confirmed = bool(fields.pop(_CONFIRMED, None))
    fields.pop("csrfmiddlewaretoken", None)
    fields.update({name: [value] for name, value in overrides.items()})
    context = {**common_context(request), "action": action, "target": target, "back_url": back_url}
    try:
        with transaction.atomic(using=database()):
            if not is_confirmed:
                context["sentences"] = action.describe(target, fields)
                context["fields"] = [
                    (key, value) for key in fields.keys() - overrides for value in fields[key]
                ]
                return render(request, "psqlmessages/monitor/action.html", context)
            fetch("SELECT set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT], database())
            text = action.run(target, fields)
            flag = ActionFlag.ADDITION if action.is_addition else ActionFlag.CHANGE
            log_action(request.user, target, flag, text)
    except (MessagesError, ImproperlyConfigured, DatabaseError) as error:
        context["errors"] = [_("Nothing was changed."), str(error).strip()]
        context["rule"] = missing_rule(error, back_url)
    except ValidationError as error:
        context["errors"] = error.messages
    else:
        messages.success(request, text, fail_silently=True)
        return redirect(back_url)
    return render(request, "psqlmessages/monitor/action.html", context, status=400)


def allowed_actions(request: HttpRequest, actions: Mapping[str, Action[Any]]) -> set[str]:
    """Return the names of the actions that the user may perform."""
    user = request.user
    return {name for name, action in actions.items() if user.has_perms(action.permissions)}


def missing_rule(error: Exception, back_url: str) -> dict[str, str]:
    """Return the fields of a form that adds the rule that a refused call lacks; {} if unknown."""
    if isinstance(error, MessagesError):
        for rule in error.missing_rules():
            # Skip rules for other nodes: their names are not always known, so ``missing_rules`` may
            # put placeholders into them.
            if rule[1] == error.caller.ident:
                return {**dict(zip(RULE_FIELDS, rule, strict=True)), "back": back_url}
    return {}


def field_value(fields: Fields, name: str) -> str:
    """Return the last value of a posted field; "" if it is missing."""
    return fields.get(name, [""])[-1]


def read_body(fields: Fields) -> Any:
    """Return the posted body of a test message: text, or a JSON value; raise ValidationError."""
    # Browsers post line ends as CRLF.
    text = field_value(fields, "body").replace("\r\n", "\n")
    if field_value(fields, "format") == "json":
        return parse_json(text, _("The body"))
    if "\0" in text:
        raise ValidationError(_("The body has a NUL character."))
    return text


def parse_json(text: str, subject: str) -> Any:
    """Parse posted JSON text; raise ValidationError, whose message begins with ``subject``."""
    try:
        value = parse_strict_json(text)
        # An escape of half a surrogate pair, such as \ud800, is valid JSON but cannot be sent.
        EncodedBody.of(value).text.encode()
    except MalformedText as error:
        raise ValidationError(error.sentence(subject)) from None
    except ValueError as error:
        raise ValidationError(f"{subject}: {error}.") from None
    return value


def parse_time(text: str) -> datetime:
    """Parse a posted date and time, in the current time zone; raise ValidationError."""
    try:
        at = parse_datetime(text)
    except ValueError:
        at = None
    if at is None:
        raise ValidationError(
            _("%(text)r is not a time: choose a date and a time.") % {"text": text}
        )
    return make_aware(at) if is_naive(at) else at
