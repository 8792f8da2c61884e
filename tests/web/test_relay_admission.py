"""Who may open a WebSocket: users of the site's own pages, and programs with a token."""

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.contrib.sessions.models import Session
from django.core import signing
from django.core.exceptions import FieldError
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import Settings
from websockets.exceptions import ConnectionClosed, InvalidStatus

from psqlmessages.models import WebIdentity
from psqlmessages.monitor.access import ACCESS_PERMISSIONS, VIEW_BODIES
from psqlmessages.relay import revalidation
from psqlmessages.relay.asgi import has_allowed_origin
from psqlmessages.relay.auth import read_token, token_for
from psqlmessages.relay.revalidation import Credentials, RevalidationResult, find_revocations
from tests.sql.conftest import World
from tests.web.site import PASSWORD, Site
from tests.web.sockets import Enter, Visitor

HOUR = timedelta(hours=1)
BAD_TOKEN = (4401, "the token is altered, no longer valid, or a token for REST")
LOG_IN = (4401, "log in first")


def status(connect: Enter, **given: Any) -> int:
    """Return the HTTP status of a refused handshake."""
    with pytest.raises(InvalidStatus) as error:
        connect(**given)
    return error.value.response.status_code


def test_only_active_users_are_admitted(site: Site, connect: Enter):
    stranger = connect()
    with suppress(ConnectionClosed):
        stranger.connection.send('{"op":"init","ident":"a"}')
    assert stranger.closed() == LOG_IN
    assert connect(cookie="x" * 32).closed() == LOG_IN
    cookie = site.login("alice")
    connect(cookie=cookie, origin=site.url)
    User.objects.update(is_active=False)
    assert connect(cookie=cookie).closed() == LOG_IN


def test_another_origin_or_path_is_refused_in_the_handshake(site: Site, connect: Enter):
    cookie = site.login("alice")
    for origin in (
        None, "null", "http://evil.example", "http://evil.example:8000", "http://127.0.0.1",
        "http://127.0.0.1:1", f"https://127.0.0.1:{site.port}",
    ):  # fmt: skip
        assert status(connect, cookie=cookie, origin=origin) == 403, origin
    for path in ("/app/ws/nothing/", "/ws/node/more/", "/appws/node/", "/app/ws/node"):
        assert status(connect, cookie=cookie, path=path) == 403, path
    assert connect(cookie=cookie, path="/a/b/ws/node/").error("topic_status", topic="T")[0] == 50
    # With another scheme, the origin is still checked.
    for scheme in ("Basic", "Token", ""):
        given = {"cookie": cookie, "headers": {"Authorization": f"{scheme} x"}}
        assert status(connect, **given, origin="http://evil.example") == 403
        assert connect(**given).error("topic_status", topic="T")[0] == 50


TLS_PROXY = {"SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https")}
FORWARDED = {"headers": [(b"x-forwarded-proto", b"https")]}
TLS = {"scheme": "wss"}
ANY_HOST = {"ALLOWED_HOSTS": ["*"]}
STRANGERS = (
    "http://site.example:8000 https://site.example ws://site.example http://other.site.example"
    " http://site.example.evil.example http://site.example@evil.example http://user@site.example"
    " http://site.example/ http://site.example:x http://[::1 null"
)
# The host, settings and parts of the scope, the origins that are admitted, and those that are not.
ORIGINS = (
    ("site.example", {}, "http://site.example http://site.example:80",
     STRANGERS),
    ("site.example:80", {}, "http://SITE.example", ""),
    ("site.example:8000", {}, "http://site.example:8000", "http://site.example"),
    # A host that is not ours, as in DNS rebinding.
    ("evil.example", {}, "", "http://evil.example"),
    ("evil.example", ANY_HOST, "http://evil.example", ""),
    ("site.example", ANY_HOST, "", "http://evil.example"),
    # TLS of the server, and of a proxy.
    ("site.example", TLS, "https://site.example", "http://site.example"),
    ("site.example:443", TLS, "https://site.example", ""),
    ("site.example", {**TLS_PROXY, **FORWARDED}, "https://site.example", "http://site.example"),
    ("site.example", FORWARDED, "", "https://site.example"),
    ("site.example", {"CSRF_TRUSTED_ORIGINS": ["https://app.example", "http://*.example.net:8000"]},
     "https://app.example https://app.example:443 http://a.b.example.net:8000",
     "http://app.example https://sub.app.example http://a.example.net http://aexample.net:8000"),
)  # fmt: skip


