"""Who may open a WebSocket: users of the site's own pages, and programs with a token."""

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
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
LOG_IN = (4401, "log in first")

Knock = Callable[..., Visitor]


def status(knock: Knock, **given: Any) -> int:
    """The HTTP status by which a handshake is refused."""
    with pytest.raises(InvalidStatus) as error:
        knock(**given)
    return error.value.response.status_code


# By session


def test_only_active_users_with_a_session_are_admitted(
    new_site: Callable[..., Site], site: Site, knock: Knock
) -> None:
    assert knock().closed() == LOG_IN
    assert knock(cookie="x" * 32).closed() == LOG_IN
    cookie = site.login("alice")
    knock(cookie=cookie, origin=site.url)
    User.objects.update(is_active=False)
    assert knock(cookie=cookie).closed() == LOG_IN
    # Whatever the backend says.
    backend = "django.contrib.auth.backends.AllowAllUsersModelBackend"
    lax = new_site(AUTHENTICATION_BACKENDS=[backend])
    with closing(Visitor(lax, cookie=lax.login("alice"))) as visitor:
        assert visitor.closed() == LOG_IN


def test_another_origin_or_path_is_refused_in_the_handshake(site: Site, knock: Knock) -> None:
    cookie = site.login("alice")
    for origin in (
        None, "null", "http://evil.example", "http://evil.example:8000", "http://127.0.0.1",
        "http://127.0.0.1:1", f"https://127.0.0.1:{site.port}",
    ):  # fmt: skip
        assert status(knock, cookie=cookie, origin=origin) == 403, origin
    for path in ("/ws/nothing/", "/ws/node/more/"):
        assert status(knock, cookie=cookie, path=path) == 403, path
    # Another scheme is neither a token nor a way around the origin.
    for scheme in ("Basic", "Token", ""):
        headers = {"Authorization": f"{scheme} x"}
        given = {"cookie": cookie, "additional_headers": headers}
        assert status(knock, **given, origin="http://evil.example") == 403
        assert knock(**given).error("topic_status", topic="T")[0] == 50
    assert site.faults() == []


TLS_PROXY = {"SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https")}
TRUSTING = {"CSRF_TRUSTED_ORIGINS": ["https://app.example", "http://*.example.net:8000"]}
FORWARDED = {"headers": [(b"x-forwarded-proto", b"https")]}
TLS = {"scheme": "wss"}
ADMITTED = (
    ("http://site.example", "site.example", {}),
    ("http://site.example:80", "site.example", {}),
    ("http://SITE.example", "site.example:80", {}),
    ("http://site.example:8000", "site.example:8000", {}),
    ("http://evil.example", "evil.example", {"ALLOWED_HOSTS": ["*"]}),
    # TLS that ends in the server, and in a proxy.
    ("https://site.example", "site.example", TLS),
    ("https://site.example", "site.example:443", TLS),
    ("https://site.example", "site.example", {**TLS_PROXY, **FORWARDED}),
    ("https://app.example", "site.example", TRUSTING),
    ("https://app.example:443", "site.example", TRUSTING),
    ("http://a.b.example.net:8000", "site.example", TRUSTING),
)
REFUSED = (
    ("http://site.example:8000", "site.example", {}),
    ("http://site.example", "site.example:8000", {}),
    ("https://site.example", "site.example", {}),
    ("ws://site.example", "site.example", {}),
    ("http://other.site.example", "site.example", {}),
    ("http://site.example.evil.example", "site.example", {}),
    ("http://site.example@evil.example", "site.example", {}),
    ("http://user@site.example", "site.example", {}),
    ("http://site.example/", "site.example", {}),
    ("http://site.example:x", "site.example", {}),
    ("http://[::1", "site.example", {}),
    ("null", "site.example", {}),
    ("", "site.example", {}),
    # A host that is none of ours, as of a name that somebody leads to our address.
    ("http://evil.example", "evil.example", {}),
    ("http://evil.example", "site.example", {"ALLOWED_HOSTS": ["*"]}),
    ("http://site.example", "site.example", TLS),
    ("http://site.example", "site.example", {**TLS_PROXY, **FORWARDED}),
    ("https://site.example", "site.example", FORWARDED),
    ("http://app.example", "site.example", TRUSTING),
    ("https://sub.app.example", "site.example", TRUSTING),
    ("http://a.example.net", "site.example", TRUSTING),
    ("http://aexample.net:8000", "site.example", TRUSTING),
)


def test_an_origin_is_a_scheme_a_host_and_a_port(settings: Settings) -> None:
    usual = {
        "ALLOWED_HOSTS": ["site.example"],
        "CSRF_TRUSTED_ORIGINS": [],
        "SECURE_PROXY_SSL_HEADER": None,
    }
    wrong = []
    for cases, is_admitted in ((ADMITTED, True), (REFUSED, False)):
        for origin, host, given in cases:
            for name, value in (usual | given).items():
                setattr(settings, name, value)
            headers = [(b"host", host.encode()), (b"origin", origin.encode())]
            headers += given.get("headers", [])
            scope = {"type": "websocket", "path": "/", "scheme": given.get("scheme", "ws")}
            if is_own({**scope, "headers": headers}) is not is_admitted:
                wrong.append((origin, host, given))
            # Several origins are none.
            assert not is_own({**scope, "headers": [*headers, (b"origin", b"http://evil.example")]})
    assert wrong == []


# By token


def test_a_token_admits_from_anywhere_until_it_expires(site: Site, knock: Knock) -> None:
    robot = site.user("robot", is_superuser=True, is_staff=True)
    token = token_for(robot, HOUR)
    for origin in (None, "http://evil.example"):
        assert knock(token=token, origin=origin).error("topic_status", topic="T")[0] == 50
    for altered in (token[:-1], token + "x", "x" + token, "nothing", "é"):
        assert knock(token=altered).closed() == BAD_TOKEN, altered
    assert knock(token=token_for(robot, timedelta(0))).closed() == BAD_TOKEN
    # It does not count in the address, a session does not mend it, and it opens no other page.
    assert knock(path=f"/ws/node/?token={token}").closed() == LOG_IN
    assert knock(cookie=site.login("alice"), token="nothing").closed() == BAD_TOKEN
    assert status(knock, token=token, path="/ws/monitor/") == 403
    assert site.faults() == []


def test_what_ends_a_token(site: Site, settings: Settings) -> None:
    robot = site.user("robot")
    token = token_for(robot, HOUR)
    assert user_of(token) == robot
    said = signing.loads(token, salt="psqlmessages.token")
    # It holds nothing by which sessions are checked.
    assert robot.get_session_auth_hash() not in str(said)
    assert robot.password not in str(said)
    # Something that was signed for another purpose is no token.
    assert user_of(signing.dumps(said, salt="psqlmessages.token", compress=True)) == robot
    assert user_of(signing.dumps(said)) is None
    # A rotation of the secret key does not end it; a key that is forgotten does.
    key = settings.SECRET_KEY
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "a new key", [key]
    assert user_of(token) == robot
    settings.SECRET_KEY_FALLBACKS = []
    assert user_of(token) is None
    settings.SECRET_KEY = key
    robot.is_active = False
    robot.save()
    assert user_of(token) is None
    robot.is_active = True
    robot.set_password(PASSWORD)
    robot.save()
    assert user_of(token) is None
    token = token_for(robot, HOUR)
    robot.delete()
    assert user_of(token) is None
