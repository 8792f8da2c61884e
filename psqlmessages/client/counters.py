"""Counters: what a node has seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What a node has seen since it was made; read without a query."""

    calls: int = 0
    received: int = 0
    fetched: int = 0
    malformed: int = 0
    foreign: int = 0
    late_answers: int = 0
    lost_bodies: int = 0
    handler_failures: int = 0
    reply_failures: int = 0
    evaluation_failures: int = 0
    lost_connections: int = 0
    reconnects: int = 0
    gaps: int = 0
    dropped_events: int = 0
    lost_leases: int = 0
