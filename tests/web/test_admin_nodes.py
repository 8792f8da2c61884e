"""Connected nodes, topics and subscriptions in the admin: who does what now, and disconnecting."""

from types import SimpleNamespace

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test.utils import override_script_prefix, override_settings

from project.postgres import Server
from psqlmessages.admin import base
from psqlmessages.models import Auth, Client, Subscription, Topic
from tests.exchanges.conftest import namespace
from tests.sql.conftest import Program
from tests.web.pages import (
    CLIENTS,
    RULES,
    SUBSCRIPTIONS,
    SURE,
    TOO_LONG,
    TOPICS,
    Admin,
    Page,
    page_of,
)

OPEN = f"{CLIENTS}open-transactions/"


@pytest.fixture
def gateway(admin: Admin) -> Program:
    """ONE and TWO on one session: ONE listens to PRICES, sends to NEWS, observes PRI*."""
    admin.world.rules("user1 ONE Topic PRICES RW 10", "user1 ONE Topic NEWS W 10")
    admin.world.rules("user1 ONE Topic PRI* O 10", "user1 TWO Topic PRICES R 10")
    acts = {"listen": "PRICES", "notify": "NEWS", "observe": "PRI*"}
    gateway = admin.world.node("user1", "TWO", "ONE", **acts)
    gateway.ok("use", "TWO")
    gateway.ok("topic_listen", "PRICES")
    gateway.payloads()
    return gateway


def ask_to_disconnect(admin: Admin, ident: str) -> Page:
    return admin.act(CLIENTS, "disconnect", Client.objects.get(ident=ident).pk)


def topic_page(name: str) -> str:
    return page_of(Topic.objects.get(name=name))


def test_the_list_shows_topics_of_each_node_and_lost_connections(admin: Admin, gateway: Program):
    pid, text = gateway.pid, admin.open(CLIENTS).text
    assert f"pid {pid} PRICES NEWS PRI*" in text
    assert f"pid {pid} PRICES - -" in text
    assert "NEWS 0 1 0 0" in admin.open(TOPICS).text
    assert "PRICES 2 0" in admin.open(TOPICS).text
    admin.world.rules("user2 WATCH Topic PRICES R 10")
    watch = admin.world.node("user2", "WATCH")
    watch.payloads()
    with admin.world.owner.connection.transaction():
        # Housekeeping by another session, such as a site's hub, skips locked nodes.
        admin.world.execute("SELECT FROM psqlmessages_client FOR UPDATE")
        admin.world.kill(gateway)
        assert f"closed (was pid {pid})" in admin.open(CLIENTS).text
        assert "2 connected nodes" in admin.open(f"{CLIENTS}?connection=closed").text
        assert "1 connected node" in admin.open(f"{CLIENTS}?connection=open").text
        assert "PRICES 0 0" in admin.open(TOPICS).text
        page = ask_to_disconnect(admin, "ONE")
    page = admin.send(page, "Disconnect")
    assert page.messages == ["Already disconnected: ONE."]
    assert "crash ONE" in watch.events()


def test_only_the_disconnected_node_ends_and_hears_of_it(admin: Admin, gateway: Program):
    operator = admin.staff("view_client", "delete_client")
    page = operator.open(page_of(Client.objects.get(ident="ONE")))
    page = operator.send(page, "Disconnect…")
    assert f"ONE (user1 with pid {gateway.pid})" in page.text
    assert Client.objects.count() == 2, "it asks first"
    assert operator.send(page, "Disconnect").messages == ["Disconnected: ONE."]
    assert Client.objects.get().ident == "TWO"
    assert "disconnect ONE" in gateway.events()
    assert gateway.ok("topic_listen", "PRICES")["Already"] == 1, "TWO goes on"
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.user) == ("ONE", User.objects.latest("pk"))
    assert entry.change_message == f"Disconnected from user1 with pid {gateway.pid}."
    # A node that returned after the page asked stays: another connection was confirmed.
    page, former = ask_to_disconnect(admin, "TWO"), Client.objects.get(ident="TWO").pk
    gateway.ok("deinit", "TWO")
    gateway.ok("init", "TWO")
    admin.send(page, "Disconnect")
    assert not base.disconnect(former)
    assert Client.objects.filter(ident="TWO").exists()


