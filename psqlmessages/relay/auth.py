"""Authentication of WebSockets and REST calls: signed tokens, and web identities."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final, NamedTuple

from django.contrib.auth import get_backends, get_user_model
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import PermissionsMixin
from django.core import signing
from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.utils.crypto import constant_time_compare

from psqlmessages.client.durations import Duration, as_timedelta
from psqlmessages.models import WebIdentity
from psqlmessages.models.names import NAME_CHARACTERS, patterns

# The purpose of tokens for WebSockets. A token is valid only for its own purpose.
PURPOSE: Final = "psqlmessages.token"


class Claim(NamedTuple):
    """The user and the expiry of a valid token."""

    user: Any
    expires_at: datetime


def token_for(user: Any, lifetime: Duration, *, purpose: str = PURPOSE) -> str:
    """Issue a token that lets a program connect as a user: ``Authorization: Bearer …``.

    It becomes invalid after its lifetime, and if the user's password changes or the user is
    deactivated or deleted. Anyone who has the token can act as the user, for this purpose only.
    """
    try:
        expires_at = datetime.now(UTC) + as_timedelta(lifetime, "lifetime")
    except OverflowError:
        raise ValueError(f"lifetime must end before the year 10000, not after {lifetime}") from None
    token: str = signing.dumps(
        {
            "user": user._meta.pk.value_to_string(user),
            "expires": expires_at.timestamp(),
            "password": next(_fingerprints(user, purpose)),
        },
        salt=purpose,
        compress=True,
    )
    return token


def read_token(token: str, *, purpose: str = PURPOSE) -> Claim | None:
    """Read a token; None if it is altered, has another purpose or is no longer valid."""
    try:
        content = signing.loads(token, salt=purpose)
        expires_at = datetime.fromtimestamp(content["expires"], tz=UTC)
        user = get_user_model()._default_manager.get(pk=content["user"])
    except (signing.BadSignature, get_user_model().DoesNotExist, ValidationError, ValueError):
        return None
    is_valid = (
        expires_at > datetime.now(UTC)
        and user.is_active
        and any(
            constant_time_compare(content["password"], valid)
            for valid in _fingerprints(user, purpose)
        )
    )
    return Claim(user, expires_at) if is_valid else None


def _fingerprints(user: Any, purpose: str) -> Iterator[str]:
    """Yield fingerprints of the user's password, made with the current and older secret keys."""
    # Use a digest of the session hash, because a token is signed but not encrypted.
    for auth_hash in chain([user.get_session_auth_hash()], user.get_session_auth_fallback_hash()):
        yield hashlib.sha256(f"{purpose} {auth_hash}".encode()).hexdigest()


# Permissions of many users


def permissions_of(users: Collection[Any], names: Collection[str]) -> dict[Any, set[str]]:
    """Return which of these permissions each active user (primary key) has, with one query.

    {} if only ``has_perm`` knows, because other code than Django's ModelBackend decides about
    permissions, or because the user model lacks Django's groups or permissions.
    """
    model = get_user_model()
    if not names or getattr(model, "has_perm", None) is not PermissionsMixin.has_perm:
        return {}
    if any(type(backend) is not ModelBackend for backend in get_backends()):
        return {}
    granted = {
        user.pk: set(names) if user.is_superuser else set() for user in users if user.is_active
    }
    codenames = {name.partition(".")[2] for name in names}
    try:
        direct, by_groups = (
            model._default_manager.order_by()
            .filter(**{"pk__in": granted, f"{path}__codename__in": codenames})
            .values_list("pk", f"{path}__content_type__app_label", f"{path}__codename")
            for path in ("user_permissions", "groups__permissions")
        )
    except FieldError:
        return {}
    # One query, or a permission that moves from a user to a group might be seen at neither.
    for user, app, codename in direct.union(by_groups):
        granted[user] |= {f"{app}.{codename}"} & {*names}
    return granted


# Identities: the nodes that a web user may act as, from the rows of WebIdentity.


def may_act_as(user: Any, ident: str) -> bool:
    """Return whether a user, or a group of the user, may act as a node. One or two queries.

    The node itself may then do only what the rules allow.
    """
    if not ident or len(ident) > NAME_CHARACTERS or ident.endswith("*"):
        # A name that ends in * is a pattern, never the name of a node.
        return False
    return matches_any(ident, idents_of([user.pk])[user.pk])


def idents_of(users: Collection[Any]) -> dict[Any, set[str]]:
    """Return the allowed node names and patterns of each user (primary key). One or two queries."""
    idents: dict[Any, set[str]] = {user: set() for user in users}
    fields = ["user"]
    # A custom user model may lack Django's groups.
    with suppress(FieldDoesNotExist):
        if get_user_model()._meta.get_field("groups").related_query_name() == "user":
            fields.append("group__user")
    for field in fields:
        rows = WebIdentity.objects.filter(**{f"{field}__in": users})
        for user, ident in rows.values_list(field, "ident"):
            if user in idents:
                idents[user].add(ident)
    return idents


def matches_any(ident: str, allowed: Iterable[str]) -> bool:
    """Return whether an allowed name or pattern matches a node name."""
    return not set(patterns(ident)).isdisjoint(allowed)
