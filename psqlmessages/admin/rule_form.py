"""The form of a rule, on its own page and in the list: what is refused, and why."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError

from psqlmessages.admin import calls
from psqlmessages.definitions.entries import Rule
from psqlmessages.models import Auth


class RuleForm(forms.ModelForm):
    """Refuses what cannot mean anything, and what was changed by somebody else meanwhile."""

    # Of the request: set on the class that the admin makes for it.
    gate: ClassVar[calls.Gate]

    class Meta:
        model = Auth
        fields: ClassVar = list(Rule._fields)
        help_texts: ClassVar = {
            "role": "PostgreSQL role allowed: the one that logs in, or a group role it is in.",
            "mode": (
                "W: may send. R: may listen. RW: both. O: receives all, and is not counted as a"
                " listener (topics only). Rpc: always W, may ask; answering needs no rule."
            ),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            if isinstance(field, forms.CharField):
                # A blank may belong to a name: it is remarked, and never taken away unseen.
                field.strip = False
            if self.instance.pk:
                # So that the page tells what it showed: see _present.
                field.show_hidden_initial = True

    def clean(self) -> dict[str, Any]:
        """Look at the rule as a whole, with all other changes held up from here on."""
        cleaned = super().clean() or self.cleaned_data
        if self.errors or (self.instance.pk and not self.has_changed()):
            return cleaned
        if self.gate.fault:
            raise ValidationError(self.gate.fault)
        values = {**self._present(), **cleaned}
        for name, sentence in Rule(**{field: values[field] for field in Rule._fields}).faults():
            self.add_error(name if name in self.fields else None, sentence)
        return cleaned

    def _present(self) -> dict[str, Any]:
        """Read the rule as it is now; ValidationError unless it is as the page showed it."""
        if not self.instance.pk:
            return {}
        rules = Auth.objects.using(calls.database()).filter(pk=self.instance.pk)
        present = rules.values(*Rule._fields).first()
        if present is None:
            raise ValidationError("Somebody deleted this rule meanwhile.")
        changed = [
            f"{self.fields[name].label or name} is now {present[name]}"
            for name in self.fields
            if name in present
            and self.data.get(self.add_initial_prefix(name), str(present[name]))
            != str(present[name])
        ]
        if changed:
            raise ValidationError(
                f"Somebody changed this rule meanwhile: {', '.join(changed)}. Load the page anew,"
                " and change it again if it is still needed."
            )
        return present


class RuleRowForm(RuleForm):
    """A row of the list: the modes are named by their letters, so that the columns fit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["mode"].choices = [(mode, mode) for mode in Auth.Mode.values]