def test_a_connection_that_blocks_a_change_of_rules_can_be_ended(admin: Admin, gateway: Program):
    gateway.connection.execute("SET application_name = 'sitter'")
    gateway.connection.execute("BEGIN")
    gateway.ok("topic_unlisten", "PRICES")
    named = f"pid {gateway.pid} (user1, sitter)"
    admin.world.wait_for("SELECT pg_sleep(1.1) IS NOT NULL")
    page = admin.send(admin.follow(admin.open_rule(ident="TWO"), "Delete"), SURE)
    assert any(named in text for text in page.messages)
    page = admin.open(OPEN)
    assert named in page.text
    assert "idle in transaction" in page.text or "not shown" in page.text

    button = f"End pid {gateway.pid}…"
    viewer = admin.staff("view_client")
    assert button not in viewer.open(OPEN).buttons
    values = {**page.form(button).values, "confirmed": "yes"}
    viewer.client.cookies["csrftoken"] = admin.client.cookies["csrftoken"].value
    assert viewer.client.post(OPEN, values).status_code == 403
    assert admin.staff("view_auth").open(OPEN).status == 403

    operator = admin.staff("view_client", "terminate_session")
    page = operator.send(operator.open(OPEN), button)
    assert f"The connection of {named} will be ended." in page.text
    # A router: the history is in another database than the rules.
    to_log = SimpleNamespace(db_for_write=lambda model, **_: "log" if model is LogEntry else None)
    with namespace("log"), override_settings(DATABASE_ROUTERS=[to_log]):
        page = operator.send(page, "End the connection")
    assert page.messages[0].startswith("Not ended: role ")
    assert "Allow it with GRANT pg_signal_backend TO " in page.messages[0]
    assert not LogEntry.objects.filter(object_id=gateway.pid).exists()
    superuser = admin.world.superuser().connection
    superuser.execute(f"GRANT pg_signal_backend TO {base.current_role()}")
    try:
        page = operator.send(operator.send(operator.open(OPEN), button), "End the connection")
    finally:
        superuser.execute(f"REVOKE pg_signal_backend FROM {base.current_role()}")
    assert page.messages == [f"Ended: {named}."]
    said = LogEntry.objects.get(object_id=gateway.pid).change_message
    assert said.startswith(f"Ended the connection of {named}")
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
    admin.world.wait_for(gone, gateway.pid)
    assert named not in admin.open(OPEN).text


def test_last_statements_need_the_permission_for_bodies(admin: Admin):
    owner = admin.world.owner
    with owner.connection.transaction(force_rollback=True):
        owner.connection.execute("UPDATE psqlmessages_element SET body = 'a secret body'")
        viewer = admin.staff("view_client", "terminate_session").open(OPEN).text
        assert f"pid {owner.pid}" in viewer
        assert "secret body" not in viewer
        assert "psqlmessages.view_bodies" in viewer
        assert "a secret body" in admin.staff("view_client", "view_bodies").open(OPEN).text


def test_the_page_of_a_topic_shows_its_nodes_and_rules_live(admin: Admin, gateway: Program):
    admin.world.rules("user2 ALL Topic * R 10", "user2 ELSE Topic PRICESX R 10")
    admin.world.rules("user2 PRICES Rpc PRICES W 10")
    page = admin.open(topic_page("PRICES"))
    assert "Listeners ONE , TWO Senders none" in page.text
    assert "user1 ONE PRI* O (observe) 10 s" in page.text
    assert "user2 ALL * R (receive) 10 s" in page.text
    assert "ELSE" not in page.text
    assert "Rpc" not in page.text
    assert page.links["open"].startswith(RULES)
    assert 'data-topic="PRICES"' in page.html
    assert "psqlmessages/monitor/topic_status.js" in page.html
    with override_script_prefix("/app/"):
        assert 'data-socket="/app/ws/monitor/"' in admin.open(topic_page("PRICES")).html
    page = admin.staff("view_topic").open(topic_page("NEWS"))
    assert "For live updates you need the permission “Can view the live monitor”." in page.text
    assert "Senders ONE" in page.text
    assert "topic_status.js" not in page.html
    assert "PRI*" not in admin.staff("view_topic").open(topic_page("PRICES")).text, "no rules"
    Auth.objects.all().delete()
    text = admin.open(topic_page("NEWS")).text
    assert "No rule matches this topic, so no node may use it." in text


