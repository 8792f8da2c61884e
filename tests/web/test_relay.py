"""The relay, by real WebSockets: what nodes behind it do, and what others see of them."""

import base64
from collections.abc import Callable

import pytest
from django.contrib.auth.models import Group

from psqlmessages.models import WebIdentity
from psqlmessages.relay.identities import idents_of, is_meant, may_be
from tests.sql.conftest import World, parse
from tests.web.site import Site
from tests.web.sockets import Visitor

Enter = Callable[..., Visitor]


@pytest.fixture
def alice(enter: Enter) -> Visitor:
    """The node web.alice of the user alice."""
    return enter("alice", "web.alice")


# Operations


def test_init_answers_with_the_ref_and_keeps_the_channel_to_itself(enter: Enter) -> None:
    visitor = enter("alice")
    assert visitor.call("init", ident="web.alice") == {"Err": "0"}
    assert visitor.call("init", ident="web.alice") == {"Err": "0", "Already": 1}


def test_two_users_talk(enter: Enter, alice: Visitor) -> None:
    bob = enter("bob", "web.bob")
    bob.ok("topic_listen", topic="ROOM")
    alice.ok("topic_notify", topic="ROOM")
    alice.ok("topic_send", topic="ROOM", body="hello")
    message = bob.message()
    assert (message["From"], message["To"], message["Body"]) == ("web.alice", "ROOM", "hello")


def test_a_program_and_a_web_user_talk(relay: World, alice: Visitor) -> None:
    other = relay.node("user2", "OTHER")
    other.ok("topic_listen", "ROOM")
    alice.ok("topic_notify", topic="ROOM")
    alice.ok("topic_send", topic="ROOM", body='{"a":1}', enc="json")
    sent = next(header for header in other.headers(2) if header["Type"] == "Topic")
    assert (sent["From"], sent["Enc"], sent["Body"]) == ("web.alice", "json", '{"a":1}')
    alice.ok("topic_listen", topic="ROOM")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "for all")
    assert alice.message()["Body"] == "for all"


def test_unlisten_and_unnotify_end_what_they_name(alice: Visitor) -> None:
    for begin, end in (("topic_listen", "topic_unlisten"), ("topic_notify", "topic_unnotify")):
        alice.ok(begin, topic="ROOM")
        assert alice.call(begin, topic="ROOM")["Already"] == 1
        assert alice.call(end, topic="ROOM") == {"Err": "0"}
        assert alice.call(end, topic="ROOM")["Already"] == 1


def test_status_and_auth_name_the_nodes_of_a_topic(enter: Enter, alice: Visitor) -> None:
    alice.ok("topic_notify", topic="ROOM")
    enter("bob", "web.bob").ok("topic_listen", topic="ROOM")
    status = alice.ok("topic_status", topic="ROOM")
    assert (status["Notifiers"], status["Listeners"]) == (["web.alice"], ["web.bob"])
    assert alice.ok("topic_auth", topic="ROOM")["Listeners"] == ["OTHER", "web.*"]


def test_a_program_asks_a_web_user_and_gets_the_answer(relay: World, alice: Visitor) -> None:
    other = relay.node("user2", "OTHER")
    other.ok("rpc", "web.alice", "ticket", "what time is it?")
    question = alice.message()
    assert (question["Type"], question["Body"]) == ("Rpc", "what time is it?")
    alice.ok("return", node="OTHER", token=question["Token"], body="noon")
    (answer,) = (parse(payload) for payload in other.payloads(1))
    assert (answer["Type"], answer["Token"], answer["Body"]) == ("Return", "ticket", "noon")


def test_a_web_user_asks_another_and_learns_of_a_failure(enter: Enter, alice: Visitor) -> None:
    bob = enter("bob", "web.bob")
    alice.ok("rpc", node="web.bob", token="t1", body="1", enc="json")
    bob.ok("return_error", node="web.alice", token=bob.message()["Token"], reason="no idea")
    answer = alice.message()
    assert (answer["Type"], answer["Token"], answer["Err"]) == ("Return", "t1", "56")
    assert answer["Body"] == "no idea"


def test_bytes_and_large_bodies_arrive_whole(enter: Enter, alice: Visitor) -> None:
    bob = enter("bob", "web.bob")
    bob.ok("topic_listen", topic="ROOM")
    alice.ok("topic_notify", topic="ROOM")
    body = base64.b64encode(bytes(range(256)) * 500).decode()
    alice.ok("topic_send", topic="ROOM", body=body, enc="b64")
    message = bob.message()
    assert (message["Enc"], message["Body"]) == ("b64", body)
    assert "Dkey" not in message


def test_a_body_beyond_the_limit_of_incoming_frames_can_be_received(
    relay: World, alice: Visitor
) -> None:
    other = relay.node("user2", "OTHER")
    alice.ok("topic_listen", topic="ROOM")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "x" * 3_000_000)
    assert len(alice.message()["Body"]) == 3_000_000


def test_what_the_rules_refuse_is_an_answer(alice: Visitor) -> None:
    assert alice.error("topic_listen", topic="NOTHING") == (9, "Topic NOTHING is not existent")
    assert alice.error("topic_send", topic="ROOM", body="")[0] == 21
    assert alice.error("rpc", node="OTHER", token="t", body="")[0] == 17


