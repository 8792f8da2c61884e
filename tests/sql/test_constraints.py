"""Constraints: each says in its name what must hold, and refuses what breaks it."""

import psycopg
import pytest

from tests.sql.conftest import Program, World

GOOD = {"role": "r", "ident": "A", "type": "Topic", "dest": "T", "mode": "RW", "timeout": 5}
WORKER = "00000000-0000-0000-0000-000000000000"


def insert(table: str, columns: str, *rows: str) -> str:
    return f"INSERT INTO {table} ({columns}) VALUES {', '.join(f'({row})' for row in rows)}"


def ours(table: str, columns: str, *rows: str) -> str:
    return insert(f"psqlmessages_{table}", columns, *rows)


def again(table: str, columns: str, values: str = "") -> str:
    """Write the statement that inserts each row once more, or some values for each."""
    table = f"psqlmessages_{table}"
    return f"INSERT INTO {table} ({columns}) SELECT {values or columns} FROM {table}"


def fitting(table: str, good: dict[str, object], **fields: object) -> str:
    """Write the statement that inserts a row, good but for some fields."""
    values = (good | fields).values()
    return insert(table, ", ".join(good), ", ".join(f"'{value}'" for value in values))


def rule(**fields: object) -> str:
    return fitting("messages.auth", GOOD, **fields)


def membership(kind: str) -> str:
    columns = "client_id, topic_id, kind, channel, pid, role, header, timeout"
    return again("membership", columns, f"client_id, topic_id, '{kind}', '', 1, '', '', 1")


EXCHANGE: dict[str, object] = {
    "name": "x", "source_namespace": "default", "source_queue": "Q", "parallel": 1, "wsize": 1,
    "reserve": True, "is_running": True, "changed_at": "now",
}  # fmt: skip
DESTINATION: dict[str, object] = {
    "exchange_id": 1, "position": 0, "namespace": "default", "queue": "Q", "selector": "",
}  # fmt: skip


def exchange(**fields: object) -> str:
    return fitting("psqlmessages_exchange", EXCHANGE, **fields)


def destination(**fields: object) -> str:
    return fitting("psqlmessages_destination", DESTINATION, **fields)


