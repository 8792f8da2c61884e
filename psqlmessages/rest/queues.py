"""Queues: what they hold, pauses, and what becomes of what was reserved."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Router

from psqlmessages.rest import elements, schemas
from psqlmessages.rest.faults import Refused
from psqlmessages.rest.namespaces import Namespace, namespace, namespaces
from psqlmessages.rest.requests import acting, caller_of, name_of
from psqlmessages.rest.schemas import REFUSALS

# Names may hold slashes, and paths are tried in their order: the longer ones have to come first.
router = Router(tags=["queues"])


def place(request: HttpRequest, ns: str, queue: str, ident: str | None) -> tuple[Namespace, str]:
    """Check what a call names: return the namespace, and the node that acts."""
    actor = acting(request, ident)
    name_of(queue, "queue")
    return namespace(ns), actor


@router.get("/q", response={200: schemas.Namespaces, **REFUSALS})
async def list_namespaces(request: HttpRequest):
    """List the namespaces."""
    if not caller_of(request).allowed:
        raise Refused(403, "no web identity lets you act as a node")
    return {"namespaces": namespaces()}


@router.get("/q/{ns}", response={200: schemas.Queues, **REFUSALS})
async def list_queues(
    request: HttpRequest,
    ns: str,
    ident: schemas.Ident = None,
    after: schemas.After = "",
    limit: schemas.Limit = 100,
):
    """List the queues that the node may use, by name, with their status."""
    actor = acting(request, ident)
    if after:
        name_of(after, "queue")
    found, following = await elements.statuses(namespace(ns).calls, actor, after, limit)
    return {"queues": found, "next": following}


@router.get("/q/{ns}/{ks_name:queue}/status", response={200: schemas.QueueStatus, **REFUSALS})
async def status(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """Tell how many elements a queue has, and what was counted since it was made."""
    space, actor = place(request, ns, queue, ident)
    return await elements.status(space.calls, actor, queue)


@router.get("/q/{ns}/{ks_name:queue}/paused", response={200: schemas.Paused, **REFUSALS})
async def paused(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """Tell whether takers of a queue wait until it is resumed."""
    space, actor = place(request, ns, queue, ident)
    return await elements.status(space.calls, actor, queue)


@router.patch("/q/{ns}/{ks_name:queue}/pause", response={200: schemas.Paused, **REFUSALS})
async def pause(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """Let takers wait; pushes go on. Kept in the database, so all processes see it."""
    space, actor = place(request, ns, queue, ident)
    await elements.pause(space.calls, actor, queue)
    return {"paused": True}


@router.patch("/q/{ns}/{ks_name:queue}/resume", response={200: schemas.Paused, **REFUSALS})
async def resume(request: HttpRequest, ns: str, queue: str, ident: schemas.Ident = None):
    """End a pause."""
    space, actor = place(request, ns, queue, ident)
    await elements.resume(space.calls, actor, queue)
    return {"paused": False}


@router.patch("/q/{ns}/{ks_name:queue}/commit/{lease}", response={200: schemas.Done, **REFUSALS})
async def commit(
    request: HttpRequest, ns: str, queue: str, lease: str, ident: schemas.Ident = None
):
    """Remove a reserved element for good; 404 where the lease does not hold any more."""
    space, actor = place(request, ns, queue, ident)
    return _done(await elements.commit(space.calls, actor, name_of(lease, "lease")), lease)


@router.patch("/q/{ns}/{ks_name:queue}/rollback/{lease}", response={200: schemas.Done, **REFUSALS})
async def rollback(
    request: HttpRequest,
    ns: str,
    queue: str,
    lease: str,
    delay: schemas.Delay = None,
    ident: schemas.Ident = None,
):
    """Give a reserved element back with one more try; 404 where the lease does not hold."""
    space, actor = place(request, ns, queue, ident)
    lease = name_of(lease, "lease")
    return _done(await elements.rollback(space.calls, actor, delay, lease), lease)


def _done(is_done: bool, lease: str) -> dict[str, bool]:
    if not is_done:
        raise Refused(404, f"the lease {lease:.100} does not hold any more")
    return {"done": True}
