"""Constraints: each says in its name what must hold, and refuses what breaks it."""

import psycopg
import pytest

from tests.sql.conftest import Program, World

RULE = """
    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    VALUES ('{role}', '{ident}', '{type}', '{dest}', '{mode}', {timeout})
"""
GOOD = {"role": "r", "ident": "A", "type": "Topic", "dest": "T", "mode": "RW", "timeout": 5}


def rule(**fields: object) -> str:
    """Write the statement that inserts a rule, good but for some fields."""
    return RULE.format(**{**GOOD, **fields})


MEMBERSHIP = """
    INSERT INTO psqlmessages_membership
        (client_id, topic_id, kind, channel, pid, role, header, timeout)
    SELECT c.id, t.id, '{kind}', '', 1, '', '', 1
    FROM psqlmessages_client AS c, psqlmessages_topic AS t
"""
IDENTITY = "INSERT INTO psqlmessages_webidentity (user_id, group_id, ident) VALUES"
SUBSCRIPTION = "INSERT INTO psqlmessages_subscription (ident, topic, position, timeout)"
QUEUE = "INSERT INTO psqlmessages_queue (name, channel)"
ELEMENT = "INSERT INTO psqlmessages_element (queue_id, body, tries) VALUES"
EXCHANGE = """
    INSERT INTO psqlmessages_exchange (name, source_namespace, source_queue, parallel, wsize,
        reserve, is_running, changed_at)
    VALUES ('{name}', 'default', '{source}', {parallel}, {wsize}, true, true, now())
"""
DESTINATION = """
    INSERT INTO psqlmessages_destination (exchange_id, position, namespace, queue, selector)
    VALUES (1, {position}, 'default', '{queue}', '')
"""
KEY = "INSERT INTO psqlmessages_elementkey (queue_id, key, element_id, expires_at)"
COUNT = "INSERT INTO psqlmessages_exchangecount (exchange_id, worker, outcome, destination)"
JOB = "INSERT INTO psqlmessages_pipelinejob (name, state)"
TRAFFIC = """
    INSERT INTO psqlmessages_traffic (topic, sender, window_seconds, starts_at, count, bytes,
        size_p50, size_p95, size_p99, latency_p50, latency_p95, latency_p99)
    SELECT 'T', 'S', {seconds}, '2030-01-01', 1, 1, 1, 1, 1, 1, 1, 1 FROM generate_series(1, 2)
"""
STAGED = "INSERT INTO messages.staged (staging, place, bodies, encs)"
WORKER = "00000000-0000-0000-0000-000000000000"


def exchange(**fields: object) -> str:
    """Write the statement that inserts an exchange, good but for some fields."""
    return EXCHANGE.format(**{"name": "x", "source": "Q", "parallel": 1, "wsize": 1, **fields})


def destination(**fields: object) -> str:
    """Write the statement that inserts a destination, good but for some fields."""
    return DESTINATION.format(**{"position": 0, "queue": "Q", **fields})


