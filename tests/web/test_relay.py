"""The relay, by real WebSockets: what nodes behind it do, and what others see of them."""

import asyncio
import base64
import json
import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group

from project.postgres import Server
from psqlmessages.conf import Settings
from psqlmessages.models import WebIdentity
from psqlmessages.relay import socket
from psqlmessages.relay.protocol import OPERATIONS, InvalidFrame, format_answer, parse_frame
from tests.sql.conftest import World
from tests.web.site import Site
from tests.web.sockets import Enter, Visitor

DOCS = Path(__file__).parents[2] / "docs"
RELAY = (DOCS / "reference/relay.md").read_text()


@pytest.fixture
def alice(enter: Enter) -> Visitor:
    visitor = enter("alice")
    # The answer does not contain the channel.
    assert visitor.call("init", ident="web.alice") == {"Err": "0"}
    return visitor


def test_a_program_and_a_web_user_talk_in_bodies_of_every_kind(relay: World, alice: Visitor):
    other = relay.node("user2", "OTHER")
    alice.ok("topic_notify", topic="ROOM")
    other.ok("topic_listen", "ROOM")
    event = alice.event("topic_listen")
    assert (event["Ident"], event["Topic"], "Nodes" in event) == ("OTHER", "ROOM", False)
    assert alice.ok("topic_auth", topic="ROOM")["Listeners"] == ["OTHER", "web.*"]
    alice.ok("topic_send", topic="ROOM", body='{"a":1}', enc="json")
    sent = next(header for header in other.headers(2) if header["Type"] == "Topic")
    assert (sent["From"], sent["Enc"], sent["Body"]) == ("web.alice", "json", '{"a":1}')
    alice.ok("topic_listen", topic="ROOM")
    other.ok("topic_notify", "ROOM")
    for body, enc in (
        ("ü\n\x01", None),
        (base64.b64encode(bytes(range(256))).decode(), "b64"),
        ("x" * 1000, None),
        # More than a frame of a client may have, and more than one write.
        ("".join(map(str, range(500_000))), None),
    ):
        other.ok("topic_send", "ROOM", body, None, enc)
        message = alice.message()
        assert (message["Body"], message.get("Enc")) == (body, enc)
    for begin, end in (("topic_listen", "topic_unlisten"), ("topic_notify", "topic_unnotify")):
        assert alice.call(begin, topic="ROOM")["Already"] == 1
        assert alice.call(end, topic="ROOM") == {"Err": "0"}
        assert alice.call(end, topic="ROOM")["Already"] == 1


@pytest.mark.parametrize(
    "program",
    ["uvicorn", pytest.param("gunicorn", marks=pytest.mark.nightly)],  # starts slowly
)
def test_other_asgi_servers_serve_the_relay_beside_daphne(
    new_site: Callable[..., Site], enter: Enter, alice: Visitor, program: str
):
    site = new_site(SERVER=program)
    assert site.get("/healthz")[0] == 200
    bob = enter("bob", "web.bob", at=site)
    for sender, receiver in ((alice, bob), (bob, alice)):
        receiver.ok("topic_listen", topic="ROOM")
        sender.ok("topic_notify", topic="ROOM")
        sender.ok("topic_send", topic="ROOM", body="x" * 20_000)
        assert receiver.message()["Body"] == "x" * 20_000
        receiver.ok("topic_unlisten", topic="ROOM")
    site.stop()
    assert bob.closed()[0] == 1012
    assert alice.event("crash")["Ident"] == "web.bob"


def test_calls_are_asked_and_answered_with_large_bodies(enter: Enter, relay: World, alice: Visitor):
    bob, other = enter("bob", "web.bob"), relay.node("user2", "OTHER")
    large = "".join(map(str, range(5000)))
    other.ok("rpc", "web.alice", "t1", large)
    question = alice.message()
    assert (question["From"], question["Body"]) == ("OTHER", large)
    # Only the called node may use the token.
    assert bob.error("return", node="OTHER", token=question["Token"], body="")[0] == 20
    alice.ok("return", node="OTHER", token=question["Token"], body="!")
    (answer,) = other.headers(1)
    assert (answer["Type"], answer["Token"], answer["Body"]) == ("Return", "t1", "!")
    bob.ok("rpc", node="web.alice", token="t2", body="?")
    alice.ok("return_error", node="web.bob", token=alice.message()["Token"], reason="no")
    refused = bob.message()
    assert (refused["Token"], refused["Err"], refused["Body"]) == ("t2", "56", "no")
    bob.ok("rpc", node="web.alice", token="t3", body="?")
    alice.ok("return", node="web.bob", token=alice.message()["Token"], body=large)
    assert bob.message()["Body"] == large