def test_an_origin_is_a_scheme_a_host_and_a_port(settings: Settings):
    usual = {"CSRF_TRUSTED_ORIGINS": [], "SECURE_PROXY_SSL_HEADER": None}
    wrong = []
    for host, given, admitted, refused in ORIGINS:
        for name, value in ({"ALLOWED_HOSTS": ["site.example"]} | usual | given).items():
            setattr(settings, name, value)
        for origin in ("", *admitted.split(), *refused.split()):
            headers = [(b"host", host.encode()), (b"origin", origin.encode())]
            headers += given.get("headers", [])
            scope = {"type": "websocket", "path": "/", "scheme": given.get("scheme", "ws")}
            is_allowed = has_allowed_origin({**scope, "headers": headers})
            if is_allowed is not (origin in admitted.split()):
                wrong.append((origin, host, given))
            # Several origins are refused.
            headers.append((b"origin", b"http://evil.example"))
            assert not has_allowed_origin({**scope, "headers": headers})
    assert wrong == []


def test_a_token_admits_from_anywhere_until_it_expires(site: Site, connect: Enter):
    robot = site.user("robot", is_superuser=True, is_staff=True)
    token = token_for(robot, 3600)
    assert read_token(token).expires_at - datetime.now(UTC) > HOUR * 0.9
    for origin in (None, "http://evil.example"):
        assert connect(token=token, origin=origin).error("topic_status", topic="T")[0] == 50
    for bad in (token[:-1], token + "x", "x" + token, "nothing", "é", token_for(robot, 0)):
        assert connect(token=bad).closed() == BAD_TOKEN, bad
    # Not in the address, not with a session, and not for other pages.
    assert connect(path=f"/ws/node/?token={token}").closed() == LOG_IN
    assert connect(cookie=site.login("alice"), token="nothing").closed() == BAD_TOKEN
    assert status(connect, token=token, path="/ws/monitor/") == 403


def test_what_ends_a_token(site: Site, settings: Settings):
    robot = site.user("robot")
    token = token_for(robot, HOUR)
    assert read_token(token).user == robot
    said = signing.loads(token, salt="psqlmessages.token")
    # It contains no secret of sessions.
    assert robot.get_session_auth_hash() not in str(said)
    assert robot.password not in str(said)
    # Only the right salt makes a token.
    assert read_token(signing.dumps(said, salt="psqlmessages.token", compress=True)).user == robot
    assert read_token(signing.dumps(said)) is None
    # A token is valid as long as its key is a fallback.
    key = settings.SECRET_KEY
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "a new key", [key]
    assert read_token(token).user == robot
    settings.SECRET_KEY_FALLBACKS = []
    assert read_token(token) is None
    settings.SECRET_KEY = key
    robot.is_active = False
    robot.save()
    assert read_token(token) is None
    robot.is_active = True
    robot.set_password(PASSWORD)
    robot.save()
    assert read_token(token) is None
    token = token_for(robot, HOUR)
    robot.delete()
    assert read_token(token) is None


@pytest.fixture
def alice(enter: Enter) -> Visitor:
    visitor = enter("alice", "web.alice")
    visitor.ok("topic_listen", topic="ROOM")
    return visitor


def test_the_socket_of_a_user_who_lost_access_is_closed(relay: World, enter: Enter):
    other = relay.node("user2", "OTHER")
    for reason, change in (
        ("the user is no longer active", lambda: User.objects.update(is_active=False)),
        ("the user is no longer active", lambda: User.objects.all().delete()),
        ("the user has logged out", lambda: Session.objects.update(expire_date=timezone.now())),
        ("the password was changed", lambda: User.objects.update(password="x")),
    ):
        visitor = enter("alice", "web.alice")
        visitor.ok("topic_listen", topic="ROOM")
        other.payloads()
        change()
        assert visitor.closed() == (4401, reason)
        ends = ["topic_unlisten web.alice ROOM", "topic_none_listen ROOM", "crash web.alice"]
        assert other.events(3) == ends
        User.objects.all().delete()


def test_logging_out_or_a_tokens_end_closes_no_other(site: Site, enter: Enter, connect: Enter):
    visitor, other = enter("alice"), enter("alice")
    robot = connect(token=token_for(site.user("robot"), timedelta(seconds=3)))
    Session.objects.filter(session_key=visitor.cookie).delete()
    assert visitor.closed() == (4401, "the user has logged out")
    assert robot.closed() == (4401, "the token has expired")
    assert other.error("topic_status", topic="ROOM")[0] == 50


def test_a_revoked_name_ends_only_the_node(relay: World, site: Site, alice: Visitor, enter: Enter):
    other = relay.node("user2", "OTHER")
    # Only a group allows bob to be web.bob.
    site.user("bob", groups=["talkers"])
    WebIdentity.objects.create(group=Group.objects.get(), ident="web.b*")
    bob = enter("bob")
    WebIdentity.objects.filter(user__username="bob").delete()
    bob.ok("init", ident="web.bob")
    # Another row allows the name.
    site.user("alice", idents=["web.alice"])
    WebIdentity.objects.filter(ident="web.*").delete()
    User.objects.get(username="bob").groups.clear()
    assert bob.event("disconnect")["Ident"] == "web.bob"
    alice.ok("topic_status", topic="ROOM")
    other.payloads()
    WebIdentity.objects.all().delete()
    while alice.event("disconnect")["Ident"] != "web.alice":
        pass
    assert other.events(3)[-1] == "disconnect web.alice"
    assert alice.error("topic_status", topic="ROOM")[0] == 50
    assert alice.error("init", ident="web.alice")[0] == 5


