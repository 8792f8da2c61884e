"""What is taken away while a WebSocket is open: it is lost within about a second."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
from django.contrib.auth.models import Group, User
from django.contrib.sessions.models import Session
from django.utils import timezone
from pytest_django import Settings

from psqlmessages.models import WebIdentity
from psqlmessages.relay import watch
from psqlmessages.relay.tokens import token_for
from tests.sql.conftest import World
from tests.web.site import Site
from tests.web.sockets import Visitor

Enter = Callable[..., Visitor]
# A second, and what a machine with much else to do may need besides; nothing else ends them.
SOON_SECONDS = 60


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


@pytest.fixture
def soon() -> Iterator[None]:
    """See that the test takes no longer than what is promised."""
    began = monotonic()
    yield
    assert monotonic() - began < SOON_SECONDS


@pytest.fixture
def alice(enter: Enter) -> Visitor:
    """The node web.alice of the user alice, listening to ROOM."""
    visitor = enter("alice", "web.alice")
    visitor.ok("topic_listen", topic="ROOM")
    return visitor


def test_a_user_who_is_deactivated_is_closed(relay: World, alice: Visitor, soon: None) -> None:
    other = relay.node("user2", "OTHER")
    User.objects.update(is_active=False)
    assert alice.closed() == (4401, "the user is not active any more")
    assert other.events(3) == [
        "topic_unlisten web.alice ROOM",
        "topic_none_listen ROOM",
        "crash web.alice",
    ]


def test_a_user_who_is_deleted_is_closed(alice: Visitor, soon: None) -> None:
    User.objects.all().delete()
    assert alice.closed() == (4401, "the user is not active any more")


@pytest.mark.django_db
def test_who_is_deleted_during_a_look_is_told_that(monkeypatch: pytest.MonkeyPatch) -> None:
    user = User.objects.create(username="carol")
    WebIdentity.objects.create(user=user, ident="web.carol")
    read = watch.idents_of

    def deleted_first(users: set[int]) -> dict[int, set[str]]:
        User.objects.all().delete()
        return read(users)

    monkeypatch.setattr(watch, "idents_of", deleted_first)
    carol = (Anybody(), watch.Credentials(user.pk, user.get_session_auth_hash()), "web.carol")
    assert watch.faults([carol]) == ["the user is not active any more"]


@pytest.mark.django_db
def test_permissions_that_cannot_be_asked_for_close_nobody_else() -> None:
    user = User.objects.create(username="carol")
    by = watch.Credentials(user.pk, user.get_session_auth_hash())
    unknown, known = watch.faults([(Unanswered(), by, None), (Anybody(), by, None)])
    assert isinstance(unknown, ConnectionError)
    assert known == ""


def test_a_websocket_of_which_nobody_can_tell_does_not_count_as_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unanswered(subjects: list[object]) -> list[Exception]:
        return [ConnectionError("no directory") for _ in subjects]

    monkeypatch.setattr(watch, "faults", unanswered)

    async def look() -> None:
        looking, unknown = watch.Watch(), Unanswered()
        unknown.credentials = watch.Credentials(1, "")
        looking.add(unknown)
        added_at = looking._watched[unknown]
        await looking.look()
        assert looking._watched[unknown] == added_at
        assert looking.failures == 1
        looking.end()

    asyncio.run(look())


def test_a_websocket_of_which_nobody_can_tell_is_given_up_after_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(watch, "monotonic", lambda: now[-1])

    async def look() -> None:
        looking, unknown = watch.Watch(), Unanswered()
        looking.add(unknown)
        for moment, is_given_up in ((1000.0, False), (1004.9, False), (1005.1, True)):
            now.append(moment)
            looking._give_up_on_the_unchecked()
            assert unknown.is_given_up == is_given_up
        looking.end()

    asyncio.run(look())


def test_a_user_who_logs_out_is_closed(site: Site, enter: Enter, soon: None) -> None:
    site.user("alice")
    visitor, other = enter("alice"), enter("alice")
    Session.objects.filter(session_key=visitor.cookie).delete()
    assert visitor.closed() == (4401, "the user has logged out")
    assert other.error("topic_status", topic="ROOM")[0] == 50


def test_a_session_that_expires_is_closed(alice: Visitor, soon: None) -> None:
    Session.objects.update(expire_date=timezone.now())
    assert alice.closed() == (4401, "the user has logged out")


def test_a_changed_password_closes(alice: Visitor, soon: None) -> None:
    user = User.objects.get()
    user.set_password("another")
    user.save()
    assert alice.closed() == (4401, "the password was changed")


def test_a_token_that_expires_is_closed(site: Site, knock: Enter) -> None:
    # Long enough to come in on a busy machine.
    visitor = knock(token=token_for(site.user("robot"), timedelta(seconds=12)))
    assert visitor.closed() == (4401, "the token has expired")


def test_an_ident_that_is_revoked_ends_the_node_and_not_the_socket(
    relay: World, alice: Visitor, soon: None
) -> None:
    other = relay.node("user2", "OTHER")
    WebIdentity.objects.all().delete()
    event = alice.event("disconnect")
    assert event["Ident"] == "web.alice"
    assert other.events(3)[-1] == "disconnect web.alice"
    assert alice.error("topic_status", topic="ROOM")[0] == 50
    assert alice.error("init", ident="web.alice")[0] == 5


def test_an_ident_of_a_group_ends_with_the_membership(site: Site, enter: Enter, soon: None) -> None:
    site.user("bob", groups=["talkers"])
    WebIdentity.objects.create(group=Group.objects.get(), ident="web.b*")
    visitor = enter("bob")
    WebIdentity.objects.filter(user__isnull=False).delete()
    visitor.ok("init", ident="web.bob")
    User.objects.get(username="bob").groups.clear()
    assert visitor.event("disconnect")["Ident"] == "web.bob"


def test_another_row_that_allows_the_ident_keeps_the_node(
    site: Site, alice: Visitor, knock: Enter
) -> None:
    site.user("alice", idents=["web.alice"])
    site.user("mallory", idents=["web.mallory"])
    WebIdentity.objects.filter(ident="web.*").delete()
    # A second user's loss shows that the watch has looked since.
    visitor = knock(cookie=site.login("mallory"))
    User.objects.filter(username="mallory").update(is_active=False)
    assert visitor.closed()[0] == 4401
    alice.ok("topic_status", topic="ROOM")


def test_a_rule_that_is_deleted_ends_what_it_allowed(
    relay: World, alice: Visitor, soon: None
) -> None:
    relay.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    event = alice.event("topic_unlisten")
    assert (event["Ident"], event["Topic"]) == ("web.alice", "ROOM")
    assert alice.error("topic_listen", topic="ROOM")[0] in (2, 9)


def test_a_node_that_an_administrator_disconnects_may_return(
    relay: World, alice: Visitor, soon: None
) -> None:
    relay.owner.query("SELECT messages._disconnect('web.alice')")
    assert alice.event("disconnect")["Ident"] == "web.alice"
    alice.ok("init", ident="web.alice")


# While nobody can tell


@pytest.fixture
def frail_site(new_site: Callable[..., Site], settings: Settings, tmp_path: Path) -> Site:
    """A site whose sessions are in files; their store is down while there is one named `down`."""
    settings.SESSION_ENGINE = "tests.web.frail_sessions"
    settings.SESSION_FILE_PATH = str(tmp_path)
    return new_site(SESSION_ENGINE=settings.SESSION_ENGINE, SESSION_FILE_PATH=str(tmp_path))


def test_a_session_store_that_was_down_for_a_while_does_not_end_the_watch(
    frail_site: Site, settings: Settings, tmp_path: Path
) -> None:
    with closing(Visitor(frail_site, cookie=frail_site.login("alice"))) as visitor:
        (tmp_path / "down-once").touch()
        (tmp_path / f"{settings.SESSION_COOKIE_NAME}{visitor.cookie}").unlink()
        assert visitor.closed() == (4401, "the user has logged out")
        assert "is not known: ConnectionError" in frail_site.log()


def test_a_node_of_which_nobody_can_tell_for_seconds_is_closed(
    frail_site: Site, enter: Enter, tmp_path: Path
) -> None:
    with closing(enter("alice", "web.alice", at=frail_site)) as visitor:
        (tmp_path / "down").touch()
        assert visitor.closed() == (1013, "who may be here cannot be checked")
