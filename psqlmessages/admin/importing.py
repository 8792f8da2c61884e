"""The plan of an import: shown first, kept in the page, and carried out only as it was shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from django.conf import settings
from django.contrib.admin.models import ADDITION, CHANGE, DELETION
from django.contrib.auth.models import AbstractBaseUser
from django.core import signing
from django.db import transaction
from django.db.models import Model
from django.http import HttpRequest

from psqlmessages.admin import calls, history
from psqlmessages.admin.touched import Touched
from psqlmessages.definitions import changes, document
from psqlmessages.definitions.entries import Identity, Rule
from psqlmessages.models import Auth, WebIdentity

_SALT = "psqlmessages.import"
_LIFETIME = timedelta(hours=1)
# What the page sends besides the plan.
_ROOM_BYTES = 10_000


class PlanNotUsable(Exception):
    """A page whose plan is too old, was altered, or has become impossible; says so."""


@dataclass(frozen=True)
class Plan:
    """A document, what is there now, and the fingerprint of what was there when it was shown."""

    wanted: document.Definitions
    is_replacing: bool
    now: document.Definitions
    shown: str

    @classmethod
    def of(cls, wanted: document.Definitions, *, is_replacing: bool) -> Plan:
        """Compare a document with what is there now."""
        now = changes.present(calls.database())
        return cls(wanted, is_replacing, now, changes.fingerprint(now))

    @classmethod
    def loads(cls, text: str, user: AbstractBaseUser) -> Plan:
        """Read the plan that `dumps` wrote for this user; raise PlanNotUsable."""
        try:
            fields = signing.loads(text, salt=_SALT + str(user.pk), max_age=_LIFETIME)
            wanted = document.read(fields["document"])
            changes.see_that_names_are_known(wanted, calls.database())
        except signing.BadSignature as error:
            raise PlanNotUsable(
                "Nothing was saved: the page was too old, or was altered. Choose the document"
                " again."
            ) from error
        except document.MalformedDefinitions as error:
            raise PlanNotUsable(f"Nothing was saved. {error}") from error
        now = changes.present(calls.database())
        return cls(wanted, fields["replace"], now, fields["shown"])

    def dumps(self, user: AbstractBaseUser) -> str:
        """Write the plan so that only this user can send it back, and as it is."""
        fields = {
            "document": document.write(self.wanted),
            "replace": self.is_replacing,
            "shown": self.shown,
        }
        return signing.dumps(fields, salt=_SALT + str(user.pk), compress=True)

    def anew(self) -> Plan:
        """Compare with what is there by now."""
        return self.of(self.wanted, is_replacing=self.is_replacing)

    @cached_property
    def todo(self) -> changes.Difference:
        """What is to be done."""
        return changes.difference(self.now, self.wanted, replace=self.is_replacing)

    @property
    def is_stale(self) -> bool:
        """Whether something has changed since it was shown."""
        return changes.fingerprint(self.now) != self.shown

    def lacking(self, user: AbstractBaseUser) -> set[str]:
        """Return the permissions that the user would need besides."""
        return {name for name in self.todo.permissions() if not user.has_perm(name)}

    def carry_out(self, request: HttpRequest) -> Touched:
        """Do it all, or nothing; raise as `changes.apply` does. Not for a stale plan."""
        touched, using, todo = Touched(), calls.database(), self.todo
        with transaction.atomic(using=using):
            with touched.by(rule.ident for rule in todo.rules):
                rules, identities = _rules(using), _identities(using)
                removed = [rules.get(rule.key) for rule in todo.rules_removed]
                removed += [identities.get(entry) for entry in todo.identities_removed]
                history.log(
                    request,
                    [(entry, DELETION, f"Import: deleted {entry}.") for entry in removed if entry],
                )
                changes.apply(todo, self.shown, using)
            rules = _rules(using)
            kept = [*todo.rules_added, *(new for _, new in todo.rules_changed)]
            touched.applies(rules[rule.key].pk for rule in kept)
            history.log(request, _entries(todo, rules, _identities(using)))
        return touched


def is_too_large(plan: str) -> bool:
    """Tell whether Django would refuse the page that holds this plan."""
    most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return most is not None and len(plan) + _ROOM_BYTES > most


def _rules(using: str) -> dict[tuple[str, str, str, str], Auth]:
    rules = Auth.objects.using(using)
    return {(rule.role, rule.ident, rule.type, rule.dest): rule for rule in rules}


def _identities(using: str) -> dict[Identity, WebIdentity]:
    identities = WebIdentity.objects.using(using).select_related("user", "group")
    return {
        Identity(
            entry.user.get_username() if entry.user else None,
            entry.group.name if entry.group else None,
            entry.ident,
        ): entry
        for entry in identities
    }


def _entries(
    todo: changes.Difference,
    rules: dict[tuple[str, str, str, str], Auth],
    identities: dict[Identity, WebIdentity],
) -> Iterator[tuple[Model, int, str]]:
    """Yield what the history says of what was added and changed."""
    for rule in todo.rules_added:
        yield rules[rule.key], ADDITION, f"Import: added {rule}."
    for old, new in todo.rules_changed:
        yield rules[new.key], CHANGE, f"Import: {_changes(old, new)}."
    for identity in todo.identities_added:
        yield identities[identity], ADDITION, f"Import: added {identity}."


def _changes(old: Rule, new: Rule) -> str:
    return "; ".join(
        f"{field}: {before} → {after}"
        for field, before, after in zip(Rule._fields, old, new, strict=True)
        if before != after
    )
