"""What is taken away while a WebSocket is open: it is lost within about a second."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from django.contrib.auth.models import Group, User
from django.contrib.sessions.models import Session
from django.utils import timezone
from pytest_django import Settings

from psqlmessages.models import WebIdentity
from psqlmessages.relay import watch
from psqlmessages.relay.tokens import token_for
from tests.sql.conftest import World
from tests.web.receivers import in_loop
from tests.web.site import Site
from tests.web.sockets import Visitor

Enter = Callable[..., Visitor]


@pytest.fixture
def alice(enter: Enter) -> Visitor:
    """The node web.alice of the user alice, listening to ROOM."""
    visitor = enter("alice", "web.alice")
    visitor.ok("topic_listen", topic="ROOM")
    return visitor


# Users, sessions and tokens


def deactivate(_: Site) -> None:
    User.objects.update(is_active=False)


def delete(_: Site) -> None:
    User.objects.all().delete()


def expire(_: Site) -> None:
    Session.objects.update(expire_date=timezone.now())


def set_password(_: Site) -> None:
    user = User.objects.get()
    user.set_password("another")
    user.save()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (deactivate, "the user is not active any more"),
        (delete, "the user is not active any more"),
        (expire, "the user has logged out"),
        (set_password, "the password was changed"),
    ],
)
def test_a_user_who_may_not_be_here_any_more_is_closed(
    site: Site, relay: World, alice: Visitor, change: Callable[[Site], None], reason: str
) -> None:
    other = relay.node("user2", "OTHER")
    change(site)
    assert alice.closed() == (4401, reason)
    assert other.events(3) == [
        "topic_unlisten web.alice ROOM",
        "topic_none_listen ROOM",
        "crash web.alice",
    ]


def test_logging_out_or_the_end_of_a_token_closes_no_other_socket(
    site: Site, enter: Enter, knock: Enter
) -> None:
    visitor, other = enter("alice"), enter("alice")
    # Long enough to come in on a busy machine.
    robot = knock(token=token_for(site.user("robot"), timedelta(seconds=5)))
    Session.objects.filter(session_key=visitor.cookie).delete()
    assert visitor.closed() == (4401, "the user has logged out")
    assert robot.closed() == (4401, "the token has expired")
    assert other.error("topic_status", topic="ROOM")[0] == 50


# Names and rules


def test_a_revoked_name_ends_the_node_and_not_the_socket(
    relay: World, site: Site, alice: Visitor, enter: Enter
) -> None:
    other = relay.node("user2", "OTHER")
    # Bob may be web.bob by a group alone.
    site.user("bob", groups=["talkers"])
    WebIdentity.objects.create(group=Group.objects.get(), ident="web.b*")
    bob = enter("bob")
    WebIdentity.objects.filter(user__username="bob").delete()
    bob.ok("init", ident="web.bob")
    # Another row that allows the name keeps the node.
    site.user("alice", idents=["web.alice"])
    WebIdentity.objects.filter(ident="web.*").delete()
    User.objects.get(username="bob").groups.clear()
    assert bob.event("disconnect")["Ident"] == "web.bob"
    alice.ok("topic_status", topic="ROOM")
    other.payloads()
    WebIdentity.objects.all().delete()
    # She may have heard of bob's end before.
    while alice.event("disconnect")["Ident"] != "web.alice":
        pass
    assert other.events(3)[-1] == "disconnect web.alice"
    assert alice.error("topic_status", topic="ROOM")[0] == 50
    assert alice.error("init", ident="web.alice")[0] == 5


def test_a_deleted_rule_ends_what_it_allowed_and_a_disconnected_node_may_return(
    relay: World, alice: Visitor
) -> None:
    relay.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    event = alice.event("topic_unlisten")
    assert (event["Ident"], event["Topic"]) == ("web.alice", "ROOM")
    assert alice.error("topic_listen", topic="ROOM")[0] in (2, 9)
    relay.owner.query("SELECT messages._disconnect('web.alice')")
    assert alice.event("disconnect")["Ident"] == "web.alice"
    alice.ok("init", ident="web.alice")


# While nobody can tell


class Anybody:
    """A WebSocket that needs no permission."""

    def permits(self, _: User) -> bool:
        return True


class Unanswered(Anybody):
    """One whose permissions the project asks for elsewhere, where nobody answers."""

    ident = None
    is_given_up = False

    def permits(self, _: User) -> bool:
        raise ConnectionError("no directory")

    def reap(self) -> None:
        """Have nothing to let go of."""

    def unchecked(self) -> None:
        """Take note that nobody could tell for too long."""
        self.is_given_up = True


@pytest.mark.django_db
def test_a_user_who_cannot_be_checked_closes_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    user = User.objects.create(username="carol")
    WebIdentity.objects.create(user=user, ident="web.carol")
    by = watch.Credentials(user.pk, user.get_session_auth_hash())
    unknown, known = watch.faults([(Unanswered(), by, None), (Anybody(), by, None)])
    assert isinstance(unknown, ConnectionError)
    assert known == ""
    # One who is deleted during a check is told that.
    read = watch.idents_of

    def deleted_first(users: set[int]) -> dict[int, set[str]]:
        User.objects.all().delete()
        return read(users)

    monkeypatch.setattr(watch, "idents_of", deleted_first)
    assert watch.faults([(Anybody(), by, "web.carol")]) == ["the user is not active any more"]


@in_loop
async def test_a_websocket_that_cannot_be_checked_is_given_up_after_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(watch, "monotonic", lambda: now[-1])
    monkeypatch.setattr(watch, "faults", lambda subjects: [ConnectionError()] * len(subjects))
    looking, unknown = watch.Watch(), Unanswered()
    unknown.credentials = watch.Credentials(1, "")
    looking.add(unknown)
    for moment, is_given_up in ((1000.0, False), (1004.9, False), (1005.1, True)):
        now.append(moment)
        # That nobody could tell does not count as a check.
        await looking.look()
        looking._give_up_on_the_unchecked()
        assert unknown.is_given_up == is_given_up
    assert looking.failures == 3
    looking.end()
    await asyncio.sleep(0)


@pytest.fixture
def frail_site(new_site: Callable[..., Site], settings: Settings, tmp_path: Path) -> Site:
    """A site whose sessions are in files; their store is down while there is one named `down`."""
    settings.SESSION_ENGINE = "tests.web.frail_sessions"
    settings.SESSION_FILE_PATH = str(tmp_path)
    return new_site(SESSION_ENGINE=settings.SESSION_ENGINE, SESSION_FILE_PATH=str(tmp_path))


def test_a_session_store_that_is_down_ends_nodes_after_seconds_and_not_the_watch(
    frail_site: Site, enter: Enter, settings: Settings, tmp_path: Path
) -> None:
    with closing(Visitor(frail_site, cookie=frail_site.login("bob"))) as visitor:
        (tmp_path / "down-once").touch()
        (tmp_path / f"{settings.SESSION_COOKIE_NAME}{visitor.cookie}").unlink()
        assert visitor.closed() == (4401, "the user has logged out")
        assert "is not known: ConnectionError" in frail_site.log()
    with closing(enter("alice", "web.alice", at=frail_site)) as visitor:
        (tmp_path / "down").touch()
        assert visitor.closed() == (1013, "who may be here cannot be checked")
