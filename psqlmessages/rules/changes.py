"""Changes of rules and web identities: compare them with a document, and apply the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from psqlmessages.models import Auth, WebIdentity
from psqlmessages.rules.document import Definitions, Identity, MalformedDefinitions, RuleEntry

_BATCH_SIZE = 1000


@dataclass(frozen=True)
class RuleDifference:
    """Changes of rules and web identities.

    Additions are applied first, so a node keeps a permission that moves to another rule.
    """

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
        added = len(self.rules_added) + len(self.identities_added)
        removed = len(self.rules_removed) + len(self.identities_removed)
        return f"{added:,} added, {len(self.rules_changed):,} changed, {removed:,} removed"

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


def read_current(using: str = DEFAULT_DB_ALIAS) -> Definitions:
    """Read the rules and web identities of a database."""
    rules = Auth.objects.using(using).values_list(*RuleEntry._fields)
    identities = WebIdentity.objects.using(using).values_list(
        f"user__{get_user_model().USERNAME_FIELD}", "group__name", "ident"
    )
    return Definitions(tuple(map(RuleEntry._make, rules)), tuple(map(Identity._make, identities)))


def fingerprint(definitions: Definitions) -> str:
    """Return a hash of definitions. It does not depend on the order of their entries."""
    return hashlib.sha256(json.dumps(definitions.as_json()).encode()).hexdigest()


def difference(
    current: Definitions, wanted: Definitions, *, is_replacing: bool = False
) -> RuleDifference:
    """Return the changes from ``current`` to ``wanted``; only ``is_replacing`` removes entries.

    A part that is None in ``wanted`` does not change.
    """
    current_rules = {rule.key: rule for rule in current.rules or ()}
    wanted_rules = {rule.key: rule for rule in wanted.rules or ()}
    current_identities = dict.fromkeys(current.web_identities or ())
    wanted_identities = dict.fromkeys(wanted.web_identities or ())
    removable_rules = current_rules if is_replacing and wanted.rules is not None else {}
    removes_identities = is_replacing and wanted.web_identities is not None
    removable_identities = current_identities if removes_identities else {}
    return RuleDifference(
        tuple(rule for key, rule in wanted_rules.items() if key not in current_rules),
        tuple(
            (current_rules[key], rule)
            for key, rule in wanted_rules.items()
            if key in current_rules and current_rules[key] != rule
        ),
        tuple(rule for key, rule in removable_rules.items() if key not in wanted_rules),
        tuple(entry for entry in wanted_identities if entry not in current_identities),
        tuple(entry for entry in removable_identities if entry not in wanted_identities),
    )


def check_users_and_groups(wanted: Definitions, using: str = DEFAULT_DB_ALIAS) -> None:
    """Raise MalformedDefinitions if a web identity names an unknown user or group."""
    identities = wanted.web_identities or ()
    user_pks, group_pks = _find_pks(identities, using)
    errors = [
        f"There is no {kind} {name} for the node {entry.ident}."
        for kind, pks in (("user", user_pks), ("group", group_pks))
        for entry in identities
        if (name := getattr(entry, kind)) not in pks
    ]
    if errors:
        raise MalformedDefinitions(errors)


def apply(changes: RuleDifference, expected: str, using: str = DEFAULT_DB_ALIAS) -> None:
    """Apply changes in one transaction.

    Raises DefinitionsChanged unless the current definitions have the fingerprint ``expected``, and
    Django's DatabaseError, for instance if another change of rules is not committed yet.
    """
    with transaction.atomic(using=using):
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT messages._lock_rules()")
            table = connections[using].ops.quote_name(WebIdentity._meta.db_table)
            cursor.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
        if fingerprint(read_current(using)) != expected:
            raise DefinitionsChanged
        _apply_rules(changes, using)
        _apply_identities(changes, using)


def _apply_rules(changes: RuleDifference, using: str) -> None:
    rules = Auth.objects.using(using)
    pks = {tuple(key): pk for pk, *key in rules.values_list("pk", "role", "ident", "type", "dest")}
    rules.bulk_create([Auth(**rule._asdict()) for rule in changes.rules_added], _BATCH_SIZE)
    rules.bulk_update(
        [Auth(pk=pks[new.key], **new._asdict()) for _, new in changes.rules_changed],
        ["mode", "timeout"],
        _BATCH_SIZE,
    )
    rules.filter(pk__in=[pks[rule.key] for rule in changes.rules_removed]).delete()


def _apply_identities(changes: RuleDifference, using: str) -> None:
    identities = WebIdentity.objects.using(using)
    identity_entries = (*changes.identities_added, *changes.identities_removed)
    user_pks, group_pks = _find_pks(identity_entries, using)
    added = [
        WebIdentity(user_id=user_pks[user], group_id=group_pks[group], ident=ident)
        for user, group, ident in changes.identities_added
    ]
    identities.bulk_create(added, _BATCH_SIZE)
    removed = {
        (user_pks[user], group_pks[group], ident)
        for user, group, ident in changes.identities_removed
    }
    existing = identities.values_list("pk", "user_id", "group_id", "ident") if removed else ()
    identities.filter(pk__in=[pk for pk, *key in existing if tuple(key) in removed]).delete()


def _find_pks(
    identities: Collection[Identity], using: str
) -> tuple[dict[str | None, Any], dict[str | None, Any]]:
    """Return the primary keys of existing users by name, and of groups. None maps to None."""
    model = get_user_model()
    names, group_names = {each.user for each in identities}, {each.group for each in identities}
    users = model._default_manager.using(using).filter(**{f"{model.USERNAME_FIELD}__in": names})
    groups = Group.objects.using(using).filter(name__in=group_names).values_list("name", "pk")
    user_pks = {user.get_username(): user.pk for user in users}
    return {None: None, **user_pks}, {None: None, **dict(groups)}
