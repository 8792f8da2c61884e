"""The benchmarks of `make bench`, in the order of the tables, and those of `make bench-quick`."""

from __future__ import annotations

PROGRAMS = (
    "sends", "calls", "scaling", "websockets", "streams", "steady", "queues", "waiting",
    "exchanges", "pipeline", "pipeline_exchange",
)  # fmt: skip
QUICK = ("sends", "calls", "scaling", "streams", "queues", "exchanges")
