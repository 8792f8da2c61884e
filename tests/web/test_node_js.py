"""node.js in a real browser: what it promises, against the real relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from psqlmessages.models import WebIdentity
from tests.sql.conftest import World
from tests.web.browser import Visitors, until
from tests.web.site import Site

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

# What happens in the page is noted in `heard`, and asked for here.
BEGIN = """async ([ident, options]) => {
    const { connect } = await import("/static/psqlmessages/node.js");
    window.heard = [];
    const note = (what) => (value, more) => heard.push([what, value, more]);
    window.node = await connect(ident, {
        onstate: note("state"), onevent: note("event"), onmessage: note("other"), ...options,
    });
}"""

Begin = Callable[..., "Page"]


@pytest.fixture
def begin(visitors: Visitors, site: Site, relay: World) -> Begin:
    """Open a page whose `node` is connected."""

    def open_one(username: str, ident: str, *, waits_longer: bool = False, **options: Any) -> Page:
        site.user(username, idents=["web.*"])
        page = visitors(username)
        if waits_longer:
            page.route("**/psqlmessages/node.js", wait_longer)
        page.goto("/")
        page.evaluate(BEGIN, [ident, options])
        return page

    return open_one


def wait_longer(route: Route) -> None:
    """Serve node.js as it is, but that a request waits for the relay for a minute, not for 5 s."""
    answer = route.fetch()
    text = answer.text()
    assert ", 5000];" in text
    route.fulfill(response=answer, body=text.replace(", 5000];", ", 60_000];"))


def heard(page: Page, what: str) -> Any:
    """Wait until the page has heard something, and take it."""
    until(page, f"heard.some(([kind]) => kind === '{what}')")
    return page.evaluate(
        "(what) => heard.splice(heard.findIndex(([kind]) => kind === what), 1)[0].slice(1)", what
    )


def failure(page: Page, script: str) -> Any:
    """The number and text of the error that a script throws."""
    return page.evaluate(
        f"async () => {{ try {{ {script} }}"
        " catch (error) { return [error.number, error.message]; } }"
    )


def test_two_pages_talk_in_every_kind_of_body(begin: Begin) -> None:
    alice, bob = begin("alice", "web.alice"), begin("bob", "web.bob")
    bob.evaluate(
        "node.listen('ROOM', (message) => heard.push(['got', message.from, message.body]))"
    )
    alice.evaluate("node.notify('ROOM')")
    for sent, arrived in (
        ("'text'", "text"),
        ("{ a: [1, null, '<b>'] }", {"a": [1, None, "<b>"]}),
        ("7", 7),
        ("null", None),
        ("'ü'.repeat(20000)", "ü" * 20_000),
    ):
        alice.evaluate(f"node.send('ROOM', {sent})")
        assert heard(bob, "got") == ["web.alice", arrived]
    alice.evaluate("node.send('ROOM', new Uint8Array([0, 255, 10]))")
    until(bob, "heard.some(([kind]) => kind === 'got')")
    assert bob.evaluate("heard.find(([kind]) => kind === 'got')[2] instanceof Uint8Array")


def test_a_message_that_overtakes_the_answer_to_listen_is_heard(begin: Begin, relay: World) -> None:
    page, other = begin("alice", "web.alice"), relay.node("user2", "OTHER")
    # The answer is held back until the message has come.
    page.evaluate("""() => {
        const [came, answers] = [node._socket.onmessage, []];
        node._socket.onmessage = (frame) => {
            const { ref, Type } = JSON.parse(frame.data);
            if (ref) return answers.push(frame);
            came(frame);
            if (Type === "Topic") answers.splice(0).forEach(came);
        };
        node.listen("ROOM", ({ body }) => heard.push(["got", body]));
    }""")
    relay.wait_for("SELECT EXISTS (SELECT FROM messages.topics WHERE listeners = '{web.alice}')")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "early")
    assert heard(page, "got") == ["early"]


def test_a_refused_listen_leaves_no_handler(begin: Begin) -> None:
    page = begin("alice", "web.alice")
    assert failure(page, "await node.listen('NOTHING', () => {})")[0] == 9
    assert page.evaluate("node._topics.topic_listen.size") == 0


def test_status_unlisten_and_unnotify(begin: Begin) -> None:
    page = begin("alice", "web.alice")
    page.evaluate("node.listen('ROOM', () => {}).then(() => node.notify('ROOM'))")
    status = "node.status('ROOM').then((s) => [s.Notifiers, s.Listeners])"
    assert page.evaluate(status) == [["web.alice"], ["web.alice"]]
    page.evaluate("node.unlisten('ROOM').then(() => node.unnotify('ROOM'))")
    assert page.evaluate(status) == [[], []]


def test_a_page_asks_another(begin: Begin) -> None:
    alice, bob = begin("alice", "web.alice"), begin("bob", "web.bob")
    bob.evaluate("node.onCall(async (message) => ({ asked: message.body, by: message.from }))")
    answer = alice.evaluate("node.call('web.bob', { n: 1 }, { timeout: 60000 })")
    assert answer == {"asked": {"n": 1}, "by": "web.alice"}


def test_a_failed_call_throws_its_number(begin: Begin, visitors: Visitors) -> None:
    visitors.expect("secret")
    alice, bob = begin("alice", "web.alice"), begin("bob", "web.bob")
    bob.evaluate("node.onCall(() => { throw new TypeError('a secret of the page') })")
    failing = "await node.call('web.bob', 1, { timeout: 60000 })"
    assert failure(alice, failing) == [56, "TypeError"]
    bob.evaluate("node.onCall(() => new Promise(() => {}))")
    late = "await node.call('web.bob', 1, { timeout: 50 })"
    assert failure(alice, late) == [None, "web.bob did not answer in time"]
    assert failure(alice, "await node.call('OTHER', 1)")[0] == 17


def test_a_call_ends_when_the_node_asked_has_gone(begin: Begin) -> None:
    alice, bob = begin("alice", "web.alice"), begin("bob", "web.bob")
    bob.evaluate("node.onCall(() => node.close())")
    gone = [None, "web.bob has gone"]
    assert failure(alice, "await node.call('web.bob', 1, { timeout: 60000 })") == gone


def test_a_refusal_is_an_error_with_its_number(begin: Begin) -> None:
    page = begin("alice", "web.alice")
    assert failure(page, "await node.listen('NOTHING')") == [9, "Topic NOTHING is not existent"]
    assert failure(page, "await node.send('ROOM', 1)")[0] == 21


def test_a_name_that_is_not_the_users_is_denied(begin: Begin, site: Site) -> None:
    page = begin("alice", "web.alice")
    script = "const { connect } = await import('/static/psqlmessages/node.js'); await connect('X')"
    assert failure(page, script) == [5, "there are no permissions for ident X"]


def test_a_second_page_of_the_same_name_is_told(begin: Begin) -> None:
    begin("alice", "web.alice")
    page = begin("alice", "web.alice.2")
    script = "const { connect } = await import('/static/psqlmessages/node.js');"
    assert failure(page, f"{script} await connect('web.alice')")[0] == 8


def test_who_is_not_logged_in_is_denied(visitors: Visitors) -> None:
    page = visitors()
    page.goto("/")
    script = "const { connect } = await import('/static/psqlmessages/node.js'); await connect('X')"
    assert failure(page, script) == [None, "log in first"]


def test_a_lost_connection_returns_with_all_that_was_registered(
    begin: Begin, site: Site, relay: World, visitors: Visitors
) -> None:
    visitors.expect("WebSocket connection")
    page = begin("alice", "web.alice", waits_longer=True)
    assert [heard(page, "state") for _ in range(2)] == [["connecting", ""], ["open", ""]]
    page.evaluate("node.listen('ROOM', (message) => heard.push(['got', message.body]))")
    page.evaluate("node.notify('ROOM')")
    site.stop()
    until(page, "node.state === 'connecting'")
    site.start()
    # It waits until the node is registered again.
    page.evaluate("node.send('ROOM', 'again')")
    assert heard(page, "got") == ["again"]


def test_what_is_asked_while_the_server_is_away_fails_after_a_while(
    begin: Begin, site: Site, visitors: Visitors
) -> None:
    visitors.expect("WebSocket connection")
    page = begin("alice", "web.alice")
    site.stop()
    until(page, "node.state === 'connecting'")
    away = [59, "there is no connection to the relay"]
    assert failure(page, "await node.status('ROOM')") == away
    site.start()
    until(page, "node.state === 'open'")


def test_a_name_that_is_revoked_is_denied_and_tried_no_more(begin: Begin) -> None:
    page = begin("alice", "web.alice")
    WebIdentity.objects.all().delete()
    until(page, "node.state === 'denied'")
    assert failure(page, "await node.status('ROOM')") == [None, "the node is denied"]


def test_a_right_that_is_revoked_is_told(begin: Begin, relay: World) -> None:
    page = begin("alice", "web.alice")
    page.evaluate("node.listen('ROOM', () => {})")
    relay.owner.connection.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    until(page, "heard.some(([k, e]) => k === 'event' && e.Evt === 'topic_unlisten')")
    assert page.evaluate("node.state") == "open"


def test_who_logs_out_is_denied(begin: Begin, site: Site, visitors: Visitors) -> None:
    page = begin("alice", "web.alice")
    site.user("alice").delete()
    until(page, "node.state === 'denied'")
    states = page.evaluate("heard.filter(([kind]) => kind === 'state')")
    assert states[-1] == ["state", "denied", "the user is not active any more"]


def test_a_closed_node_is_gone_at_once(begin: Begin, relay: World) -> None:
    page = begin("alice", "web.alice")
    other = relay.node("user2", "OTHER")
    page.evaluate("node.close()")
    assert other.events(1) == ["disconnect web.alice"]
    assert failure(page, "await node.status('ROOM')") == [None, "the node is closed"]


def test_a_page_that_is_left_disconnects(begin: Begin, relay: World) -> None:
    page = begin("alice", "web.alice")
    other = relay.node("user2", "OTHER")
    page.close()
    assert other.events(1) == ["disconnect web.alice"]
