"""node.js in a real browser: what it promises, against the real relay."""

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from project.postgres import Server
from psqlmessages import Node
from psqlmessages.models import WebIdentity
from tests.sql.conftest import World
from tests.web.browser import Visitors, until
from tests.web.receivers import kill, refused
from tests.web.site import ROOT, Site

# The page records events, results and frames in `heard`.
BEGIN = """async ([ident, options]) => {
    window.heard = [];
    window.WebSocket = class extends WebSocket {
        constructor(...given) {
            super(...given);
            this.addEventListener("message", ({ data }) => heard.push(["frame", data]));
        }
    };
    const { connect } = await import(`${options.prefix ?? ""}/static/psqlmessages/node.js`);
    const note = (what) => (value, more) => heard.push([what, value, more]);
    const connected = connect(ident, {
        onstate: note("state"), onevent: note("event"), onmessage: note("other"), ...options,
    }).then((node) => { window.node = node; heard.push(["connected"]); });
    if (!options.later) await connected;
}"""
LISTEN = """() => {
    const joined = node.listen("ROOM", ({ from, body }) => heard.push(["got", from, body]));
    joined.then(() => heard.push(["joined"]), () => heard.push(["given up"]));
}"""
ABORTED = """heard.some(([kind, data]) => kind === "frame" && data.includes('"Err":"56"'))"""
CONNECT = (
    "const { connect } = await import('/static/psqlmessages/node.js'); await connect('{ident}')"
)

Begin = Callable[..., Page]


@pytest.fixture
def begin(visitors: Visitors, site: Site, relay: World) -> Begin:
    def open_one(username: str, *, patience: int = 5000, **options: Any) -> Page:
        site.user(username, idents=["web.*"])
        page = visitors(username)
        page.route("**/psqlmessages/node.js", partial(serve, patience))
        page.goto("/")
        page.evaluate(BEGIN, [f"web.{username}", options])
        return page

    return open_one


def serve(patience: int, route: Route) -> None:
    """Serve node.js; its requests wait so many milliseconds for the relay."""
    answer = route.fetch(url=route.request.url.replace("/sub/", "/"))
    text = answer.text()
    assert ", 5000];" in text
    route.fulfill(response=answer, body=text.replace(", 5000];", f", {patience}];"))


def heard(page: Page, what: str) -> Any:
    until(page, f"heard.some(([kind]) => kind === '{what}')")
    return page.evaluate(
        "(what) => heard.splice(heard.findIndex(([kind]) => kind === what), 1)[0].slice(1)", what
    )


def failure(page: Page, script: str) -> Any:
    """Return the number and text of the error that a script throws."""
    return page.evaluate(
        f"async () => {{ try {{ {script} }}"
        " catch (error) { return [error.number, error.message]; } }"
    )


def test_two_pages_talk_in_every_kind_of_body(begin: Begin, relay: World, site: Site):
    alice, bob = begin("alice"), begin("bob")
    bob.evaluate(LISTEN)
    heard(bob, "joined")
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
    status = "node.status('ROOM').then((s) => [s.Notifiers, s.Listeners])"
    assert bob.evaluate(status) == [["web.alice"], ["web.bob"]]
    alice.evaluate("node.unnotify('ROOM')")
    bob.evaluate("node.unlisten('ROOM')")
    assert bob.evaluate(status) == [[], []]
    # After a revoked right the node stays connected.
    bob.evaluate(LISTEN)
    heard(bob, "joined")
    relay.execute("DELETE FROM messages.auth WHERE dest = 'ROOM'")
    until(bob, "heard.some(([k, e]) => k === 'event' && e.Evt === 'topic_unlisten')")
    assert bob.evaluate("node.state") == "open"
    # A page below a prefix, as behind a proxy.
    alice.evaluate("history.replaceState(null, '', '/sub/page/')")
    addresses = ({"url": "../ws/node/"}, {"url": f"{site.url}/sub/ws/node/"}, {"prefix": "/sub"})
    for number, options in enumerate(addresses):
        alice.evaluate(BEGIN, [f"web.alice.{number}", options])
        assert alice.evaluate("node._socket.url") == f"{site.ws_url}/sub/ws/node/"


