"""Remarks: what is saved all the same, and hardly meant."""

from __future__ import annotations

from collections.abc import Iterable

from psqlmessages.admin import calls
from psqlmessages.definitions.entries import Rule


def remarks_of(rules: Iterable[Rule]) -> list[str]:
    """Return the sentences about some rules, each once."""
    rules = list(rules)
    sentences = [
        f"PostgreSQL has no role {role}: a rule for it lets nobody in until the role is made."
        for role in calls.missing_roles(rule.role for rule in rules)
    ]
    return list(dict.fromkeys([*sentences, *(text for rule in rules for text in rule.remarks())]))
