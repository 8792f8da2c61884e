"""Endpoints of exchanges: list, definition, start, stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import transaction
from django.http import HttpRequest
from ninja import Router, Status

from psqlmessages.exchanges.model import NO_ROUTE_ACTIONS
from psqlmessages.exchanges.store import definitions, files, permissions, repository
from psqlmessages.exchanges.store.definitions import MalformedExchanges
from psqlmessages.exchanges.store.stats import (
    ELEMENT_OUTCOMES,
    count_outcomes,
    format_state,
    read_missing_rules,
)
from psqlmessages.models import Exchange
from psqlmessages.operator_log import ActionFlag, log_action
from psqlmessages.orm import resolve_alias
from psqlmessages.rest import schemas
from psqlmessages.rest.errors import ApiError
from psqlmessages.rest.schemas import ERRORS, check_name, get_caller, read_body

# Names may contain slashes, and the first matching route counts: define the longer paths first.
router = Router(tags=["exchanges"])

T = TypeVar("T")
_DEFINITION_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["src", "dst"],
                    "properties": {
                        "consumer": {"type": "object"},
                        "src": {"type": "object"},
                        "dst": {"type": "array", "items": {"type": "object"}},
                        "no_route": {"enum": [*NO_ROUTE_ACTIONS], "default": "queue"},
                        "running": {"type": "boolean", "default": True},
                    },
                },
            },
            "application/yaml": {"schema": {"type": "string"}},
        },
    }
}


async def _set_running(request: HttpRequest, name: str, *, is_running: bool) -> dict[str, bool]:
    check_name(name, "name")
    await _run_as_staff(request, "change_exchange", _start_or_stop, request, name, is_running)
    return {"running": is_running}


async def _run_as_staff(
    request: HttpRequest, permission: str, function: Callable[..., T], *arguments: Any
) -> T:
    """Call a function in a thread if a staff user has the permission; raise ApiError 403 or 404."""

    def check_and_run() -> T:
        _check_permission(request, permission)
        try:
            return function(*arguments)
        except Exchange.DoesNotExist:
            raise ApiError(404, "there is no exchange with this name") from None

    return await sync_to_async(check_and_run)()


def _check_permission(request: HttpRequest, permission: str) -> None:
    """Raise ApiError 403 if the user is not a staff user with this permission."""
    user = get_caller(request).user
    if not (user.is_active and user.is_staff):
        raise ApiError(403, "this needs a staff user")
    if not user.has_perm(f"psqlmessages.{permission}"):
        raise ApiError(403, f"this needs a staff user with psqlmessages.{permission}")


@router.get("/x", response={200: schemas.Exchanges, **ERRORS})
async def list_exchanges(request: HttpRequest):
    """List the exchanges."""
    return {"exchanges": await _run_as_staff(request, "view_exchange", _list_exchanges)}


@router.post("/x/{messages_name:name}/start", response={200: schemas.Running, **ERRORS})
async def start(request: HttpRequest, name: str):
    """Start the exchange: processes of ``exchange run`` start its workers."""
    return await _set_running(request, name, is_running=True)


@router.post("/x/{messages_name:name}/stop", response={200: schemas.Running, **ERRORS})
async def stop(request: HttpRequest, name: str):
    """Stop the exchange: its workers finish their current batch first."""
    return await _set_running(request, name, is_running=False)


@router.get("/x/{messages_name:name}", response={200: schemas.ExchangeState, **ERRORS})
async def show(request: HttpRequest, name: str):
    """Show an exchange."""
    return await _run_as_staff(request, "view_exchange", _find_exchange, check_name(name, "name"))


@router.put(
    "/x/{messages_name:name}",
    response={
        (200, 201): schemas.ExchangePut,
        409: schemas.ErrorBody,
        413: schemas.ErrorBody,
        **ERRORS,
        400: schemas.ErrorList,
    },
    openapi_extra=_DEFINITION_BODY,
)
async def put(request: HttpRequest, name: str, replace: bool = False):
    """Store a definition, in the format of a definition file without the exchange's name.

    201: the exchange is new, and runs unless ``running`` is false. 200: with ``replace``, an
    existing exchange was replaced; it runs if it ran before. 409: it exists, without ``replace``.
    """
    check_name(name, "name")
    text = read_body(request, files.MAX_BYTES)
    permission = "change_exchange" if replace else "add_exchange"
    return await _run_as_staff(request, permission, _store_exchange, request, name, text, replace)


@router.delete("/x/{messages_name:name}", response={204: None, **ERRORS})
async def delete(request: HttpRequest, name: str):
    """Delete an exchange, but not its queues."""
    check_name(name, "name")
    await _run_as_staff(request, "delete_exchange", _delete_exchange, request, name)
    return Status(204, None)


# Called by _run_as_staff in a thread


def _list_exchanges(**filters: str) -> list[dict[str, Any]]:
    using = resolve_alias(None)
    rows = list(repository.rows(using).filter(**filters))
    counts, missing = count_outcomes(rows, using), read_missing_rules(using)
    return [
        {
            "name": row.name,
            "running": row.is_running,
            "state": format_state(is_running=row.is_running, is_blocked=row.pk in missing),
            "missing_rules": missing.get(row.pk, []),
            "definition": repository.to_definition(row).to_document(),
            "counts": {str(outcome): counts[row.pk, outcome] for outcome in ELEMENT_OUTCOMES},
        }
        for row in rows
    ]


def _find_exchange(name: str) -> dict[str, Any]:
    for exchange in _list_exchanges(name=name):
        return exchange
    raise Exchange.DoesNotExist


def _store_exchange(request: HttpRequest, name: str, text: bytes, replace: bool) -> Status:
    try:
        definition = definitions.parse_exchange(name, definitions.read_document(text))
    except files.YAMLMissing as error:
        raise ApiError(400, str(error), errors=[str(error)]) from None
    except MalformedExchanges as error:
        errors = list(map(str, error.errors))
        raise ApiError(400, errors[0], errors=errors) from None
    using = resolve_alias(None)
    exists = Exchange.objects.using(using).filter(name=name).exists()
    if not exists:
        _check_permission(request, "add_exchange")
    try:
        with transaction.atomic(using=using):
            row = repository.store(definition, replace=replace, using=using)
            flag = ActionFlag.CHANGE if exists else ActionFlag.ADDITION
            verb = "changed" if exists else "added"
            _log(request, row, flag, f"{verb} {definition.to_document()}")
    except repository.ExchangeExists:
        raise ApiError(409, f"exchange {name} exists: add ?replace=1 to replace it") from None
    missing = permissions.find_missing_rules([definition], using)
    answer = {
        "name": name,
        "running": row.is_running,
        "missing_rules": list(map(str, missing.rules)),
        "unasked": [f"{alias}: {reason}" for alias, reason in missing.errors.items()],
    }
    return Status(200 if exists else 201, answer)


def _start_or_stop(request: HttpRequest, name: str, is_running: bool) -> None:
    using = resolve_alias(None)
    with transaction.atomic(using=using):
        if repository.set_running(name, is_running, using):
            row = Exchange.objects.using(using).get(name=name)
            _log(request, row, ActionFlag.CHANGE, "started" if is_running else "stopped")


def _delete_exchange(request: HttpRequest, name: str) -> None:
    using = resolve_alias(None)
    with transaction.atomic(using=using):
        row = repository.rows(using).get(name=name)
        text = f"deleted {repository.to_definition(row).to_document()}"
        if not repository.delete([name], using):
            raise Exchange.DoesNotExist
        _log(request, row, ActionFlag.DELETION, text)


def _log(request: HttpRequest, exchange: Exchange, flag: ActionFlag, text: str) -> None:
    """Add an entry to the exchange's history; call it in the transaction of the change."""
    log_action(get_caller(request).user, exchange, flag, f"REST: {text}.")
