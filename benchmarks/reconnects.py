"""Reconnects: the time from the end of a session until all its nodes are registered again."""

from __future__ import annotations

import asyncio
from time import perf_counter

import psycopg

from benchmarks.databases import create_database
from benchmarks.results import Curve, Findings
from project.postgres import Server
from psqlmessages.client.gateway import Gateway

SIZES = (10, 100, 1000)
TOPIC = "RETURNING"
RULES = [("RETURNING.*", "Topic", TOPIC, "RW")]


def measure(server: Server) -> Findings:
    """Measure the time until all nodes listen again, which includes the first backoff."""
    dsn = create_database(server, "returning", RULES)
    points = [(float(size), asyncio.run(measure_seconds(dsn, size))) for size in SIZES]
    return Findings(
        curves=[
            Curve(
                "scaling: nodes that return",
                "reconnecting a session whose nodes listen", "nodes", "s", {"gateway": points},
                "the first attempt waits 0.1 to 0.2 s: after a restart all sessions reconnect",
            )
        ]
    )  # fmt: skip


async def measure_seconds(dsn: str, size: int) -> float:
    """Register nodes, end their backend, and wait until all are registered again."""
    gateway = Gateway("returning", dsn)
    is_back = asyncio.Event()

    def on_message() -> None:
        while gateway.inbox:
            if gateway.inbox.popleft().header.get("Evt") == "reconnected":
                is_back.set()

    gateway.set_inbox_callback(on_message)
    await gateway.open()
    try:
        for number in range(size):
            for call in (("init",), ("topic_listen", TOPIC)):
                answer = await gateway.run(f"RETURNING.{number}", *call)
                if answer["Err"] != "0":
                    raise RuntimeError(f"{call}: {answer}")
        begun = perf_counter()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", [gateway.pid])
        await is_back.wait()
        return perf_counter() - begun
    finally:
        await gateway.close()