def test_refused_calls_are_answered_with_the_number(enter: Enter, alice: Visitor):
    assert alice.error("topic_listen", topic="NOTHING") == (9, "Topic NOTHING is not existent")
    assert alice.error("topic_send", topic="ROOM", body="")[0] == 21
    assert alice.error("rpc", node="OTHER", token="t", body="")[0] == 17
    assert alice.error("init", ident="web.alice.2") == (58, "more than one node per WebSocket")
    alice.ok("deinit")
    assert alice.error("topic_listen", topic="ROOM") == (50, "call messages.init first")
    assert alice.call("deinit") == {"Err": "0", "Already": 1}
    alice.ok("init", ident="web.alice.2")
    second = enter("alice")
    number, text = second.error("init", ident="web.alice.2")
    assert number == 8
    assert text.startswith("Client web.alice.2 already exists with pid ")
    alice.close()
    second.ok("init", ident="web.alice.2")


def test_a_name_that_is_not_the_users_is_refused(enter: Enter):
    visitor = enter("alice")
    WebIdentity.objects.update(ident="web.alice.*")
    # The rules allow the hub's role all of these but the last.
    for ident in ("web.alice", "web.bob", "web.alic", "web.", "WEB.alice.1", "web.alice.*"):
        answer = (5, f"there are no permissions for ident {ident}")
        assert visitor.error("init", ident=ident) == answer
    # A query for each prefix of the longest name would take gigabytes.
    too_long = (54, "name or token too long")
    answers = {"": (4, "cannot init without identity"), "web." + "x" * 97: too_long}
    for ident, answer in (answers | {"web." + "x" * 200_000: too_long}).items():
        assert visitor.error("init", ident=ident) == answer
    visitor.ok("init", ident="web.alice.1")


def test_a_group_gives_its_members_a_name(site: Site, enter: Enter):
    visitor = enter("carol")
    assert visitor.error("init", ident="OTHER")[0] == 5
    site.user("carol", groups=["staff"])
    WebIdentity.objects.create(group=Group.objects.get(name="staff"), ident="OTHER")
    # SQL refuses, because no rule allows the hub's role to be OTHER.
    assert visitor.error("init", ident="OTHER") == (5, "there are no permissions for ident OTHER")
    WebIdentity.objects.create(group=Group.objects.get(name="staff"), ident="web.*")
    WebIdentity.objects.filter(user__isnull=False).delete()
    visitor.ok("init", ident="web.carol")


def test_a_node_without_events_gets_only_events_about_itself(enter: Enter, relay: World):
    visitor = enter("alice")
    visitor.ok("init", ident="web.alice", events=False)
    visitor.ok("topic_listen", topic="ROOM")
    relay.node("user2", "OTHER", notify="ROOM").ok("topic_send", "ROOM", "behind the events")
    assert visitor.frame()["Body"] == "behind the events"
    relay.execute("DELETE FROM messages.auth WHERE dest = 'ROOM' AND ident = 'web.*'")
    event = visitor.frame()
    assert (event["Evt"], event["Ident"]) == ("topic_unlisten", "web.alice")


def test_the_end_of_a_socket_decides_the_event_for_others(enter: Enter, relay: World):
    other = relay.node("user2", "OTHER")
    for end, event in (
        (1000, "disconnect"), (1001, "disconnect"), (3000, "crash"), (4000, "crash"),
        (None, "crash"),
    ):  # fmt: skip
        visitor = enter("alice", "web.alice")
        assert other.events(1) == ["connect web.alice"]
        visitor.close(end) if end else visitor.break_off()
        assert other.events(1) == [f"{event} web.alice"]
    # All WebSockets of a process share one session.
    for number in range(5):
        enter("alice", f"web.{number}")
    assert relay.owner.query("SELECT count(*) FROM psqlmessages_session") == 2


def section(title: str) -> str:
    return RELAY.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_operation_close_code_and_setting_is_documented():
    documented = {}
    rows = re.findall(r"^\| (`.*?) \| (.*?) ?\|$", section("The protocol"), re.MULTILINE)
    for names, fields in rows:
        if "Evt" in names or "connection" in names or "Away" in fields:
            break
        required, _, optional = fields.partition(";")
        for name in re.findall(r"`(\w+)`", names):
            both = [re.findall(r"`(\w+)`", text) for text in (required, optional.split("(")[0])]
            documented[name] = {**dict.fromkeys(both[0], True), **dict.fromkeys(both[1], False)}
    known = {
        op: {key: fields[key].is_required for key in fields} for op, fields in OPERATIONS.items()
    }
    assert documented == known
    codes = {int(code) for code in re.findall(r"\b(?:1|4)\d\d\d\b", section("Close codes"))}
    names = ("UNSUPPORTED", "NOT_ALLOWED", "TOO_SLOW", "TOO_MANY", "TRY_AGAIN_LATER")
    assert codes >= {getattr(socket, name) for name in names}
    assert codes >= {code for code in socket.NORMAL_CLOSE_CODES if code not in (None, 1005)}
    assert set(re.findall(r"RELAY_[A-Z_]+[A-Z]", RELAY)) <= set(Settings.__dataclass_fields__)
    (example,) = re.findall(r"```python\n# asgi.py\n(.*?)```", RELAY, re.DOTALL)
    own = re.sub(r" *#.*", "", (DOCS.parent / "project" / "asgi.py").read_text()).splitlines()
    for line in filter(None, re.sub(r" *#.*", "", example).splitlines()):
        assert line in own, line


