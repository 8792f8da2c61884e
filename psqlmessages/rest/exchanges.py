"""Endpoints of exchanges: definition, start, stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db.models import Sum
from django.http import HttpRequest
from ninja import Router, Status

from psqlmessages.exchanges.store import definitions, files, permissions, repository
from psqlmessages.exchanges.store.definitions import MalformedExchanges
from psqlmessages.models import Exchange, ExchangeCount
from psqlmessages.rest import schemas
from psqlmessages.rest.auth import missing
from psqlmessages.rest.errors import ApiError
from psqlmessages.rest.schemas import REFUSALS, body_of, caller_of, name_of
from psqlmessages.wire import MalformedText

# Names may contain slashes and routes match in order, so longer paths come first.
router = Router(tags=["exchanges"])

T = TypeVar("T")
Outcome = ExchangeCount.Outcome
_OUTCOMES = (Outcome.OK, Outcome.NO_ROUTE, Outcome.TOO_MANY_HOPS, Outcome.FAILED)
_DEFINITION = {
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
                    },
                },
            },
            "application/yaml": {"schema": {"type": "string"}},
        },
    }
}


class Malformed(ApiError):
    """An invalid definition, with one line per error."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(400, errors[0])
        self.errors = errors


async def _run(request: HttpRequest, permission: str, work: Callable[..., T], *given: Any) -> T:
    """Check the permission, then run ``work``, both in the thread of this request."""

    def permitted() -> T:
        _see_permission(request, permission)
        try:
            return work(*given)
        except Exchange.DoesNotExist:
            raise ApiError(404, "there is no exchange with this name") from None

    return await sync_to_async(permitted)()


def _see_permission(request: HttpRequest, permission: str) -> None:
    if lacked := missing(caller_of(request), [f"psqlmessages.{permission}"]):
        raise ApiError(403, f"this needs a staff user with {lacked}")


@router.get("/x", response={200: schemas.Exchanges, **REFUSALS})
async def list_exchanges(request: HttpRequest):
    """List the exchanges."""
    return {"exchanges": await _run(request, "view_exchange", _states)}


@router.post("/x/{ks_name:name}/start", response={200: schemas.Running, **REFUSALS})
async def start(request: HttpRequest, name: str):
    """Start the exchange: processes of ``exchange run`` start its workers."""
    return await _run(request, "change_exchange", _set, name_of(name, "name"), True)


@router.post("/x/{ks_name:name}/stop", response={200: schemas.Running, **REFUSALS})
async def stop(request: HttpRequest, name: str):
    """Stop the exchange: its workers finish their current batch first."""
    return await _run(request, "change_exchange", _set, name_of(name, "name"), False)


@router.get("/x/{ks_name:name}", response={200: schemas.ExchangeState, **REFUSALS})
async def show(request: HttpRequest, name: str):
    """Show an exchange."""
    return await _run(request, "view_exchange", _state, name_of(name, "name"))


@router.put(
    "/x/{ks_name:name}",
    response={
        (200, 201): schemas.ExchangePut,
        409: schemas.ErrorBody,
        413: schemas.ErrorBody,
        **REFUSALS,
        400: schemas.ErrorList,
    },
    openapi_extra=_DEFINITION,
)
async def put(request: HttpRequest, name: str, replace: bool = False):
    """Store a definition, in the format of a definition file without the exchange's name.

    A new exchange runs: 201. An existing one is replaced only with ``replace``, and its running
    state does not change: 200. Otherwise 409.
    """
    text = body_of(request, files.MAX_BYTES)
    permission = "change_exchange" if replace else "add_exchange"
    return await _run(request, permission, _put, request, name_of(name, "name"), text, replace)


@router.delete("/x/{ks_name:name}", response={204: None, **REFUSALS})
async def delete(request: HttpRequest, name: str):
    """Delete an exchange, but not its queues."""
    await _run(request, "delete_exchange", _delete, name_of(name, "name"))
    return Status(204, None)


# Functions that run in the thread


def _states() -> list[dict[str, Any]]:
    counted: dict[Any, dict[str, int]] = {}
    sums = ExchangeCount.objects.filter(outcome__in=_OUTCOMES).values_list("exchange", "outcome")
    for key, outcome, count in sums.annotate(Sum("count")):
        counted.setdefault(key, {})[outcome] = count
    return [_as_json(row, counted.get(row.pk, {})) for row in repository.rows()]


def _state(name: str) -> dict[str, Any]:
    row = repository.rows().get(name=name)
    sums = row.counts.filter(outcome__in=_OUTCOMES).values_list("outcome").annotate(Sum("count"))
    return _as_json(row, dict(sums))


def _as_json(row: Exchange, counted: dict[str, int]) -> dict[str, Any]:
    return {
        "name": row.name,
        "running": row.is_running,
        "definition": repository.to_definition(row).to_document(),
        "counts": {str(outcome): counted.get(outcome, 0) for outcome in _OUTCOMES},
    }


def _put(request: HttpRequest, name: str, text: bytes, replace: bool) -> Status:
    try:
        definition = definitions.parse_exchange(name, files.parse(text))
    except MalformedText as error:
        raise Malformed([error.sentence()]) from None
    except files.YAMLMissing as error:
        raise Malformed([str(error)]) from None
    except MalformedExchanges as error:
        raise Malformed([str(problem) for problem in error.errors]) from None
    was_there = Exchange.objects.filter(name=name).exists()
    if not was_there:
        _see_permission(request, "add_exchange")
    try:
        row = repository.store(definition, replace=replace)
    except repository.ExchangeExists:
        raise ApiError(409, f"an exchange {name} already exists: ?replace=1 replaces it") from None
    missing = permissions.find_missing_rules([definition])
    answer = {
        "name": name,
        "running": row.is_running,
        "missing_rules": [f"{rule.namespace}: {rule.statement}" for rule in missing.rules],
        "unasked": [f"{alias}: {reason}" for alias, reason in missing.errors.items()],
    }
    return Status(200 if was_there else 201, answer)


def _delete(name: str) -> None:
    if not repository.delete([name]):
        raise Exchange.DoesNotExist


def _set(name: str, is_running: bool) -> dict[str, bool]:
    repository.set_running(name, is_running)
    return {"running": is_running}
