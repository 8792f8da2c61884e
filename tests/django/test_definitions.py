"""Rules from the command line, in code and in documents, and queue settings in code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import call_command

from project.postgres import Server
from psqlmessages.django import rules, send
from psqlmessages.exceptions import MessagesError
from psqlmessages.models import Auth, WebIdentity
from psqlmessages.rules import changes, document
from psqlmessages.rules.document import MODES, TYPES, Identity, RuleEntry
from tests.django.conftest import Changed
from tests.sql.conftest import World

OF_NEWS = "SELECT string_agg(role || ' ' || mode, ',') FROM messages.auth WHERE dest = 'NEWS'"


def test_commands_allow_and_deny_add_and_take_away_modes(shop: World, changed: Changed, capsys):
    steps = (
        ("allow shop W Topic NEWS", 0, "shop may W Topic NEWS", f"{Server.owner} W"),
        ("allow shop R topic NEWS", 0, "shop may RW Topic NEWS", f"{Server.owner} RW"),
        ("allow shop O Topic NEWS", 1, "cannot combine O with another", f"{Server.owner} RW"),
        ("deny shop W Topic NEWS", 0, "shop may R Topic NEWS", f"{Server.owner} R"),
        ("deny shop R Topic NEWS --role user2", 1, "'shop' of role user2 has no rule", None),
        ("deny shop RW Topic NEWS", 0, "shop may nothing Topic NEWS", None),
        ("allow shop.* W Rpc NEWS --role user2", 0, "shop.* may W Rpc NEWS", "user2 W"),
        ("allow shop A Topic NEWS", 1, "mode 'A' is not valid for a rule of type Topic", None),
        ("allow shop R Queue NEWS", 0, "shop may R Queue NEWS", None),
        ("allow shop A Queue NEWS", 0, "shop may A Queue NEWS", None),
        ("deny shop A Queue NEWS", 0, "shop may RW Queue NEWS", None),
        ("allow shop A Queue NEWS", 0, "shop may A Queue NEWS", None),
        ("deny shop R Queue NEWS", 0, "shop may W Queue NEWS", None),
        ("deny shop W Queue NEWS", 0, "shop may nothing Queue NEWS", None),
    )
    for words, code, said, left in steps:
        ended, out, err = called(capsys, *words.split())
        assert (ended, said in (err if code else out)) == (code, True), words
        if left:
            assert shop.owner.query(OF_NEWS) == left, words
    changed("ALTER SCHEMA messages RENAME TO away", "ALTER SCHEMA away RENAME TO messages")
    code, _, said = called(capsys, "allow", "shop", "W", "Topic", "NEWS")
    assert (code, "does not exist (run the migrations" in said) == (1, True)


def test_rules_in_code_are_applied_again_and_again(shop: World):
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
    with pytest.raises(MessagesError, match="'shop', 'Queue', 'jobs', 'A', 60"):
        rules.configure_queue("jobs", node="shop")
    rules.apply([rules.Rule(node="shop", queue="jobs", mode="A")])
    for tries, expected in ((5, 5), (None, 5), (0, None)):
        assert rules.configure_queue("jobs", node="shop", max_tries=tries).max_tries == expected


WRONG = (
    ({"topic": "A", "queue": "B"}, "topic, queue and rpc, but this rule has topic and queue"),
    ({"mode": "W"}, "this rule has none"),
    ({"rpc": "A", "mode": "RW"}, "mode 'RW' is not valid for a rule of type Rpc: use W"),
    ({"queue": "A", "timeout": 0}, "the timeout of a rule must be positive, not 0"),
)


def test_an_inconsistent_rule_is_refused():
    for fields, message in WRONG:
        with pytest.raises(ValueError, match=re.escape(message)):
            rules.Rule(node="shop", **fields)


RULE = {"role": "r", "ident": "A", "type": "Topic", "dest": "T", "mode": "R", "timeout": 9}
IDENTITY = {"user": "alice", "group": None, "ident": "a"}


def faults(text: bytes | str) -> list[str]:
    with pytest.raises(document.MalformedDefinitions) as raised:
        document.read(text)
    return raised.value.errors


def faults_of(*rules: object, **parts: object) -> list[str]:
    return faults(json.dumps({"version": 1, "rules": rules, **parts}))


NO_JSON = "The document is not JSON"
NO_DOCUMENTS = (
    (b"\xff\xfe", "The document is not UTF-8 text: byte 0 is not valid."),
    (b"", f"{NO_JSON}: Expecting value: line 1 column 1 (char 0)."),
    (b"[]", "The document is not a JSON object."),
    (b"{}", "The version is None; only 1 is supported."),
    (b'{"version":true}', "The version is True; only 1 is supported."),
    (b'{"version":1,"rule":[]}', "The document has an unknown field 'rule'."),
    (b'{"version":1,"rules":{}}', "rules is not a list."),
    (b'{"version":1,"rules":[1]}', "Rule 1 is not a JSON object."),
    (b'{"version":1,"version":1}', f"{NO_JSON}: an object has the field 'version' twice."),
    (b'{"version":NaN}', f"{NO_JSON}: NaN is not a JSON number."),
    (b"[" * 100_000, "The document is not JSON: it is nested too deeply."),
    (b" " * 10_485_761, "The document has 10,485,761 bytes; at most 10,485,760 are allowed."),
)
NO_RULES = (
    ({"mode": "X"}, "mode: The mode 'X' is not one of W, R, RW, O, A."),
    ({"type": "rpc"}, "type: The type 'rpc' is not one of Rpc, Topic, Queue."),
    ({"timeout": 0}, "timeout: The timeout must be 1 second or more."),
    ({"timeout": 2**31}, "timeout: The timeout must be 2,147,483,647 seconds or less."),
    ({"timeout": True}, "timeout: True is not a whole number of seconds."),
    ({"role": ""}, "role: It is empty."),
    ({"role": "r" * 64}, "role: It has 64 characters; the maximum is 63."),
    ({"ident": None}, "ident: None is not a string."),
    ({"ident": "a\0"}, "ident: 'a\\x00' contains a character that PostgreSQL cannot store."),
    ({"mods": "R"}, f"'mods': unknown field; the fields are {', '.join(RULE)}."),
)


def test_invalid_documents_and_rules_are_refused_with_number_and_field():
    for text, fault in NO_DOCUMENTS:
        assert faults(text) == [fault]
    for changed, fault in NO_RULES:
        assert faults_of(RULE, {**RULE, **changed}) == [f"Rule 2, {fault}"]
    without = {name: value for name, value in RULE.items() if name != "mode"}
    assert faults_of(without) == ["Rule 1, mode: it is missing."]
    assert faults_of(RULE, {**RULE, "mode": "W"}) == ["Rule 2 has the same names as rule 1."]
    fault = "Web identity 1, user: Name either a user or a group, not both."
    for who in ({"group": "g"}, {"user": None}):
        assert faults_of(web_identities=[{**IDENTITY, **who}]) == [fault]
    told = faults_of(*[1] * 50)
    assert (len(told), told[-1]) == (21, "And 30 more.")


def rule(**fields: Any) -> RuleEntry:
    return RuleEntry(**{**RULE, **fields})


def test_import_creates_and_prints_the_objects_of_the_file(shop: World, tmp_path: Path, capsys):
    before = changes.read_current()
    User.objects.create_user("alice")
    # A new rule, a changed one, and an identity: the file does not name the others.
    rules = (rule(ident="NEW"), before.rules[0]._replace(timeout=7))
    file = tmp_path / "definitions.json"
    file.write_text(document.write(document.Definitions(rules, (Identity("alice", None, "a.*"),))))
    code, printed, summary = called(capsys, "definitions", "import", str(file), "--dry-run")
    assert (code, summary) == (0, "dry run: 2 added, 1 changed, 0 removed\n")
    assert changes.read_current() == before
    assert called(capsys, "definitions", "import", str(file)) == (0, printed, summary[9:])
    old = before.rules[0]
    assert printed.splitlines() == [
        "+ rule NEW (r): R Topic T, 9 s",
        f"~ rule {old} -> {old.mode}, 7 s",
        "+ user alice as a.*",
    ]
    new = {*before.rules[1:], old._replace(timeout=7), rule(ident="NEW")}
    assert set(changes.read_current().rules) == new
    assert WebIdentity.objects.get().user.username == "alice"
    # Replacing removes what the file does not name.
    WebIdentity.objects.create(group=Group.objects.create(name="g"), ident="gone")
    assert called(capsys, "definitions", "import", str(file), "--replace")[0] == 0
    assert Auth.objects.count() == 2
    assert WebIdentity.objects.get().ident == "a.*"


def test_import_in_another_database_restores_an_export(shop: World, tmp_path: Path, capsys):
    file, before = tmp_path / "all.json", changes.read_current()
    assert called(capsys, "definitions", "export", str(file))[0] == 0
    Auth.objects.all().delete()
    assert called(capsys, "definitions", "import", str(file))[0] == 0
    assert changes.read_current() == before
    file.write_text(json.dumps({"version": 1, "web_identities": [IDENTITY]}))
    wrong = "psqlmessages: There is no user alice for the node a.\n"
    assert called(capsys, "definitions", "import", str(file)) == (1, "", wrong)


def test_dumped_rules_are_loaded_beside_those_that_are_there(shop: World, tmp_path: Path):
    file, before = str(tmp_path / "rules.json"), changes.read_current()
    call_command("dumpdata", "psqlmessages.auth", natural_primary=True, output=file, verbosity=0)
    Auth.objects.filter(ident="shop").delete()
    Auth.objects.update(timeout=7)
    call_command("loaddata", file, verbosity=0)
    assert changes.read_current() == before


def called(capsys, *arguments: str) -> tuple[object, str, str]:
    """Run the command in this process: its exit code, and what it printed."""
    code: object = 0
    try:
        call_command("psqlmessages", *arguments)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_the_example_of_the_page_is_a_document():
    page = (Path(__file__).parents[2] / "docs/reference/admin.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(document.read(example).as_json()) == 3
    assert (list(TYPES), list(MODES)) == (Auth.Type.values, Auth.Mode.values)