def test_own_consumers_stand_beside_the_relay_which_gets_the_servers_send():
    (example,) = re.findall(r"```python\n# asgi.py, continued\n(.*?)```", RELAY, re.DOTALL)
    called: list[tuple[str, object]] = []

    async def application(name: str, _scope: object, _receive: object, send: object) -> None:
        called.append((name, send))

    given: dict[str, Any] = {
        "websocket_application": lambda: partial(application, "relay"), "http": None,
        "ChatConsumer": SimpleNamespace(as_asgi=lambda: partial(application, "own")),
        "AuthMiddlewareStack": lambda inner: inner, "URLRouter": lambda routes: routes[0],
        "path": lambda _route, consumer: consumer, "ProtocolTypeRouter": dict,
    }  # fmt: skip
    exec(example, given)  # noqa: S102 - the page is ours
    for path in ("/chat/", "/ws/node/"):
        asyncio.run(given["application"]["websocket"]({"path": path}, None, print))
    assert called == [("own", print), ("relay", print)]


def test_the_conversation_runs_word_for_word(site: Site, world: World):
    world.rules(f"{Server.owner} chat/* Topic ROOM RW 60")
    site.user("alice", idents=["chat/alice/*"])
    (talk,) = re.findall(r"```\n(→.*?)```", RELAY, re.DOTALL)
    documented, arrived = [], []
    with closing(Visitor(site, cookie=site.login("alice"))) as visitor:
        for line in talk.splitlines():
            direction, _, frame = line.partition(" ")
            if direction == "→":
                visitor.connection.send(frame)
            else:
                documented.append(frame)
                arrived.append(visitor.connection.recv(timeout=60))
    # The order of a message and the answer to its sender may differ.
    for expected, found in zip(sorted(documented), sorted(arrived), strict=True):
        assert re.fullmatch(re.escape(expected).replace("…", r"\d+"), found), (expected, found)
        json.loads(found)


def refused(text: str) -> InvalidFrame:
    with pytest.raises(InvalidFrame) as error:
        parse_frame(text)
    assert error.value.number == 57
    return error.value


WRONG = {
    "": "it is not JSON: Expecting value: line 1 column 1 (char 0)",
    '{"op"': "it is not JSON: Expecting ':' delimiter: line 1 column 6 (char 5)",
    "[]": "an array is not a JSON object",
    "null": "null is not a JSON object",
    "{}": "unknown op null",
    '{"op":"fly"}': 'unknown op "fly"',
    '{"op":["init"]}': "unknown op an array",
    '{"op":"get_data","message":"x"}': 'unknown op "get_data"',
    '{"op":"deinit","ident":"a"}': 'deinit has no field "ident"',
    '{"op":"init"}': "the field ident is missing",
    '{"op":"init","ident":7}': "ident is 7, not text",
    '{"op":"init","ident":null}': "ident is null, not text",
    '{"op":"init","ident":"a","events":1}': "events is 1, not true or false",
    '{"op":"init","op":"init"}': "it is not JSON: an object has the field 'op' twice",
    '{"op":"init","ident":"a\\u0000"}': "ident has a NUL character at position 1",
    '{"op":"init","ident":"a\\ud800"}': "ident has a lone surrogate at position 1",
    '{"op":"deinit","ref":NaN}': "it is not JSON: NaN is not a JSON number",
    '{"op":"deinit","ref":-Infinity}': "it is not JSON: -Infinity is not a JSON number",
    '{"op":"deinit","ref":1e999}': "ref is not between -1e100 and 1e100",
    '{"op":"deinit","ref":true}': "ref is true, neither text nor a number",
    '{"op":"deinit","ref":"\\ud800"}': "ref has a lone surrogate at position 0",
    f'{{"op":"deinit","ref":"{"x" * 101}"}}': "ref is longer than 100 characters",
    f'{{"op":"deinit","ref":-{"9" * 101}}}': "ref is not between -1e100 and 1e100",
    "[" * 100_000: "it is not JSON: it is nested too deeply",
}


def test_an_answer_has_its_ref_and_says_what_is_wrong_with_a_frame():
    found = {text: refused(text).text for text in WRONG}
    assert found == {text: f"malformed frame: {reason}" for text, reason in WRONG.items()}
    assert "it is not JSON" in refused(f'{{"op":"deinit","ref":{"9" * 10_000}}}').text
    assert refused('{"ref":"r1","op":"fly"}').ref == "r1"
    assert refused('{"ref":2,"op":"init"}').ref == 2
    assert len(refused(json.dumps({"op": "x" * 1_000_000})).text) < 200
    refused('{"op":"\\ud800"}').text.encode()
    # An answer begins with its ref, and does not contain the channel.
    assert format_answer("a", {"Err": "0"}) == '{"ref":"a","Err":"0"}'
    assert format_answer(None, {"Err": "0"}) == '{"Err":"0"}'
    assert format_answer(0, {"Err": "0", "Channel": "secret"}) == '{"ref":0,"Err":"0"}'