@pytest.fixture
def reader(admin: Admin) -> Program:
    admin.world.rules("user1 READER Topic PRICES RW 10")
    reader = admin.world.program("user1")
    reader.got("READER", "PRICES")
    for _ in range(3):
        reader.ok("publish", "READER", "PRICES", "x")
    return reader


def test_subscriptions_are_listed_with_their_backlog_and_state(admin: Admin, reader: Program):
    assert "READER PRICES 3 " in admin.open(SUBSCRIPTIONS).text
    reader.got("READER", "PRICES")
    assert "READER PRICES 0 " in admin.open(SUBSCRIPTIONS).text
    Subscription.objects.update(is_recovered=False)
    assert "alive, has missed messages" in admin.open(SUBSCRIPTIONS).text
    Subscription.objects.update(timeout=1, pinged_at="2020-01-01T00:00:00Z")
    assert "expired" in admin.open(f"{SUBSCRIPTIONS}?state=expired").text
    assert "0 subscriptions" in admin.open(f"{SUBSCRIPTIONS}?state=alive").text


def test_editing_the_retention_of_a_topic_writes_nothing_else(admin: Admin, reader: Program):
    path = topic_page("PRICES")
    page = admin.open(path)
    # Another session changes the same row.
    reader.ok("init", "READER")
    reader.ok("topic_listen", "PRICES")
    admin.send(page, "Save", retention="3600")
    topic = Topic.objects.get(name="PRICES")
    assert (topic.retention, topic.listeners, topic.subscriptions) == (3600, 1, 1)
    assert "Retention" in LogEntry.objects.get().change_message
    page = admin.send(admin.open(path), "Save", retention="-1")
    assert "The retention is 0 seconds or more." in page.text


# Archive

KEEP, KEEP_NO_MORE = "Archive", "Stop archiving"
ARCHIVE_RULE = f"{Server.owner} pipeline.* Topic * R 10"


def test_a_topic_is_marked_for_the_archive_and_unmarked(admin: Admin, reader: Program):
    Subscription.objects.all().delete()
    path = topic_page("PRICES")
    page = admin.send(admin.open(path), KEEP)
    assert f"Add a rule: role {Server.owner}, node pipeline.*" in page.messages[0]
    assert not Subscription.objects.exists()
    admin.world.rules(ARCHIVE_RULE)
    old = admin.open(path)
    page = admin.send(old, KEEP)
    assert "stored until they are archived" in page.messages[0]
    mark = Subscription.objects.get(topic="PRICES")
    assert (mark.ident, mark.timeout) == ("pipeline.archive", 2**31 - 1)
    assert admin.send(old, KEEP).messages == ["Nothing changed."]
    page = admin.send(page, KEEP_NO_MORE)
    assert not Subscription.objects.exists()
    assert KEEP in page.buttons
    assert LogEntry.objects.count() == 2
    assert admin.client.get(path.replace("change", "archive")).status_code == 405


@pytest.mark.usefixtures("impatient")
def test_a_topic_that_a_transaction_holds_is_not_waited_for_long(admin: Admin, reader: Program):
    admin.world.rules(ARCHIVE_RULE)
    page = admin.open(topic_page("PRICES"))
    reader.connection.autocommit = False
    reader.ok("init", "READER")
    reader.ok("topic_listen", "PRICES")
    answers = [admin.send(page, "Save", retention="3600"), admin.send(page, KEEP)]
    reader.connection.rollback()
    assert [answer.messages for answer in answers] == [[TOO_LONG], [TOO_LONG]]
    topic = Topic.objects.get(name="PRICES")
    assert (topic.retention, topic.subscriptions) == (0, 1)
    assert not LogEntry.objects.exists()
