"""Rules from the command line and in code."""

import re

import pytest
from django.core.management import call_command

from project.postgres import Server
from psqlmessages.django import rules, send
from psqlmessages.exceptions import MessagesError
from tests.sql.conftest import World

Capture = pytest.CaptureFixture[str]
OF_NEWS = "SELECT string_agg(role || ' ' || mode, ',') FROM messages.auth WHERE dest = 'NEWS'"


def command(*arguments: str) -> int:
    """Run `manage.py psqlmessages`; return its exit code."""
    try:
        call_command("psqlmessages", *arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_commands_allow_and_deny_add_and_take_away_modes(shop: World, capsys: Capture) -> None:
    steps = (
        ("allow shop W Topic NEWS", 0, "shop may W Topic NEWS", f"{Server.owner} W"),
        ("allow shop R topic NEWS", 0, "shop may RW Topic NEWS", f"{Server.owner} RW"),
        ("allow shop O Topic NEWS", 1, "O and other modes need rules", f"{Server.owner} RW"),
        ("deny shop W Topic NEWS", 0, "shop may R Topic NEWS", f"{Server.owner} R"),
        ("deny shop R Topic NEWS --role user2", 1, "'shop' of role user2 has no rule", None),
        ("deny shop RW Topic NEWS", 0, "shop may nothing Topic NEWS", None),
        ("deny shop RW Topic NEWS", 1, "a pattern may allow it", None),
        ("allow shop.* W Rpc NEWS --role user2", 0, "shop.* may W Rpc NEWS", "user2 W"),
        ("allow shop R Rpc NEWS", 1, "mode 'R': for a Rpc rule it is W", "user2 W"),
    )
    for words, code, said, left in steps:
        assert command(*words.split()) == code, words
        captured = capsys.readouterr()
        assert said in (captured.out if code == 0 else captured.err), words
        if left:
            assert shop.owner.query(OF_NEWS) == left, words


def test_rules_in_code_are_applied_again_and_again(shop: World) -> None:
    wanted = (
        rules.Rule(node="shop", topic="NEWS", mode="W", timeout=90),
        rules.Rule(node="worker", queue="jobs", role="user2"),
        rules.Rule(node="shop.*", rpc="PRICES"),
    )
    assert rules.apply(wanted) == 2
    send("NEWS", "x")
    assert rules.apply(wanted) == 0
    assert shop.owner.query("SELECT mode FROM messages.auth WHERE dest = 'jobs'") == "RW"
    assert rules.remove(wanted) == 3
    with pytest.raises(MessagesError):
        send("NEWS", "x")


WRONG = (
    ({"topic": "A", "queue": "B"}, "exactly one of topic, queue and rpc: this has topic and queue"),
    ({"mode": "W"}, "this has none"),
    ({"rpc": "A", "mode": "RW"}, "mode 'RW': for a Rpc rule it is W"),
    ({"queue": "A", "mode": "O"}, "mode 'O': for a Queue rule it is W or R or RW"),
)


def test_a_rule_whose_parts_do_not_fit_is_refused() -> None:
    for fields, message in WRONG:
        with pytest.raises(ValueError, match=re.escape(message)):
            rules.Rule(node="shop", **fields)
