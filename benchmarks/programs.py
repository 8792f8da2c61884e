"""The benchmarks of `make bench`, in the order of the tables, and those of `make bench-quick`.

MAIN_ROWS are in the table and the chart of docs/explanation/performance.md.
"""

from __future__ import annotations

PROGRAMS = (
    "concurrency", "sends", "calls", "scaling", "websockets", "streams", "steady", "queues",
    "held_snapshot", "waiting", "exchanges", "idle", "pipeline", "pipeline_exchange",
)  # fmt: skip
QUICK = (
    "concurrency",
    "sends",
    "calls",
    "scaling",
    "streams",
    "queues",
    "held_snapshot",
    "exchanges",
)
MAIN_ROWS = (
    "concurrency: sends to redis.asyncio publish",
    "concurrency: sends to nats-py publish and flush",
    "concurrency: publish to JetStream, sync_interval: always",
    "concurrency: publish to JetStream, lazy",
    "concurrency: queue to PgQueuer",
    "concurrency: call to nats-py request",
    "sends: 1 KB to redis-py",
    "sends: 1 KB to nats-py",
    "sends: many to redis-py",
    "calls: AsyncNode.call p50 to nats-py request",
    "streams: publish to pgmq.send",
    "streams: publish to JetStream",
    "streams: publish to Redis XADD",
    "streams: 500 to pgmq.send_batch",
    "queues: one by one to pgmq",
    "queues: one by one to procrastinate",
    "queues: 100 at once to pgmq",
    "held snapshot: one by one",
    "held snapshot: 100 at once",
    "websockets: deliveries of 1000, core",
    "exchanges: keuss on PostgreSQL",
    "pipeline: read two to Spark JDBC",
    "idle: WAL",
)