def test_a_message_that_overtakes_the_answer_to_listen_is_heard(begin: Begin, relay: World):
    page, other = begin("alice"), relay.node("user2", "OTHER")
    # Delay the answer until the message has arrived.
    page.evaluate("""() => {
        const [came, answers] = [node._socket.onmessage, []];
        node._socket.onmessage = (frame) => {
            const { ref, Type } = JSON.parse(frame.data);
            if (ref) return answers.push(frame);
            came(frame);
            if (Type === "Topic") answers.splice(0).forEach(came);
        };
    }""")
    page.evaluate(LISTEN)
    relay.wait_for("SELECT EXISTS (SELECT FROM messages.topics WHERE listeners = '{web.alice}')")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "early")
    assert heard(page, "got") == ["OTHER", "early"]


def test_pages_call_each_other_with_numbered_errors(begin: Begin, visitors: Visitors, relay: World):
    visitors.expect("secret")
    alice, bob = begin("alice"), begin("bob")
    bob.evaluate("node.onCall(async (message) => ({ asked: message.body, by: message.from }))")
    answer = alice.evaluate("node.call('web.bob', { n: 1 }, { timeout: 60000 })")
    assert answer == {"asked": {"n": 1}, "by": "web.alice"}
    call = "await node.call('web.bob', 1, { timeout: 60000 })"
    bob.evaluate("node.onCall(() => { throw new TypeError('a secret of the page') })")
    assert failure(alice, call) == [56, "TypeError"]
    bob.evaluate("node.onCall(() => new Promise(() => {}))")
    assert failure(alice, call.replace("60000", "50")) == [None, "web.bob did not answer in time"]
    bob.evaluate("node.onCall(() => node.close())")
    assert failure(alice, call) == [None, "web.bob disconnected or crashed"]
    assert failure(bob, "await node.status('ROOM')") == [None, "the node is closed"]
    assert failure(alice, "await node.listen('NOTHING', () => {})")[0] == 9
    assert failure(alice, CONNECT.replace("{ident}", "web.alice"))[0] == 8
    assert alice.evaluate("node._topics.topic_listen.size") == 0
    other = relay.node("user2", "OTHER")
    alice.close()
    assert other.events(1) == ["disconnect web.alice"]


def test_a_node_is_denied_without_login_or_name(begin: Begin, visitors: Visitors):
    page = visitors()
    page.goto("/")
    assert failure(page, CONNECT.replace("{ident}", "X")) == [None, "log in first"]
    alice, bob = begin("alice"), begin("bob")
    WebIdentity.objects.filter(user__username="alice").delete()
    until(alice, "node.state === 'denied'")
    assert failure(alice, "await node.status('ROOM')") == [None, "the node is denied"]
    WebIdentity.objects.get().user.delete()
    until(bob, "node.state === 'denied'")
    states = bob.evaluate("heard.filter(([kind]) => kind === 'state')")
    assert states[-1] == ["state", "denied", "the user is no longer active"]


def test_a_node_returns_with_its_topics(begin: Begin, site: Site, visitors: Visitors, relay: World):
    visitors.expect("WebSocket connection")
    other = relay.node("user2", "OTHER")
    page, bob = begin("alice", patience=60_000), begin("bob", patience=200)
    assert [heard(page, "state") for _ in range(2)] == [["connecting", ""], ["open", ""]]
    page.evaluate(LISTEN)
    heard(page, "joined")
    page.evaluate("node.notify('ROOM')")
    site.stop()
    assert {"disconnect web.alice", "disconnect web.bob"} <= set(other.events())
    for each in (page, bob):
        until(each, "node.state === 'connecting'")
    assert failure(bob, "await node.status('ROOM')") == [59, "there is no connection to the relay"]
    site.start()
    page.evaluate("node.send('ROOM', 'again')")
    assert heard(page, "got") == ["web.alice", "again"]


