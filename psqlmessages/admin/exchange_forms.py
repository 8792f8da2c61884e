"""Forms of an exchange, its destinations and a dry run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Final

from django import forms
from django.core.exceptions import ValidationError
from django.db import DEFAULT_DB_ALIAS
from django.utils.translation import gettext_lazy as _

from psqlmessages.exchanges.model import QueueRef, SelectorInput
from psqlmessages.exchanges.store import definitions
from psqlmessages.exchanges.store.definitions import (
    DefinedDestination,
    DefinedExchange,
    ExchangeError,
)
from psqlmessages.models import Destination, Exchange
from psqlmessages.wire import MalformedText, parse_strict_json

# The form field of each value in a document of definitions, by the path of the value.
_FIELDS_BY_PATH: Final = {
    ("name",): "name",
    ("src", "ns"): "source_namespace",
    ("src", "queue"): "source_queue",
    ("consumer", "parallel"): "parallel",
    ("consumer", "wsize"): "wsize",
    ("no_route",): "no_route_action",
    ("ns",): "namespace",
    ("queue",): "queue",
    ("selector",): "selector",
}
# When the form of an exchange is checked, this stands for the destinations. When the forms of
# destinations are checked, its queue stands for the source.
_VALID_DESTINATION: Final = DefinedDestination(QueueRef(DEFAULT_DB_ALIAS, "queue"))
_MAX_CHARACTERS: Final = 100_000


class _DefinitionForm(forms.ModelForm):
    """Base form: keeps spaces at the ends of names, and shows errors at their fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("name", "source_queue", "queue"):
            if name in self.fields:
                self.fields[name].strip = False
        for name in ("source_namespace", "namespace"):
            if name in self.fields:
                choices = list(definitions.namespaces())
                current = getattr(self.instance, name)
                if current and current not in choices:
                    choices.append(current)
                self.fields[name].widget = forms.Select(choices=[(each, each) for each in choices])

    def add_errors(self, errors: Iterable[ExchangeError]) -> None:
        """Add each error to its field, unless Django has already found one there."""
        for error in errors:
            field = _FIELDS_BY_PATH.get(error.path)
            if field not in self.errors:
                self.add_error(field if field in self.fields else None, error.sentence)


