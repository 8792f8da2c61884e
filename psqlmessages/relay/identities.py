"""Identities: which nodes a web user may be, by the rows of WebIdentity."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import FieldDoesNotExist

from psqlmessages.models import WebIdentity
from psqlmessages.models.names import NAME_CHARACTERS, patterns


def may_be(user: Any, ident: str) -> bool:
    """Tell whether a user, or one of the user's groups, may be a node. One or two queries.

    What the node may do then is up to the rules.
    """
    if not ident or len(ident) > NAME_CHARACTERS or ident.endswith("*"):
        # A name that ends in * is a pattern, and never the name of a node.
        return False
    return any(rows.filter(ident__in=patterns(ident)).exists() for _, rows in _of([user.pk]))


def idents_of(users: Collection[Any]) -> dict[Any, set[str]]:
    """Read the names and patterns of many users, by their primary keys; in two queries."""
    found: dict[Any, set[str]] = {user: set() for user in users}
    for field, rows in _of(users):
        for user, ident in rows.values_list(field, "ident"):
            if user in found:
                found[user].add(ident)
    return found


def is_meant(ident: str, allowed: Iterable[str]) -> bool:
    """Tell whether any of these names and patterns means an ident."""
    return not set(patterns(ident)).isdisjoint(allowed)


def _of(users: Collection[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of users, then those of their groups, each with the way to the user."""
    yield "user", WebIdentity.objects.filter(user__in=users)
    if _has_groups():
        yield "group__user", WebIdentity.objects.filter(group__user__in=users)


def _has_groups() -> bool:
    """Whether the project's users have Django's groups: a user model of one's own need not."""
    try:
        return bool(get_user_model()._meta.get_field("groups").related_query_name() == "user")
    except FieldDoesNotExist:
        return False