def test_before_init_everything_else_is_refused(enter: Enter) -> None:
    visitor = enter("alice")
    assert visitor.error("topic_listen", topic="ROOM") == (50, "call messages.init first")
    assert visitor.call("deinit") == {"Err": "0", "Already": 1}


def test_after_deinit_another_node_may_be_registered(alice: Visitor) -> None:
    assert alice.error("init", ident="web.alice.2") == (58, "more than one node of a WebSocket")
    alice.ok("deinit")
    assert alice.error("topic_status", topic="ROOM")[0] == 50
    alice.ok("init", ident="web.alice.2")


def test_an_ident_belongs_to_one_socket(enter: Enter, alice: Visitor) -> None:
    second = enter("alice")
    number, text = second.error("init", ident="web.alice")
    assert number == 8
    assert text.startswith("Client web.alice already exists with pid ")
    alice.close()
    second.ok("init", ident="web.alice")


def test_an_ident_that_is_not_the_users_is_refused(site: Site, enter: Enter) -> None:
    visitor = enter("alice")
    WebIdentity.objects.update(ident="web.alice.*")
    # The rules allow the hub's role each of these but the last.
    for ident in ("web.alice", "web.bob", "web.alic", "web.", "WEB.alice.1"):
        answer = (5, f"there are no permissions for ident {ident}")
        assert visitor.error("init", ident=ident) == answer
    visitor.ok("init", ident="web.alice.1")


def test_a_name_that_is_none_is_refused_before_anything_is_asked(enter: Enter) -> None:
    visitor = enter("alice")
    assert visitor.error("init", ident="") == (4, "cannot init without identity")
    assert visitor.error("init", ident="web." + "x" * 97) == (54, "name or token too long")
    # Long enough that asking for each of its beginnings would take gigabytes.
    assert visitor.error("init", ident="web." + "x" * 200_000) == (54, "name or token too long")


def test_a_pattern_is_nobodys_name(site: Site) -> None:
    user = site.user("alice", idents=["web.*", "web.alice"])
    names = ("web.alice", "web.*", "web.", "we", "", "web." + "x" * 96, "web." + "x" * 97)
    assert [may_be(user, name) for name in names] == [True, False, True, False, False, True, False]
    allowed = idents_of([user.pk])[user.pk]
    assert allowed == {"web.*", "web.alice"}
    assert [is_meant(name, allowed) for name in ("web.alice", "web.x", "we")] == [True, True, False]


def test_a_group_gives_its_members_an_ident(site: Site, enter: Enter) -> None:
    visitor = enter("carol")
    assert visitor.error("init", ident="OTHER")[0] == 5
    site.user("carol", groups=["staff"])
    WebIdentity.objects.create(group=Group.objects.get(name="staff"), ident="OTHER")
    # No rule lets the hub's role be OTHER: so says SQL, and no other check comes before.
    assert visitor.error("init", ident="OTHER") == (5, "there are no permissions for ident OTHER")
    WebIdentity.objects.create(group=Group.objects.get(name="staff"), ident="web.*")
    WebIdentity.objects.filter(user__isnull=False).delete()
    visitor.ok("init", ident="web.carol")


# Events


def test_events_reach_those_who_may_hear_them(enter: Enter, alice: Visitor) -> None:
    enter("bob", "web.bob").ok("topic_listen", topic="ROOM")
    assert alice.event("connect")["Ident"] == "web.bob"
    event = alice.event("topic_listen")
    assert (event["Ident"], event["Topic"]) == ("web.bob", "ROOM")
    assert "Nodes" not in event


def test_a_node_that_wants_no_events_hears_only_of_itself(enter: Enter, relay: World) -> None:
    visitor = enter("alice")
    visitor.ok("init", ident="web.alice", events=False)
    visitor.ok("topic_listen", topic="ROOM")
    other = relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "behind the events")
    assert visitor.frame()["Body"] == "behind the events"
    relay.owner.query(
        "DELETE FROM messages.auth WHERE dest = 'ROOM' AND ident = 'web.*' RETURNING 1"
    )
    event = visitor.frame()
    assert (event["Evt"], event["Ident"]) == ("topic_unlisten", "web.alice")


@pytest.mark.parametrize(
    ("code", "event"),
    [(1000, "disconnect"), (1001, "disconnect"), (3000, "crash"), (4000, "crash")],
)
def test_how_a_socket_is_closed_decides_what_others_hear(
    relay: World, alice: Visitor, code: int, event: str
) -> None:
    other = relay.node("user2", "OTHER")
    alice.close(code)
    assert other.events(1) == [f"{event} web.alice"]


def test_a_socket_that_breaks_off_has_crashed(relay: World, alice: Visitor) -> None:
    other = relay.node("user2", "OTHER")
    alice.break_off()
    assert other.events(1) == ["crash web.alice"]


def test_many_sockets_share_one_session(enter: Enter, relay: World) -> None:
    for number in range(10):
        enter("alice", f"web.{number}")
    assert relay.owner.query("SELECT count(*) FROM psqlmessages_session") == 1