class ExchangeForm(_DefinitionForm):
    """An exchange without its destinations; refuses to overwrite concurrent changes."""

    # The time `changed_at` of the exchange when the page was shown.
    version = forms.CharField(required=False, widget=forms.HiddenInput)

    class Meta:
        model = Exchange
        fields = (
            *("name", "source_namespace", "source_queue"),
            *("parallel", "wsize", "reserve", "no_route_action", "is_running"),
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk:
            self.fields["version"].initial = self.instance.changed_at.isoformat()

    def has_changed(self) -> bool:
        """Return whether a field other than the hidden `version` has changed."""
        return bool(set(self.changed_data) - {"version"})

    def clean(self) -> dict[str, Any]:
        """Check the definition, and that the exchange has not changed since the page was shown."""
        cleaned = super().clean() or self.cleaned_data
        if self.instance.pk and cleaned.get("version") != self.instance.changed_at.isoformat():
            raise ValidationError(
                _(
                    "Somebody else changed this exchange. Reload the page, and repeat your change"
                    " if it is still needed."
                )
            )
        exchange = DefinedExchange(
            cleaned.get("name", ""),
            QueueRef(cleaned.get("source_namespace", ""), cleaned.get("source_queue", "")),
            (_VALID_DESTINATION,),
            cleaned.get("parallel") or 0,
            cleaned.get("wsize") or 0,
        )
        self.add_errors(error for error in exchange.errors() if error.path[0] != "dst")
        return cleaned


class DestinationForm(_DefinitionForm):
    """A destination. ``order`` is its place, from 1; without it, the destination is the last."""

    order = forms.IntegerField(
        label=_("Order"),
        required=False,
        min_value=1,
        widget=forms.NumberInput(attrs={"class": "vSmallIntegerField"}),
    )

    class Meta:
        model = Destination
        fields = ("namespace", "queue", "selector")
        widgets: ClassVar = {
            "selector": forms.Textarea(
                attrs={"rows": 2, "cols": 30, "spellcheck": "false", "class": "vSelector"}
            )
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk:
            self.fields["order"].initial = self.instance.position + 1

    @property
    def definition(self) -> DefinedDestination:
        """The destination as a definition."""
        cleaned = self.cleaned_data
        queue = QueueRef(cleaned.get("namespace", ""), cleaned.get("queue", ""))
        return DefinedDestination(queue, cleaned.get("selector", ""))

    def clean(self) -> dict[str, Any]:
        """Check the definition, which compiles the selector."""
        cleaned = super().clean() or self.cleaned_data
        self.add_errors(self.definition.errors())
        return cleaned


class DestinationFormSet(forms.BaseInlineFormSet):
    """The destinations of an exchange, in order."""

    def add_fields(self, form: forms.Form, index: int | None) -> None:
        """Label the inputs of each row, because the table has labels only above its columns."""
        super().add_fields(form, index)
        # A script copies the row without index for each new destination.
        number = _("new destination") if index is None else _("destination %d") % (index + 1)
        for name, field in form.fields.items():
            text = _("{field} of {row}").format(field=field.label or name, row=number)
            field.widget.attrs["aria-label"] = text

    def clean(self) -> None:
        """Check the number of destinations, and assign their positions."""
        super().clean()
        remaining = [
            form
            for form in self.forms
            if (form.instance.pk or form.has_changed()) and not self._should_delete_form(form)
        ]
        if any(form.errors for form in self.forms):
            return
        destinations = tuple(form.definition for form in remaining)
        exchange = DefinedExchange("x", _VALID_DESTINATION.queue, destinations)
        for error in exchange.errors():
            if error.path == ("dst",):
                raise ValidationError(error.sentence)
        for position, (_index, form) in enumerate(sorted(enumerate(remaining), key=_sort_key)):
            form.instance.position = position

    def save_positions(self) -> None:
        """Save the positions of unchanged forms, because Django saves only changed forms."""
        for form in self.forms:
            if form.instance.pk and not form.has_changed():
                rows = Destination.objects.filter(pk=form.instance.pk)
                rows.update(position=form.instance.position)


class DryRunForm(forms.Form):
    """An element for a dry run."""

    headers = forms.CharField(
        label=_("Headers"),
        required=False,
        initial="{}",
        max_length=_MAX_CHARACTERS,
        widget=forms.Textarea(attrs={"rows": 3, "cols": 60, "spellcheck": "false"}),
        help_text=_("A JSON object, or empty."),
    )
    body = forms.CharField(
        label=_("Body"),
        required=False,
        strip=False,
        max_length=_MAX_CHARACTERS,
        widget=forms.Textarea(attrs={"rows": 5, "cols": 60, "spellcheck": "false"}),
    )
    is_json = forms.BooleanField(required=False, label=_("The body is JSON"))
    tries = forms.IntegerField(
        label=_("Failed attempts"), min_value=0, max_value=2**31 - 1, initial=0
    )

    def clean_headers(self) -> dict[str, Any]:
        """Parse the headers."""
        headers = _parse_json(self.cleaned_data["headers"] or "{}")
        if not isinstance(headers, dict):
            raise ValidationError(_("Headers must be a JSON object."))
        return headers

    def clean(self) -> dict[str, Any]:
        """Parse the body if it is JSON."""
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("is_json") and "body" in cleaned:
            try:
                cleaned["body"] = _parse_json(cleaned["body"])
            except ValidationError as error:
                self.add_error("body", error)
        return cleaned

    def message(self, source: QueueRef) -> SelectorInput:
        """Return the element as selectors see it in the source queue."""
        cleaned = self.cleaned_data
        return SelectorInput(
            cleaned["body"],
            cleaned["headers"],
            tries=cleaned["tries"],
            queue=source.name,
            ns=source.namespace,
        )


def _parse_json(text: str) -> Any:
    try:
        return parse_strict_json(text)
    except MalformedText as error:
        raise ValidationError(error.sentence()) from error


def _sort_key(entry: tuple[int, forms.ModelForm]) -> tuple[float, int, int]:
    """Return the sort key. Among equal orders, new forms and forms moved up come first."""
    index, form = entry
    new, old = form.cleaned_data.get("order"), form.fields["order"].initial
    if new is None:
        return float("inf"), 0, index
    if new == old:
        return new, 0, index
    return new, -1 if old is None or new < old else 1, index