def test_a_page_tries_on_while_a_name_or_topic_is_held(begin: Begin, relay: World):
    bob, other = begin("bob"), relay.node("user2", "OTHER")
    with refused(relay, "psqlmessages_client", "NEW.ident = 'web.alice'"):
        alice = begin("alice", later=True)
        until(alice, ABORTED)
    heard(alice, "connected")
    alice.evaluate("heard.length = 0")
    with other.connection.transaction():
        other.ok("topic_listen", "ROOM")
        for page in (alice, bob):
            page.evaluate(LISTEN)
            until(page, ABORTED)
        # `unlisten` ends a `listen` that waits.
        bob.evaluate("() => { node.unlisten('ROOM').then(() => heard.push(['left'])); }")
        heard(bob, "given up")
        bob.evaluate("node.listen('WEB.1', ({ body }) => heard.push(['got', body]))")
        bob.evaluate("node.notify('WEB.1').then(() => node.send('WEB.1', 'meanwhile'))")
        assert heard(bob, "got") == ["meanwhile"]
    heard(alice, "joined")
    heard(bob, "left")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "after")
    assert heard(alice, "got") == ["OTHER", "after"]
    listeners = alice.evaluate("node.status('ROOM').then((s) => s.Listeners)")
    assert sorted(listeners) == ["OTHER", "web.alice"]


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ("psqlmessages_client", "NEW.ident LIKE 'web.%'"),
        ("psqlmessages_membership", "NEW.role <> 'user2'"),
    ],
    ids=["node", "topic"],
)
def test_failed_registrations_are_repeated(begin: Begin, relay: World, table: str, condition: str):
    page, other = begin("alice"), relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    page.evaluate(LISTEN)
    heard(page, "joined")
    page.evaluate("node.notify('ROOM')")
    # An error in an event handler does not end the node.
    page.evaluate("""() => {
        addEventListener('unhandledrejection', (event) => event.preventDefault());
        node._options.onevent = ({ Evt }) => {
            if (Evt === 'topic_listen') throw new Error('of the page');
        };
    }""")
    with refused(relay, table, condition):
        kill(relay, Server.owner)
        until(page, ABORTED)
    relay.wait_for("SELECT count(*) = 2 FROM psqlmessages_membership WHERE role <> 'user2'")
    other.ok("topic_send", "ROOM", "again")
    assert heard(page, "got") == ["OTHER", "again"]
    until(page, "node.state === 'open'")
    page.evaluate("node.send('ROOM', 'mine')")
    assert heard(page, "got") == ["web.alice", "mine"]


def block(page: str, language: str) -> str:
    text = (ROOT / f"docs/reference/{page}.md").read_text()
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found


def example(page: str, language: str = "js") -> str:
    """Return the JavaScript of a page of the docs as a function."""
    text = block(page, language)
    for folder, named in (("psqlmessages/", '"../psqlmessages/'), ("psqlmessages/monitor/", '"./')):
        imported = rf'import (\{{.*\}}) from {re.escape(named)}(.*)";'
        text = re.sub(imported, rf'const \1 = await import("/static/{folder}\2");', text)
    return f"async () => {{ {text} }}"


def test_the_examples_of_the_pages_run_as_they_stand(visitors: Visitors, site: Site, relay: World):
    for ident, kind, dest, mode in (
        ("chat/*", "Topic", "ROOM", "RW"), ("chat/*", "Rpc", "worker", "W"),
        ("worker", "Topic", "OTHER", "R"), ("web/*", "Topic", "PRICES", "R"),
        ("shop", "Topic", "PRICES", "W"),
    ):  # fmt: skip
        relay.rules(f"{Server.owner} {ident} {kind} {dest} {mode} 60")
    site.user("alice", idents=["chat/alice/*", "web/alice/*"], is_staff=True)
    site.user("alice", permissions=["psqlmessages.view_monitor"])
    rule = block("monitor", "sql").replace("'shop'", f"'{Server.owner}'")
    relay.execute(rule.replace("shop.monitor", "example.monitor"))
    page = visitors("alice")
    page.goto("/")
    with Node("worker", relay.server.url()) as worker:
        worker.on_rpc(lambda message: message.body)
        threading.Thread(target=worker.run).start()
        with page.expect_console_message(lambda said: said.text.startswith("chat/alice/1 ")):
            page.evaluate(example("relay"))
        worker.stop()
    with page.expect_console_message(lambda said: "JSHandle" in said.text or "op" in said.text):
        page.evaluate(example("monitor"))
    shown = block("relay", "html").replace("{{ request.user.get_username }}", "alice")
    page.evaluate("shown => document.body.innerHTML = shown", shown)
    page.evaluate(example("relay", "javascript"))
    price = '{"article": "apple", "price": "0.30"}'
    relay.owner.ok("topic_send_as", "shop", "PRICES", price, None, "json")
    expect(page.locator("#prices")).to_have_text("apple: 0.30")
