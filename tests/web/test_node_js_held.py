"""node.js beside what PostgreSQL aborts: it tries on by itself, and others do not wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.sql.conftest import World
from tests.web.browser import Visitors, until
from tests.web.site import Site
from tests.web.test_node_js import Begin, begin, heard

__all__ = ["begin"]

# Every frame that comes is noted, too.
NOTE_FRAMES = """() => {
    window.heard = [];
    window.WebSocket = class extends WebSocket {
        constructor(...given) {
            super(...given);
            this.addEventListener("message", ({ data }) => heard.push(["frame", data]));
        }
    };
}"""
CONNECT = """(ident) => {
    import("/static/psqlmessages/node.js").then(async ({ connect }) => {
        window.node = await connect(ident);
        heard.push(["connected"]);
    });
}"""
LISTEN = """() => {
    const came = ({ data }) => heard.push(["frame", data]);
    node._socket.addEventListener("message", came);
    const joined = node.listen("ROOM", ({ body }) => heard.push(["got", body]));
    joined.then(() => heard.push(["joined"]));
}"""
ABORTED = """heard.some(([kind, data]) => kind === "frame" && data.includes('"Err":"56"'))"""


@contextmanager
def refused(world: World, table: str, condition: str) -> Iterator[None]:
    """Within, rows of a table are refused as what somebody holds for too long is."""
    owner = world.owner.connection
    owner.execute(
        "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE lock_not_available; END $$;"
        f"CREATE TRIGGER hold BEFORE INSERT ON {table}"
        f" FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION hold()"
    )
    try:
        yield
    finally:
        owner.execute("DROP FUNCTION hold() CASCADE")


def kill(world: World, ident: str) -> None:
    """End the backend on which a node is registered."""
    pid = world.watcher.query(
        "SELECT s.pid FROM psqlmessages_session AS s JOIN psqlmessages_client AS c"
        " ON c.session_id = s.id WHERE c.ident = %s",
        ident,
    )
    assert world.watcher.query("SELECT pg_terminate_backend(%s, 60000)", pid)


def test_a_page_whose_registration_is_aborted_tries_on(
    visitors: Visitors, site: Site, relay: World
) -> None:
    site.user("alice", idents=["web.*"])
    page = visitors("alice")
    page.goto("/")
    page.evaluate(NOTE_FRAMES)
    with refused(relay, "psqlmessages_client", "NEW.ident = 'web.alice'"):
        page.evaluate(CONNECT, "web.alice")
        until(page, ABORTED)
    heard(page, "connected")


def test_a_page_joins_a_topic_that_was_held_and_others_do_not_wait(
    begin: Begin, relay: World
) -> None:
    alice, bob = begin("alice", "web.alice"), begin("bob", "web.bob")
    other = relay.node("user2", "OTHER")
    with other.connection.transaction():
        other.ok("topic_listen", "ROOM")
        alice.evaluate(LISTEN)
        until(alice, ABORTED)
        bob.evaluate("node.listen('WEB.1', ({ body }) => heard.push(['got', body]))")
        bob.evaluate("node.notify('WEB.1').then(() => node.send('WEB.1', 'meanwhile'))")
        assert heard(bob, "got") == ["meanwhile"]
    heard(alice, "joined")
    other.ok("topic_notify", "ROOM")
    other.ok("topic_send", "ROOM", "after")
    assert heard(alice, "got") == ["after"]


def test_who_unlistens_while_it_tries_on_does_not_listen_after_all(
    begin: Begin, relay: World
) -> None:
    page, other = begin("alice", "web.alice"), relay.node("user2", "OTHER")
    with other.connection.transaction():
        other.ok("topic_listen", "ROOM")
        page.evaluate(LISTEN.replace("joined.then(", "joined.catch("))
        until(page, ABORTED)
        page.evaluate("() => { node.unlisten('ROOM').then(() => heard.push(['left'])); }")
        # That the listening was given up.
        heard(page, "joined")
    heard(page, "left")
    assert page.evaluate("node.status('ROOM').then((s) => s.Listeners)") == ["OTHER"]


@pytest.mark.parametrize(
    ("table", "condition"),
    [
        ("psqlmessages_client", "NEW.ident LIKE 'web.%%'"),
        ("psqlmessages_membership", "NEW.role <> 'user2'"),
    ],
    ids=["node", "topic"],
)
def test_what_could_not_return_with_the_relay_returns_later(
    begin: Begin, relay: World, table: str, condition: str
) -> None:
    page, other = begin("alice", "web.alice"), relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    page.evaluate("node.notify('ROOM')")
    page.evaluate("node.listen('ROOM', ({ body }) => heard.push(['got', body]))")
    page.evaluate("node._socket.addEventListener('message', (e) => heard.push(['frame', e.data]))")
    with refused(relay, table, condition.replace("%%", "%")):
        kill(relay, "web.alice")
        until(page, ABORTED)
    relay.wait_for("SELECT count(*) = 2 FROM psqlmessages_membership WHERE role <> 'user2'")
    other.ok("topic_send", "ROOM", "again")
    assert heard(page, "got") == ["again"]
    until(page, "node.state === 'open'")
    page.evaluate("node.send('ROOM', 'mine')")
    assert heard(page, "got") == ["mine"]


def test_a_handler_of_events_that_throws_as_a_topic_returns_does_not_end_it(
    begin: Begin, relay: World
) -> None:
    page, other = begin("alice", "web.alice"), relay.node("user2", "OTHER")
    other.ok("topic_notify", "ROOM")
    page.evaluate("node.listen('ROOM', ({ body }) => heard.push(['got', body]))")
    page.evaluate("""() => {
        node._socket.addEventListener('message', (e) => heard.push(['frame', e.data]));
        addEventListener('unhandledrejection', (event) => event.preventDefault());
        node._options.onevent = ({ Evt }) => {
            if (Evt !== 'topic_listen') return;
            heard.push(['thrown']);
            throw new Error('of the page');
        };
    }""")
    with refused(relay, "psqlmessages_membership", "NEW.role <> 'user2'"):
        kill(relay, "web.alice")
        until(page, ABORTED)
    heard(page, "thrown")
    other.ok("topic_send", "ROOM", "again")
    assert heard(page, "got") == ["again"]
