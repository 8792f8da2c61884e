"""Who may open a WebSocket: users of the site's own pages, and programs with a token."""

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core import signing
from pytest_django import Settings
from websockets.exceptions import InvalidStatus

from psqlmessages.relay.origins import is_own
from psqlmessages.relay.tokens import token_for, user_of
from tests.web.site import PASSWORD, Site
from tests.web.sockets import Visitor

HOUR = timedelta(hours=1)
BAD_TOKEN = (4401, "the token is altered or has expired")

Knock = Callable[..., Visitor]


def refused_with(open_one: Callable[[], Visitor]) -> int:
    with pytest.raises(InvalidStatus) as error:
        open_one()
    return error.value.response.status_code


# By session


def test_anonymous_is_accepted_and_closed_with_a_code_that_browsers_see(knock: Knock) -> None:
    assert knock().closed() == (4401, "log in first")


def test_a_session_that_is_not_there_is_anonymous(knock: Knock) -> None:
    assert knock(cookie="x" * 32).closed() == (4401, "log in first")


def test_an_inactive_user_is_refused(site: Site, knock: Knock) -> None:
    cookie = site.login("alice")
    User.objects.update(is_active=False)
    assert knock(cookie=cookie).closed() == (4401, "log in first")


def test_an_inactive_user_is_refused_whatever_the_backend_says(
    new_site: Callable[..., Site],
) -> None:
    backend = "django.contrib.auth.backends.AllowAllUsersModelBackend"
    site = new_site(AUTHENTICATION_BACKENDS=[backend])
    cookie = site.login("alice")
    User.objects.update(is_active=False)
    with closing(Visitor(site, cookie=cookie)) as visitor:
        assert visitor.closed() == (4401, "log in first")


@pytest.mark.parametrize("origin", ["http://evil.example", "http://evil.example:8000", "null"])
def test_another_origin_is_refused(site: Site, knock: Knock, origin: str) -> None:
    assert refused_with(partial(knock, cookie=site.login("alice"), origin=origin)) == 403


def test_another_port_or_scheme_is_another_origin(site: Site, knock: Knock) -> None:
    for origin in ("http://127.0.0.1:1", f"https://127.0.0.1:{site.port}", "http://127.0.0.1"):
        assert refused_with(partial(knock, cookie=site.login("alice"), origin=origin)) == 403
    knock(cookie=site.login("alice"), origin=site.url)


TLS_PROXY = {"SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https")}
TRUSTING = {"CSRF_TRUSTED_ORIGINS": ["https://app.example", "http://*.example.net:8000"]}
FORWARDED = (b"x-forwarded-proto", b"https")


@pytest.mark.parametrize(
    ("origin", "host", "is_admitted", "given"),
    [
        ("http://site.example", "site.example", True, {}),
        ("http://site.example:80", "site.example", True, {}),
        ("http://SITE.example", "site.example:80", True, {}),
        ("http://site.example:8000", "site.example:8000", True, {}),
        ("http://site.example:8000", "site.example", False, {}),
        ("http://site.example", "site.example:8000", False, {}),
        ("https://site.example", "site.example", False, {}),
        ("ws://site.example", "site.example", False, {}),
        ("http://other.site.example", "site.example", False, {}),
        ("http://site.example.evil.example", "site.example", False, {}),
        ("http://site.example@evil.example", "site.example", False, {}),
        ("http://user@site.example", "site.example", False, {}),
        ("http://site.example/", "site.example", False, {}),
        ("http://site.example:x", "site.example", False, {}),
        ("http://[::1", "site.example", False, {}),
        ("null", "site.example", False, {}),
        ("", "site.example", False, {}),
        # A host that is none of ours, as of a name that somebody leads to our address.
        ("http://evil.example", "evil.example", False, {}),
        ("http://evil.example", "evil.example", True, {"ALLOWED_HOSTS": ["*"]}),
        ("http://evil.example", "site.example", False, {"ALLOWED_HOSTS": ["*"]}),
        # TLS that ends in the server, and in a proxy.
        ("https://site.example", "site.example", True, {"scheme": "wss"}),
        ("https://site.example", "site.example:443", True, {"scheme": "wss"}),
        ("http://site.example", "site.example", False, {"scheme": "wss"}),
        ("https://site.example", "site.example", True, {**TLS_PROXY, "headers": [FORWARDED]}),
        ("http://site.example", "site.example", False, {**TLS_PROXY, "headers": [FORWARDED]}),
        ("https://site.example", "site.example", False, {"headers": [FORWARDED]}),
        ("https://app.example", "site.example", True, TRUSTING),
        ("https://app.example:443", "site.example", True, TRUSTING),
        ("http://app.example", "site.example", False, TRUSTING),
        ("https://sub.app.example", "site.example", False, TRUSTING),
        ("http://a.b.example.net:8000", "site.example", True, TRUSTING),
        ("http://a.example.net", "site.example", False, TRUSTING),
        ("http://aexample.net:8000", "site.example", False, TRUSTING),
    ],
)
def test_an_origin_is_a_scheme_a_host_and_a_port(
    settings: Settings, origin: str, host: str, is_admitted: bool, given: dict[str, Any]
) -> None:
    settings.ALLOWED_HOSTS = ["site.example"]
    for name in given.keys() - {"scheme", "headers"}:
        setattr(settings, name, given[name])
    headers = [(b"host", host.encode()), (b"origin", origin.encode()), *given.get("headers", ())]
    scope = {"type": "websocket", "path": "/", "scheme": given.get("scheme", "ws")}
    assert is_own({**scope, "headers": headers}) is is_admitted
    # Several are none.
    assert not is_own({**scope, "headers": [*headers, (b"origin", b"http://evil.example")]})