TRAFFIC = """
    INSERT INTO psqlmessages_traffic (topic, sender, window_seconds, starts_at, count, bytes,
        size_p50, size_p95, size_p99, latency_p50, latency_p95, latency_p99)
    SELECT 'T', 'S', {seconds}, '2030-01-01', 1, 1, 1, 1, 1, 1, 1, 1 FROM generate_series(1, 2)
"""
IDENTITY = "user_id, group_id, ident"
SUBSCRIPTION = "ident, topic, position, timeout"
COUNT = "exchange_id, worker, outcome, destination"
STAGED = "staging, place, bodies, encs"
CHECK_NOW = "SET CONSTRAINTS destination_position_is_unique IMMEDIATE"
MAX_BODY_BYTES = "UPDATE messages._settings SET max_body_bytes = {}"
# What breaks a constraint, of a world with one node.
BROKEN = {
    "rule_is_unique": [rule(mode="W", timeout=9)],
    "rule_names_are_not_empty": [rule(role=""), rule(ident=""), rule(dest="")],
    "rule_timeout_is_positive": [rule(dest="X", timeout=0), rule(dest="X", timeout=-1)],
    "rule_type_is_known": [rule(type="topic")],
    "rule_mode_is_known": [rule(dest="X", mode="WR")],
    "rule_for_rpc_has_mode_w": [rule(type="Rpc", mode="RW"), rule(type="Rpc", mode="R")],
    "rule_to_observe_is_for_a_topic": [rule(type="Queue", mode="O")],
    "topic_name_is_unique": [ours("topic", "name", "'T'")],
    "session_channel_is_its_own": [again("session", "id, pid, role, channel", "1, 1, '', channel")],
    "ident_is_registered_once": [again("client", "session_id, ident, role")],
    "membership_is_unique": [membership("listen")],
    "membership_kind_is_known": [membership("other")],
    "observation_is_unique": [again("observation", "client_id, pattern, channel")],
    "web_identity_is_unique": [ours("webidentity", IDENTITY, *["NULL, 1, 'N'"] * 2)],
    "web_identity_is_of_a_user_or_a_group": [
        ours("webidentity", IDENTITY, "NULL, NULL, 'N'"), ours("webidentity", IDENTITY, "1, 1, 'N'")
    ],
    "web_identity_ident_is_not_empty": [ours("webidentity", IDENTITY, "NULL, 1, ''")],
    "subscription_is_unique": [ours("subscription", SUBSCRIPTION, *["'N', 'T', 0, 5"] * 2)],
    "subscription_timeout_is_positive": [ours("subscription", SUBSCRIPTION, "'N', 'T', 0, 0")],
    "topic_retention_is_not_negative": ["UPDATE psqlmessages_topic SET retention = -1"],
    **{f"{name}_has_one_row": [insert(f"messages._{name}", "id", "false")]
       for name in ("stream", "gate", "rules", "queues")},
    "settings_have_one_row": [insert("messages._settings", "id", "false")],
    "secret_has_one_row": [insert("messages._secret", "id, inner_pad, outer_pad", "false, '', ''")],
    "unfinished_is_about_one_thing": [
        insert("messages._unfinished", "topic_id, client_id", "1, 1")
    ],
    "queue_name_is_unique": [ours("queue", "name, channel", "'Q', ''", "'Q', ''")],
    "queue_name_is_no_pattern": [ours("queue", "name", "''"), ours("queue", "name", "'Q*'")],
    "queue_for_dead_letters_is_no_pattern": [ours("queue", "name, dead_letter_queue", "'Q', 'D*'")],
    "queue_max_tries_is_positive": [ours("queue", "name, max_tries", "'Q', 0")],
    "queue_key_timeout_is_positive": [ours("queue", "name, key_timeout", "'Q', 0")],
    "element_tries_are_not_negative": [ours("element", "queue_id, body, tries", "1, '', -1")],
    "element_key_is_unique": [
        ours("elementkey", "queue_id, key, element_id, expires_at", *["1, 'k', 1, now()"] * 2)
    ],
    "exchange_name_is_unique": [f"{exchange()}; {exchange()}"],
    "exchange_name_is_no_pattern": [exchange(name=""), exchange(name="x*")],
    "exchange_source_is_no_pattern": [exchange(source_queue="Q*"), exchange(source_queue="")],
    "exchange_parallel_is_within_bounds": [exchange(parallel=0), exchange(parallel=17)],
    "exchange_wsize_is_within_bounds": [exchange(wsize=0), exchange(wsize=4097)],
    "destination_is_no_pattern": [destination(queue="Q*"), destination(queue="")],
    "destination_position_is_not_negative": [destination(position=-1)],
    "destination_position_is_unique": [
        f"{CHECK_NOW}; {destination()}; {destination(queue='R')}"
    ],
    "exchange_count_is_unique": [ours("exchangecount", COUNT, *[f"1, '{WORKER}', 'ok', -1"] * 2)],
    "pipeline_job_name_is_unique": [ours("pipelinejob", "name, state", *["'j', 'running'"] * 2)],
    "traffic_is_unique": [TRAFFIC.format(seconds=10)],
    "traffic_window_is_known": [TRAFFIC.format(seconds=11)],
    "staged_encs_are_known": [
        insert("messages.staged", STAGED, f"'{WORKER}', 0, '{{a}}', '{{x}}'")
    ],
    "staged_arrays_are_of_one_length": [
        insert("messages.staged", STAGED, f"'{WORKER}', 0, '{{a,b}}', '{{b64}}'")
    ],
    "max_body_bytes_is_sensible": [MAX_BODY_BYTES.format(n) for n in (8191, 536870913)],
}  # fmt: skip


@pytest.fixture(autouse=True)
def node(world: World) -> Program:
    world.rules("r A Topic T RW 5", "user1 N Topic T RW 5", "user1 N Topic U O 5")
    return world.node("user1", "N", listen="T", observe="U")


def test_a_constraint_that_is_broken_is_named(world: World) -> None:
    wrong = []
    for name, statement in ((name, each) for name, all_ in BROKEN.items() for each in all_):
        found = None
        try:
            with world.owner.connection.transaction(force_rollback=True):
                world.execute(statement)
        except psycopg.errors.IntegrityError as refused:
            found = refused.diag.constraint_name
        if found != name:
            wrong.append(f"{name}: {found}, by {statement}")
    assert not wrong
    named = world.owner.query(r"""
        SELECT array_agg(DISTINCT c.conname::text) FROM pg_constraint AS c
        WHERE c.contype IN ('c', 'u', 'x')
          AND (c.connamespace = 'messages'::regnamespace
              OR c.conrelid::regclass::text LIKE 'psqlmessages\_%')
    """)
    assert sorted(named) == sorted(BROKEN)