def test_a_session_store_that_is_down_ends_nodes_after_seconds_and_not_the_watch(
    new_site: Callable[..., Site], enter: Enter, settings: Settings, tmp_path: Path
):
    settings.SESSION_ENGINE = "tests.web.frail_sessions"
    settings.SESSION_FILE_PATH = str(tmp_path)
    frail_site = new_site(
        SESSION_ENGINE=settings.SESSION_ENGINE, SESSION_FILE_PATH=str(tmp_path),
        AUTHENTICATION_BACKENDS=["django.contrib.auth.backends.AllowAllUsersModelBackend"],
        PATCHED={"psqlmessages.relay.revalidation.MAX_UNCHECKED_SECONDS": 2},
    )  # fmt: skip
    frail_site.user("carol", is_active=False)
    with closing(Visitor(frail_site, cookie=frail_site.login("carol"))) as inactive:
        assert inactive.closed() == LOG_IN, "whatever the backend says"
    visitor = enter("bob", at=frail_site)
    (tmp_path / "down-once").touch()
    (tmp_path / f"{settings.SESSION_COOKIE_NAME}{visitor.cookie}").unlink()
    assert visitor.closed() == (4401, "the user has logged out")
    assert "the session store is down" in frail_site.log()
    visitor = enter("alice", "web.alice", at=frail_site)
    (tmp_path / "down").touch()
    began = monotonic()
    assert visitor.closed() == (1013, "permissions cannot be checked: try again later")
    assert monotonic() - began > 1


# A user, the user's own permissions, those of the group, and those that the page gets.
USERS: tuple[tuple[dict[str, bool], str, str, Any], ...] = (
    ({}, "view_monitor view_bodies", "", ACCESS_PERMISSIONS),
    ({}, "view_bodies", "view_monitor view_auth", ACCESS_PERMISSIONS),
    ({}, "view_auth", "view_bodies", {VIEW_BODIES}),
    ({"is_superuser": True}, "", "", ACCESS_PERMISSIONS),
    ({"is_superuser": True, "is_active": False}, "view_monitor", "view_monitor", None),
)


@pytest.mark.usefixtures("database")
def test_one_query_reads_the_permissions_of_all_pages_as_has_perm_does(settings: Settings):
    subjects = []
    for number, (fields, own, of_group, _) in enumerate(USERS):
        user = User.objects.create_user(f"user{number}", **fields)
        group = user.groups.create(name=user.username)
        for granting, names in ((user.user_permissions, own), (group.permissions, of_group)):
            granting.set(Permission.objects.filter(codename__in=names.split()))
        credentials = Credentials(user.pk, user.get_session_auth_hash())
        subjects.append((Mock(permissions=ACCESS_PERMISSIONS), credentials, None))
    # Other backends decide for each user: one query reads the users, six their permissions.
    for backend, number in (("ModelBackend", 2), ("AllowAllUsersModelBackend", 1 + 3 * 2)):
        settings.AUTHENTICATION_BACKENDS = [f"django.contrib.auth.backends.{backend}"]
        with CaptureQueriesContext(connection) as queries:
            find_revocations(subjects)
        calls = [page.permits.call_args for page, *_ in subjects]
        assert [call and call.args[1] for call in calls] == [each[3] for each in USERS]
        assert len(queries) == number


def test_a_check_that_fails_leaves_websockets_unchecked_until_one_succeeds(monkeypatch):
    find = Mock(side_effect=FieldError)
    for name, value in (
        ("find_revocations", find), ("CHECK_INTERVAL_SECONDS", 0.01), ("MAX_UNCHECKED_SECONDS", 0),
    ):  # fmt: skip
        monkeypatch.setattr(revalidation, name, value)

    async def run() -> None:
        unchecked, revoked = asyncio.Event(), asyncio.Event()
        monitor, socket = revalidation.CredentialMonitor(), Mock(on_unchecked=unchecked.set)
        socket.on_access_revoked = lambda _reason: revoked.set()
        monitor.add(socket)
        await asyncio.wait_for(unchecked.wait(), 60)
        find.return_value, find.side_effect = [RevalidationResult("logged out")], None
        await asyncio.wait_for(revoked.wait(), 60)
        monitor.stop()

    asyncio.run(run())