def test_no_origin_is_refused(site: Site, knock: Knock) -> None:
    assert refused_with(partial(knock, cookie=site.login("alice"), origin=None)) == 403


def test_a_path_that_leads_nowhere_is_refused_without_a_fault(site: Site, knock: Knock) -> None:
    assert refused_with(partial(knock, cookie=site.login("alice"), path="/ws/nothing/")) == 403
    assert refused_with(partial(knock, path="/ws/node/more/")) == 403
    assert site.faults() == []


# By token


def test_a_token_admits_without_origin_or_session(site: Site, knock: Knock) -> None:
    token = token_for(site.user("robot"), HOUR)
    assert knock(token=token).error("topic_status", topic="T")[0] == 50


def test_a_token_admits_from_any_origin(site: Site, knock: Knock) -> None:
    visitor = knock(token=token_for(site.user("robot"), HOUR), origin="http://evil.example")
    assert visitor.error("topic_status", topic="T")[0] == 50


def test_an_altered_token_is_refused(site: Site, knock: Knock) -> None:
    token = token_for(site.user("robot"), HOUR)
    for altered in (token[:-1], token + "x", "x" + token, "nothing", "é"):
        assert knock(token=altered).closed() == BAD_TOKEN


def test_an_expired_token_is_refused(site: Site, knock: Knock) -> None:
    token = token_for(site.user("robot"), timedelta(0))
    assert knock(token=token).closed() == BAD_TOKEN


def test_a_token_does_not_count_in_the_address(site: Site, knock: Knock) -> None:
    token = token_for(site.user("robot"), HOUR)
    assert knock(path=f"/ws/node/?token={token}").closed() == (4401, "log in first")


def test_a_bad_token_is_not_made_good_by_a_session(site: Site, knock: Knock) -> None:
    assert knock(cookie=site.login("alice"), token="nothing").closed() == BAD_TOKEN


def test_a_token_does_not_open_the_monitor(site: Site, knock: Knock) -> None:
    token = token_for(site.user("root", is_superuser=True, is_staff=True), HOUR)
    assert refused_with(partial(knock, token=token, path="/ws/monitor/")) == 403
    assert site.faults() == []


@pytest.mark.parametrize("scheme", ["Basic", "Token", ""])
def test_another_scheme_is_neither_a_token_nor_a_way_around_the_origin(
    site: Site, knock: Knock, scheme: str
) -> None:
    given = {
        "cookie": site.login("alice"),
        "additional_headers": {"Authorization": f"{scheme} x"},
    }
    assert refused_with(partial(knock, **given, origin="http://evil.example")) == 403
    assert knock(**given).error("topic_status", topic="T")[0] == 50


# What ends a token


@pytest.fixture
def robot(site: Site) -> User:
    return site.user("robot")


def test_a_token_names_its_user(robot: User) -> None:
    assert user_of(token_for(robot, HOUR)) == robot


def test_a_changed_password_ends_a_token(robot: User) -> None:
    token = token_for(robot, HOUR)
    robot.set_password(PASSWORD)
    robot.save()
    assert user_of(token) is None


def test_a_token_of_a_user_who_is_inactive_or_gone_is_none(robot: User) -> None:
    token = token_for(robot, HOUR)
    User.objects.update(is_active=False)
    assert user_of(token) is None
    User.objects.all().delete()
    assert user_of(token) is None


def test_what_was_signed_for_another_purpose_is_no_token(robot: User) -> None:
    said = signing.loads(token_for(robot, HOUR), salt="psqlmessages.token")
    assert user_of(signing.dumps(said, salt="psqlmessages.token", compress=True)) == robot
    assert user_of(signing.dumps(said)) is None


def test_a_token_tells_nothing_that_sessions_are_checked_by(robot: User) -> None:
    said = signing.loads(token_for(robot, HOUR), salt="psqlmessages.token")
    assert robot.get_session_auth_hash() not in str(said)
    assert robot.password not in str(said)


def test_a_token_outlives_a_rotation_of_the_secret_key(robot: User, settings: Settings) -> None:
    token = token_for(robot, HOUR)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "a new key", [settings.SECRET_KEY]
    assert user_of(token) == robot
    settings.SECRET_KEY_FALLBACKS = []
    assert user_of(token) is None
