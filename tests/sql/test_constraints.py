"""Constraints of rules: each says in its name what must hold, and refuses what breaks it."""

import psycopg

from tests.sql.conftest import World

GOOD = {"role": "r", "ident": "A", "type": "Topic", "dest": "T", "mode": "RW", "timeout": 5}
BROKEN: dict[str, list[dict[str, object]]] = {
    "rule_is_unique": [{"mode": "W", "timeout": 9}],
    "rule_names_are_not_empty": [{"role": ""}, {"ident": ""}, {"dest": ""}],
    "rule_timeout_is_positive": [{"dest": "X", "timeout": 0}, {"dest": "X", "timeout": -1}],
    "rule_type_is_known": [{"type": "topic"}],
    "rule_mode_is_known": [{"dest": "X", "mode": "WR"}],
    "rule_for_rpc_has_mode_w": [{"type": "Rpc", "mode": "RW"}, {"type": "Rpc", "mode": "R"}],
    "rule_to_administer_is_for_a_queue": [{"type": "Topic", "mode": "A"}],
    "rule_to_observe_is_for_a_topic": [{"type": "Queue", "mode": "O"}],
}


def test_a_rule_that_breaks_a_constraint_is_refused_by_its_name(world: World):
    wrong = []
    world.rule(*GOOD.values())
    for name, fields in ((name, each) for name, all_ in BROKEN.items() for each in all_):
        found = None
        try:
            world.rule(*(GOOD | fields).values())
        except psycopg.errors.IntegrityError as refused:
            found = refused.diag.constraint_name
        if found != name:
            wrong.append(f"{name}: {found}, by {fields}")
    assert not wrong
    named = world.owner.query(
        "SELECT array_agg(conname::text ORDER BY conname) FROM pg_constraint"
        " WHERE conrelid = 'psqlmessages_auth'::regclass AND contype IN ('c', 'u')"
    )
    assert named == sorted(BROKEN)
