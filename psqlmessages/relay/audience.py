"""Audience: which nodes of a hub hear of the events that do not name them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from psqlmessages import wire
from psqlmessages.client.gateway import Gateway
from psqlmessages.client.listening import Arrival
from psqlmessages.relay.calls import answered
from psqlmessages.relay.routes import Routes

Audience = frozenset[str]

_NOBODY: Final[Audience] = frozenset()
# As which nodes to ask: one may have been disconnected a moment ago.
_ASKERS: Final = 3
_NOT_HERE: Final = ("50", "53")


class Audiences:
    """Who hears of the events of one batch; asked once for each subject, and kept no longer."""

    def __init__(self, gateway: Gateway, routes: Routes) -> None:
        self._gateway = gateway
        self._routes = routes
        self._found: dict[tuple[str, str], Audience] = {}

    async def ask(self, batch: Iterable[Arrival]) -> None:
        """Ask for all events of a batch that do not say whom they are for."""
        self._found = {}
        if not self._routes.is_anyone_curious:
            return
        subjects = dict.fromkeys(
            _subject(arrival.header)
            for arrival in batch
            if "Nodes" not in arrival.header and _is_event(arrival.header)
        )
        nodes = await asyncio.gather(*(self._ask(*subject) for subject in subjects))
        self._found = dict(zip(subjects, nodes, strict=True))

    def of(self, header: dict[str, Any]) -> Audience:
        """Tell whom an event of the batch is for, but for the node that it is about."""
        return self._found.get(_subject(header), _NOBODY) - {header.get("Ident")}

    async def _ask(self, field: str, name: str) -> Audience:
        event = wire.serialize({"Type": "Sys", "Evt": "audience", field: name})
        for ident in tuple(islice(self._routes.registered(), _ASKERS)):
            answer = await answered(self._gateway, ident, "audience", event)
            if answer["Err"] not in _NOT_HERE:
                return frozenset(answer.get("Nodes", ()))
        return _NOBODY


def _is_event(header: dict[str, Any]) -> bool:
    return header["Type"] == "Sys" and ("Topic" in header or "Ident" in header)


def _subject(header: dict[str, Any]) -> tuple[str, str]:
    # Without its node, one answer serves all events about a topic.
    field = "Topic" if "Topic" in header else "Ident"
    return field, header.get(field, "")
