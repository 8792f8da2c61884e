"""Authentication and permissions of the API, and its limits."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.middleware.csrf import _get_new_csrf_string

from psqlmessages.models import WebIdentity
from psqlmessages.relay import auth as relay_tokens
from psqlmessages.rest.auth import token_for
from tests.rest.callers import Caller, at
from tests.rest.test_queues import waits
from tests.sql.conftest import World
from tests.web.site import Site

SECRET = _get_new_csrf_string()


@pytest.fixture
def page(site: Site, rest: World) -> Callable[..., Caller]:
    def make(username: str, *idents: str, csrf: str = SECRET, **fields: object) -> Caller:
        site.user(username, idents=idents, **fields)
        cookies = f"{settings.SESSION_COOKIE_NAME}={site.login(username)}; csrftoken={SECRET}"
        return Caller(site, {"Cookie": cookies, **({"X-CSRFToken": csrf} if csrf else {})})

    return make


def status_of(site: Site, token: str) -> int:
    return Caller(site, {"Authorization": f"Bearer {token}".encode()}).call("GET", "q").status


def test_calls_need_a_session_or_token(site: Site, rest: World):
    answer = Caller(site, {}).call("GET", "q")
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    for token in ("", "x", "é", "a" * 5000, "a:b:c", ".e30:1:2"):
        assert status_of(site, token) == 401, token
    assert site.log().count("Traceback") == 0


def test_a_token_ends_with_its_time_its_password_and_its_user(site: Site, rest: World):
    user = site.user("wanda", idents=["worker"])
    token = token_for(user, 3600)
    assert status_of(site, token) == 200
    assert status_of(site, token_for(user, timedelta(seconds=-1))) == 401
    assert status_of(site, token[:-1] + ("A" if token[-1] != "A" else "B")) == 401
    for change in ({"is_active": False}, {"is_active": True, "password": "another"}):
        User.objects.filter(pk=user.pk).update(**change)
        assert status_of(site, token) == 401


def test_changes_by_session_need_the_csrf_header(page: Callable[..., Caller]):
    good, bare = page("wanda", "worker"), page("wanda", csrf="")
    wrong = page("wanda", csrf=_get_new_csrf_string())
    assert good.push("orders", b"kept").status == 201
    # A session does not replace an invalid token.
    assert good.call("GET", "q", headers={"Authorization": "Bearer x"}).status == 401
    for caller in (bare, wrong):
        for method, *more in (("POST",), ("GET",), ("PATCH", "pause"), ("DELETE", "1")):
            assert caller.call(method, at("orders", *more)).status == 403
        assert caller.call("GET", at("orders", "status")).json["total"] == 1
    assert good.take("orders").data == b"kept"
    # A form of another site cannot push, even with a CSRF token.
    form = f"csrfmiddlewaretoken={SECRET}".encode()
    assert bare.push("orders", form, "application/x-www-form-urlencoded").status == 403
    assert good.push("orders", form, "application/x-www-form-urlencoded").status == 201
    assert good.call("POST", at("orders"), b"x", {"Origin": "https://evil.example"}).status == 403


def test_a_user_acts_only_as_its_own_nodes(site: Site, caller: Callable[..., Caller]):
    wanda = caller("wanda", "worker")
    several, pattern = caller("sara", "worker", "other"), caller("petra", "work*")
    both = caller("bob", "worker", "anything*")
    for each, ident, status in (
        (wanda, "other", 403), (wanda, "worker*", 403), (wanda, "worker", 201),
        (wanda, "work\0er", 400), (several, "other", 201), (pattern, "worker", 201),
        (pattern, "worker*", 403), (pattern, "other", 403),
    ):  # fmt: skip
        assert each.push("orders", ident=ident).status == status, ident
    assert wanda.take("orders", ident="other").status == 403
    answer = several.push("orders")
    assert (answer.status, "other, worker" in answer.detail) == (400, True)
    assert "work*" in pattern.push("orders").detail
    assert pattern.push("orders", ident="worker*").json["err"] is None
    assert both.push("orders").status == 201
    # A user without nodes is refused until a group has one.
    mara = caller("mara", groups=["workers"])
    for answer in (mara.call("GET", "q"), mara.push("orders"), mara.take("orders", to=5)):
        assert answer.status == 403
    WebIdentity.objects.create(group=site.user("mara").groups.get(), ident="worker")
    assert mara.push("orders").status == 201


def test_a_user_who_lost_access_stops_waiting(
    site: Site, worker: Caller, caller: Callable[..., Caller], page: Callable[..., Caller]
):
    sara, petra, paul = caller("sara", "worker"), caller("petra", "worker"), page("paul", "worker")
    session = paul.headers["Cookie"].split(";")[0].partition("=")[2]
    users = User.objects.filter
    ends: tuple[tuple[Caller, int, Callable[[], object]], ...] = (
        (worker, 401, lambda: users(username="wanda").update(is_active=False)),
        (sara, 401, lambda: users(username="sara").update(password="new")),
        (petra, 403, WebIdentity.objects.filter(user__username="petra").delete),
        (paul, 401, lambda: site.logout(session)),
    )
    waiting = [waits(each, "orders", f"r{n}") for n, (each, _, _) in enumerate(ends)]
    for (_, status, change), wait in zip(ends, waiting, strict=True):
        change()
        assert wait.result(30).status == status


def test_nothing_gets_into_other_headers(worker: Caller):
    def push(**headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return worker.call("POST", at("orders"), b"x", given).status

    # http.client refuses line ends itself: the attack has to come as an obsolete folded line.
    assert push(x_ks_hdr_a="b\r\n Set-Cookie: c=d") in (201, 400)
    assert "set-cookie" not in worker.take("orders").headers
    assert push(x_ks_headers='{"e": "f\\r\\nSet-Cookie: g=h", "i\\r\\nj": "k"}') == 201
    taken = worker.take("orders")
    assert not {"set-cookie", "x-ks-hdr-e", "j"} & set(taken.headers)
    assert taken.headers["x-ks-headers"].startswith("{")
    for text in ("[]", "5", "{", "", '{"a": "\\u0000"}', '{"a": NaN}'):
        assert push(x_ks_headers=text) == 400, text


def test_bodies_and_crowds_have_limits(
    worker: Caller, caller: Callable[..., Caller], new_site: Callable[..., Site]
):
    limits = {"MAX_WAITERS": 3, "MAX_WAITERS_PER_USER": 2}
    small = new_site(
        PSQLMESSAGES={"NODE": "example", "MAX_BODY_BYTES": 8192},
        PATCHED={f"psqlmessages.rest.namespaces.{name}": most for name, most in limits.items()},
    )
    wanda, otto = Caller(small, worker.headers), Caller(small, caller("otto", "other").headers)
    answer = wanda.push("orders", b"x" * 8193, "text/plain")
    assert (answer.status, answer.json["err"]) == (413, 51)
    # Chunks: no header contains the size.
    assert wanda.call("POST", at("orders"), iter([b"x" * 8000] * 2)).status == 413
    assert wanda.push("orders", b"x" * 8192, "text/plain").status == 201
    assert wanda.take("orders").status == 200
    waiting = []
    for each, number, words in (
        (wanda, 2, "of this user"),
        (otto, 1, "requests are already waiting"),
    ):
        waiting += [waits(each, "orders", f"{words[:2]}{n}") for n in range(number)]
        answer = each.take("orders", to=60)
        assert (answer.status, words in answer.detail) == (429, True)
    for _ in waiting:
        wanda.push("orders")
    assert [each.result(30).status for each in waiting] == [200] * 3


def test_a_header_that_is_too_large_is_refused_with_a_reason(worker: Caller):
    # One long line, also a very long one; many lines; a long address.
    for size, lines in ((17_000, 1), (5_000_000, 1), (1_000, 17)):
        headers = {f"x-ks-hdr-{n}": "x" * size for n in range(lines)}
        answer = worker.call("POST", at("orders"), b"x", headers)
        assert (answer.status, answer.json["err"]) == (431, None), size
        assert answer.detail == "the header of the request exceeds 16 KiB"
    assert worker.push("orders", key="k" * 17_000).status == 431
    assert worker.call("POST", at("orders"), b"x", {"x-ks-hdr-n": "x" * 15_000}).status == 201


def test_the_command_prints_a_token(site: Site, rest: World, capsys):
    site.user("wanda", idents=["worker"])
    # WebSocket tokens are not valid for the API, and the reverse.
    for option, status in (("--days=1", 200), ("--websocket", 401)):
        call_command("psqlmessages", "token", "wanda", option)
        token = capsys.readouterr().out.strip()
        assert status_of(site, token) == status
        assert (relay_tokens.read_token(token) is not None) is (option == "--websocket")
    with pytest.raises(SystemExit, match="1"):
        call_command("psqlmessages", "token", "nobody")
    assert capsys.readouterr().err == "psqlmessages: there is no user 'nobody'\n"
    with pytest.raises(CommandError, match="0"):
        call_command("psqlmessages", "token", "wanda", "--days", "0")
