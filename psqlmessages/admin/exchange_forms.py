"""Forms of an exchange, its destinations and a dry run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Final

from django import forms
from django.core.exceptions import ValidationError
from django.db import DEFAULT_DB_ALIAS

from psqlmessages.exchanges.model import QueueRef, SelectorInput
from psqlmessages.exchanges.store import definitions
from psqlmessages.exchanges.store.definitions import (
    DefinedDestination,
    DefinedExchange,
    ExchangeError,
)
from psqlmessages.models import Destination, Exchange
from psqlmessages.wire import MalformedText, strict_json

# Form fields by their path in a document.
_FIELDS: Final = {
    ("name",): "name",
    ("src", "ns"): "source_namespace",
    ("src", "queue"): "source_queue",
    ("consumer", "parallel"): "parallel",
    ("consumer", "wsize"): "wsize",
    ("ns",): "namespace",
    ("queue",): "queue",
    ("selector",): "selector",
}
_ANYWHERE: Final = DefinedDestination(QueueRef(DEFAULT_DB_ALIAS, "queue"))
_MOST_CHARACTERS: Final = 100_000


class _DefinitionForm(forms.ModelForm):
    """Keeps spaces in names, which are significant, and shows errors at their fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("name", "source_queue", "queue"):
            if name in self.fields:
                self.fields[name].strip = False
        for name in ("source_namespace", "namespace"):
            if name in self.fields:
                known = definitions.namespaces()
                present = getattr(self.instance, name)
                shown = dict.fromkeys([*known, *([present] if present else [])])
                self.fields[name].widget = forms.Select(choices=[(each, each) for each in shown])

    def add_errors(self, errors: Iterable[ExchangeError]) -> None:
        """Add each error to its field, unless Django has already found one there."""
        for problem in errors:
            field = _FIELDS.get(problem.path)
            if field not in self.errors:
                self.add_error(field if field in self.fields else None, problem.sentence)


class ExchangeForm(_DefinitionForm):
    """An exchange without its destinations; refuses to overwrite concurrent changes."""

    seen = forms.CharField(required=False, widget=forms.HiddenInput)

    class Meta:
        model = Exchange
        fields = (
            *("name", "source_namespace", "source_queue"),
            *("parallel", "wsize", "reserve", "is_running"),
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk:
            self.fields["seen"].initial = self.instance.changed_at.isoformat()

    def has_changed(self) -> bool:
        """Ignore the hidden field `seen`."""
        return bool(set(self.changed_data) - {"seen"})

    def clean(self) -> dict[str, Any]:
        """Check the definition, and that the exchange has not changed since the page was shown."""
        cleaned = super().clean() or self.cleaned_data
        if self.instance.pk and cleaned.get("seen") != self.instance.changed_at.isoformat():
            raise ValidationError(
                "Somebody else changed this exchange. Reload the page, and repeat your change if it"
                " is still needed."
            )
        self.add_errors(
            problem
            for problem in DefinedExchange(
                cleaned.get("name", ""),
                QueueRef(cleaned.get("source_namespace", ""), cleaned.get("source_queue", "")),
                (_ANYWHERE,),
                cleaned.get("parallel") or 0,
                cleaned.get("wsize") or 0,
            ).errors()
            if problem.path[0] != "dst"
        )
        return cleaned


class DestinationForm(_DefinitionForm):
    """A destination; ``order`` is the position of its selector, by default the last."""

    order = forms.IntegerField(
        required=False, min_value=1, widget=forms.NumberInput(attrs={"class": "vSmallIntegerField"})
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
    def defined(self) -> DefinedDestination:
        """The destination as a definition."""
        given = self.cleaned_data
        place = QueueRef(given.get("namespace", ""), given.get("queue", ""))
        return DefinedDestination(place, given.get("selector", ""))

    def clean(self) -> dict[str, Any]:
        """Check the definition, which compiles the selector."""
        cleaned = super().clean() or self.cleaned_data
        self.add_errors(self.defined.errors())
        return cleaned


class Destinations(forms.BaseInlineFormSet):
    """The destinations of an exchange, in order."""

    def clean(self) -> None:
        """Check the number of destinations, and assign their positions."""
        super().clean()
        kept = [
            form
            for form in self.forms
            if (form.instance.pk or form.has_changed()) and not self._should_delete_form(form)
        ]
        if any(form.errors for form in self.forms):
            return
        exchange = DefinedExchange("x", _ANYWHERE.place, tuple(form.defined for form in kept))
        for problem in exchange.errors():
            if problem.path == ("dst",):
                raise ValidationError(problem.sentence)
        ordered = sorted(enumerate(kept), key=_order)
        for position, (_, form) in enumerate(ordered):
            form.instance.position = position

    def settle(self) -> None:
        """Write the positions of unchanged forms after everything is saved."""
        for form in self.forms:
            if form.instance.pk and not form.has_changed():
                rows = Destination.objects.filter(pk=form.instance.pk)
                rows.update(position=form.instance.position)


class DryRunForm(forms.Form):
    """An element for a dry run."""

    headers = forms.CharField(
        required=False,
        initial="{}",
        max_length=_MOST_CHARACTERS,
        widget=forms.Textarea(attrs={"rows": 3, "cols": 60, "spellcheck": "false"}),
        help_text="A JSON object, or empty.",
    )
    body = forms.CharField(
        required=False,
        strip=False,
        max_length=_MOST_CHARACTERS,
        widget=forms.Textarea(attrs={"rows": 5, "cols": 60, "spellcheck": "false"}),
    )
    is_json = forms.BooleanField(required=False, label="The body is JSON")
    tries = forms.IntegerField(min_value=0, max_value=2**31 - 1, initial=0)

    def clean_headers(self) -> dict[str, Any]:
        """Parse the headers."""
        headers = _json(self.cleaned_data["headers"] or "{}")
        if not isinstance(headers, dict):
            raise ValidationError("Headers must be a JSON object.")
        return headers

    def clean(self) -> dict[str, Any]:
        """Parse the body if it is JSON."""
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("is_json") and "body" in cleaned:
            try:
                cleaned["body"] = _json(cleaned["body"])
            except ValidationError as error:
                self.add_error("body", error)
        return cleaned

    def message(self, source: QueueRef) -> SelectorInput:
        """Return the element as selectors see it in the source queue."""
        given = self.cleaned_data
        return SelectorInput(
            given["body"],
            given["headers"],
            tries=given["tries"],
            queue=source.queue,
            ns=source.namespace,
        )


def _json(text: str) -> Any:
    try:
        return strict_json(text)
    except MalformedText as error:
        raise ValidationError(error.sentence()) from error


def _order(entry: tuple[int, forms.ModelForm]) -> tuple[float, int, int]:
    """Sort by requested position: entries moved up go before its previous holder, others after."""
    index, form = entry
    asked, former = form.cleaned_data.get("order"), form.fields["order"].initial
    if asked is None:
        return float("inf"), 0, index
    moved = 0 if asked == former else -1 if former is None or asked < former else 1
    return asked, moved, index