BROKEN = [
    ("rule_is_unique", rule(mode="W", timeout=9)),
    ("rule_names_are_not_empty", rule(role="")),
    ("rule_names_are_not_empty", rule(ident="")),
    ("rule_names_are_not_empty", rule(dest="")),
    ("rule_timeout_is_positive", rule(dest="X", timeout=0)),
    ("rule_timeout_is_positive", rule(dest="X", timeout=-1)),
    ("rule_type_is_known", rule(type="topic")),
    ("rule_mode_is_known", rule(dest="X", mode="WR")),
    ("rule_for_rpc_has_mode_w", rule(type="Rpc", mode="RW")),
    ("rule_for_rpc_has_mode_w", rule(type="Rpc", mode="R")),
    ("rule_to_observe_is_for_a_topic", rule(type="Queue", mode="O")),
    ("topic_name_is_unique", "INSERT INTO psqlmessages_topic (name) VALUES ('T')"),
    (
        "session_channel_is_its_own",
        (
            "INSERT INTO psqlmessages_session (id, pid, role, channel)"
            " SELECT 1, 1, 'r', channel FROM psqlmessages_session"
        ),
    ),
    (
        "ident_is_registered_once",
        (
            "INSERT INTO psqlmessages_client (session_id, ident, role)"
            " SELECT session_id, ident, role FROM psqlmessages_client"
        ),
    ),
    ("membership_is_unique", MEMBERSHIP.format(kind="listen")),
    ("membership_kind_is_known", MEMBERSHIP.format(kind="other")),
    (
        "observation_is_unique",
        (
            "INSERT INTO psqlmessages_observation (client_id, pattern, channel)"
            " SELECT client_id, pattern, channel FROM psqlmessages_observation"
        ),
    ),
    ("web_identity_is_unique", f"{IDENTITY} (NULL, 1, 'N'), (NULL, 1, 'N')"),
    ("web_identity_is_of_a_user_or_a_group", f"{IDENTITY} (NULL, NULL, 'N')"),
    ("web_identity_is_of_a_user_or_a_group", f"{IDENTITY} (1, 1, 'N')"),
    ("web_identity_ident_is_not_empty", f"{IDENTITY} (NULL, 1, '')"),
    ("subscription_is_unique", f"{SUBSCRIPTION} VALUES ('N', 'T', 0, 5), ('N', 'T', 0, 5)"),
    ("subscription_timeout_is_positive", f"{SUBSCRIPTION} VALUES ('N', 'T', 0, 0)"),
    ("topic_retention_is_not_negative", "UPDATE psqlmessages_topic SET retention = -1"),
    ("stream_has_one_row", "INSERT INTO messages._stream (id) VALUES (false)"),
    ("gate_has_one_row", "INSERT INTO messages._gate (id) VALUES (false)"),
    ("rules_has_one_row", "INSERT INTO messages._rules (id) VALUES (false)"),
    (
        "unfinished_is_about_one_thing",
        "INSERT INTO messages._unfinished (topic_id, client_id) VALUES (1, 1)",
    ),
    ("settings_have_one_row", "INSERT INTO messages._settings (id) VALUES (false)"),
    ("secret_has_one_row", "INSERT INTO messages._secret VALUES (false, '', '')"),
    ("queues_has_one_row", "INSERT INTO messages._queues (id) VALUES (false)"),
    ("queue_name_is_unique", f"{QUEUE} VALUES ('Q', ''), ('Q', '')"),
    ("queue_name_is_no_pattern", f"{QUEUE} VALUES ('', '')"),
    ("queue_name_is_no_pattern", f"{QUEUE} VALUES ('Q*', '')"),
    (
        "queue_for_dead_letters_is_no_pattern",
        "INSERT INTO psqlmessages_queue (name, dead_letter_queue) VALUES ('Q', 'D*')",
    ),
    (
        "queue_max_tries_is_positive",
        "INSERT INTO psqlmessages_queue (name, max_tries) VALUES ('Q', 0)",
    ),
    (
        "queue_key_timeout_is_positive",
        "INSERT INTO psqlmessages_queue (name, key_timeout) VALUES ('Q', 0)",
    ),
    ("element_tries_are_not_negative", f"{ELEMENT} (1, '', -1)"),
    ("element_key_is_unique", f"{KEY} VALUES (1, 'k', 1, now()), (1, 'k', 2, now())"),
    ("exchange_name_is_unique", f"{exchange()}, ('x', 'default', 'Q', 1, 1, true, true, now())"),
    ("exchange_name_is_no_pattern", exchange(name="")),
    ("exchange_name_is_no_pattern", exchange(name="x*")),
    ("exchange_source_is_no_pattern", exchange(source="Q*")),
    ("exchange_source_is_no_pattern", exchange(source="")),
    ("exchange_parallel_is_within_bounds", exchange(parallel=0)),
    ("exchange_parallel_is_within_bounds", exchange(parallel=17)),
    ("exchange_wsize_is_within_bounds", exchange(wsize=0)),
    ("exchange_wsize_is_within_bounds", exchange(wsize=4097)),
    ("destination_is_no_pattern", destination(queue="Q*")),
    ("destination_is_no_pattern", destination(queue="")),
    ("destination_position_is_not_negative", destination(position=-1)),
    (
        "destination_position_is_unique",
        (
            "SET CONSTRAINTS destination_position_is_unique IMMEDIATE;"
            f"{destination()}, (1, 0, 'default', 'R', '')"
        ),
    ),
    (
        "exchange_count_is_unique",
        f"{COUNT} VALUES (1, '{WORKER}', 'ok', -1), (1, '{WORKER}', 'ok', -1)",
    ),
    ("pipeline_job_name_is_unique", f"{JOB} VALUES ('j', 'running'), ('j', 'failed')"),
    ("traffic_is_unique", TRAFFIC.format(seconds=10)),
    ("traffic_window_is_known", TRAFFIC.format(seconds=11)),
    ("staged_encs_are_known", f"{STAGED} VALUES (gen_random_uuid(), 0, '{{a}}', '{{gzip}}')"),
    (
        "staged_arrays_are_of_one_length",
        f"{STAGED} VALUES (gen_random_uuid(), 0, '{{a,b}}', '{{b64}}')",
    ),
    ("max_body_bytes_is_sensible", "UPDATE messages._settings SET max_body_bytes = 8191"),
    ("max_body_bytes_is_sensible", "UPDATE messages._settings SET max_body_bytes = 536870913"),
]


@pytest.fixture
def node(world: World) -> Program:
    """A node that listens and observes."""
    world.rules("r A Topic T RW 5", "user1 N Topic T RW 5", "user1 N Topic U O 5")
    node = world.node("user1", "N")
    node.ok("topic_listen", "T")
    node.ok("topic_observe", "U")
    return node


@pytest.mark.usefixtures("node")
def test_a_constraint_that_is_broken_is_named(world: World) -> None:
    wrong = []
    for name, statement in BROKEN:
        found = None
        try:
            with world.owner.connection.transaction(force_rollback=True):
                world.execute(statement)
        except psycopg.errors.IntegrityError as refused:
            found = refused.diag.constraint_name
        if found != name:
            wrong.append(f"{name}: {found}, by {statement}")
    assert not wrong


def test_every_constraint_with_a_name_of_ours_is_broken_above(world: World) -> None:
    named = world.owner.query(r"""
        SELECT array_agg(DISTINCT c.conname::text) FROM pg_constraint AS c
        WHERE c.contype IN ('c', 'u', 'x')
          AND (c.connamespace = 'messages'::regnamespace
              OR c.conrelid::regclass::text LIKE 'psqlmessages\_%')
    """)
    assert sorted(named) == sorted({name for name, _ in BROKEN})


@pytest.mark.usefixtures("node")
def test_a_rule_that_breaks_none_is_kept_and_names_longer_than_their_fields_are_not(
    world: World,
) -> None:
    for fields in (
        {"type": "Queue", "mode": "R"},
        {"type": "Rpc", "mode": "W"},
        {"mode": "O", "dest": "*"},
        {"timeout": 2_147_483_647, "dest": "X"},
        {"dest": "€" * 100, "ident": "🐘" * 100, "role": "r" * 63},
    ):
        world.execute(rule(**fields))
    for field, length in {"role": 64, "ident": 101, "dest": 101}.items():
        with pytest.raises(psycopg.errors.StringDataRightTruncation):
            world.execute(rule(**{field: "x" * length}))
