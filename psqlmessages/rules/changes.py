"""Differences between a document and the current rules and web identities, and applying them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from psqlmessages.models import Auth, WebIdentity
from psqlmessages.rules.document import Definitions, Identity, MalformedDefinitions, RuleEntry

_BATCH = 1000


@dataclass(frozen=True)
class RuleDifference:
    """The changes to apply, in this order, so that no node temporarily loses a right."""

    rules_added: tuple[RuleEntry, ...] = ()
    rules_changed: tuple[tuple[RuleEntry, RuleEntry], ...] = ()
    rules_removed: tuple[RuleEntry, ...] = ()
    identities_added: tuple[Identity, ...] = ()
    identities_removed: tuple[Identity, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    @property
    def rules(self) -> set[RuleEntry]:
        """All affected rules, in their old and new versions."""
        changed = (rule for pair in self.rules_changed for rule in pair)
        return {*self.rules_added, *changed, *self.rules_removed}

    def permissions(self) -> set[str]:
        """Return the Django permissions that the changes require."""
        needed = {
            "add_auth": self.rules_added,
            "change_auth": self.rules_changed,
            "delete_auth": self.rules_removed,
            "add_webidentity": self.identities_added,
            "delete_webidentity": self.identities_removed,
        }
        return {f"psqlmessages.{name}" for name, entries in needed.items() if entries}

    def summary(self) -> str:
        """Return the numbers of changes as text."""
        counts = {
            "added": len(self.rules_added) + len(self.identities_added),
            "changed": len(self.rules_changed),
            "removed": len(self.rules_removed) + len(self.identities_removed),
        }
        return ", ".join(f"{count:,} {verb}" for verb, count in counts.items())

    def lines(self) -> list[str]:
        """Return one line per change, for terminals."""
        return [
            *(f"+ rule {rule}" for rule in self.rules_added),
            *(f"~ rule {old} -> {new.mode}, {new.timeout} s" for old, new in self.rules_changed),
            *(f"- rule {rule}" for rule in self.rules_removed),
            *(f"+ {identity}" for identity in self.identities_added),
            *(f"- {identity}" for identity in self.identities_removed),
        ]


class DefinitionsChanged(Exception):
    """The rules or web identities have changed since the difference was computed."""


def present(using: str = DEFAULT_DB_ALIAS) -> Definitions:
    """Read the rules and web identities of a database."""
    rules = Auth.objects.using(using).values_list(*RuleEntry._fields)
    identities = WebIdentity.objects.using(using).values_list(
        f"user__{get_user_model().USERNAME_FIELD}", "group__name", "ident"
    )
    return Definitions(tuple(map(RuleEntry._make, rules)), tuple(map(Identity._make, identities)))


def fingerprint(definitions: Definitions) -> str:
    """Return a text that is the same for equal definitions only."""
    return hashlib.sha256(json.dumps(definitions.as_json()).encode()).hexdigest()


def difference(now: Definitions, wanted: Definitions, *, replace: bool = False) -> RuleDifference:
    """Compare definitions. With ``replace``, remove entries that ``wanted`` does not contain.

    A part that is None in ``wanted`` never changes.
    """
    there = {rule.key: rule for rule in now.rules or ()}
    asked = {rule.key: rule for rule in wanted.rules or ()}
    identities_there = set(now.web_identities or ())
    identities_asked = set(wanted.web_identities or ())
    return RuleDifference(
        tuple(rule for key, rule in asked.items() if key not in there),
        tuple(
            (there[key], rule) for key, rule in asked.items() if key in there and there[key] != rule
        ),
        tuple(rule for key, rule in there.items() if key not in asked)
        if replace and wanted.rules is not None
        else (),
        tuple(entry for entry in wanted.web_identities or () if entry not in identities_there),
        tuple(entry for entry in now.web_identities or () if entry not in identities_asked)
        if replace and wanted.web_identities is not None
        else (),
    )


def check_users_and_groups(wanted: Definitions, using: str = DEFAULT_DB_ALIAS) -> None:
    """Raise MalformedDefinitions if a web identity names an unknown user or group."""
    identities = wanted.web_identities or ()
    users = _keys_of_users((entry.user for entry in identities), using)
    groups = _keys_of_groups((entry.group for entry in identities), using)
    errors = [
        *(
            f"There is no user {entry.user} for the ident {entry.ident}."
            for entry in identities
            if entry.user is not None and entry.user not in users
        ),
        *(
            f"There is no group {entry.group} for the ident {entry.ident}."
            for entry in identities
            if entry.group is not None and entry.group not in groups
        ),
    ]
    if errors:
        raise MalformedDefinitions(errors)


def apply(todo: RuleDifference, shown: str, using: str = DEFAULT_DB_ALIAS) -> None:
    """Apply changes in one transaction; raise DefinitionsChanged if ``shown`` is outdated.

    ``shown`` is the fingerprint of the definitions that were compared. Raises PostgreSQL's error
    if rules cannot be changed now.
    """
    with transaction.atomic(using=using):
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT messages._lock_rules()")
            table = connections[using].ops.quote_name(WebIdentity._meta.db_table)
            cursor.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
        if fingerprint(present(using)) != shown:
            raise DefinitionsChanged
        _apply_rules(todo, using)
        _apply_identities(todo, using)


def _apply_rules(todo: RuleDifference, using: str) -> None:
    rules = Auth.objects.using(using)
    keys = {tuple(key): pk for pk, *key in rules.values_list("pk", "role", "ident", "type", "dest")}
    rules.bulk_create([Auth(**rule._asdict()) for rule in todo.rules_added], _BATCH)
    rules.bulk_update(
        [Auth(pk=keys[new.key], **new._asdict()) for _, new in todo.rules_changed],
        ["mode", "timeout"],
        _BATCH,
    )
    rules.filter(pk__in=[keys[rule.key] for rule in todo.rules_removed]).delete()


def _apply_identities(todo: RuleDifference, using: str) -> None:
    identities = WebIdentity.objects.using(using)
    touched = [*todo.identities_added, *todo.identities_removed]
    users = _keys_of_users((entry.user for entry in touched), using)
    groups = _keys_of_groups((entry.group for entry in touched), using)

    def fields_of(entry: Identity) -> dict[str, Any]:
        return {
            "user_id": users[entry.user] if entry.user is not None else None,
            "group_id": groups[entry.group] if entry.group is not None else None,
            "ident": entry.ident,
        }

    identities.bulk_create(
        [WebIdentity(**fields_of(entry)) for entry in todo.identities_added], _BATCH
    )
    gone = {tuple(fields_of(entry).values()) for entry in todo.identities_removed}
    there = identities.values_list("pk", "user_id", "group_id", "ident") if gone else ()
    identities.filter(pk__in=[pk for pk, *key in there if tuple(key) in gone]).delete()


def _keys_of_users(names: Iterable[str | None], using: str) -> dict[str, Any]:
    model = get_user_model()
    wanted = {name for name in names if name is not None}
    users = model._default_manager.using(using).filter(**{f"{model.USERNAME_FIELD}__in": wanted})
    return {user.get_username(): user.pk for user in users}


def _keys_of_groups(names: Iterable[str | None], using: str) -> dict[str, Any]:
    wanted = {name for name in names if name is not None}
    return dict(Group.objects.using(using).filter(name__in=wanted).values_list("name", "pk"))
