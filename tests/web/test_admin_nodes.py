"""Connected nodes and topics in the admin: who does what now, and disconnecting a node."""

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from pytest_django import DjangoAssertNumQueries

from psqlmessages.admin import calls
from psqlmessages.models import Auth, Client, Topic
from tests.sql.conftest import Program
from tests.web.desks import CLIENTS, RULES, SURE, TOPICS, Desk
from tests.web.visitor import Page


@pytest.fixture
def gateway(desk: Desk) -> Program:
    """ONE and TWO on one session: ONE listens to PRICES, sends to NEWS, observes PRI*."""
    desk.world.rules(
        "user1 ONE Topic PRICES RW 10",
        "user1 ONE Topic NEWS W 10",
        "user1 ONE Topic PRI* O 10",
        "user1 TWO Topic PRICES R 10",
    )
    gateway = desk.world.gateway("user1", "TWO", "ONE")
    gateway.ok("topic_listen", "PRICES")
    gateway.ok("topic_notify", "NEWS")
    gateway.ok("topic_observe", "PRI*")
    gateway.ok("use", "TWO")
    gateway.ok("topic_listen", "PRICES")
    gateway.payloads()
    return gateway


def ask_to_disconnect(desk: Desk, *idents: str) -> Page:
    keys = list(Client.objects.filter(ident__in=idents).values_list("pk", flat=True))
    return desk.send(desk.open(CLIENTS), "0", action="disconnect", _selected_action=keys, index="0")


# Connected nodes


def test_the_list_says_what_each_node_does(desk: Desk, gateway: Program) -> None:
    text = desk.open(CLIENTS).text
    assert f"pid {gateway.pid} PRICES NEWS PRI*" in text
    assert f"pid {gateway.pid} PRICES - -" in text


def test_a_node_whose_connection_has_ended_is_shown_as_gone(desk: Desk, gateway: Program) -> None:
    pid = gateway.pid
    desk.world.kill(gateway)
    assert f"gone (was pid {pid})" in desk.open(CLIENTS).text
    assert "2 connected nodes" in desk.open(f"{CLIENTS}?connection=gone").text
    assert "0 connected nodes" in desk.open(f"{CLIENTS}?connection=there").text


def test_disconnecting_asks_first_and_names_the_nodes(desk: Desk, gateway: Program) -> None:
    page = ask_to_disconnect(desk, "ONE")
    assert f"ONE (user1 with pid {gateway.pid})" in page.text
    assert Client.objects.count() == 2


def test_only_the_disconnected_node_ends_and_hears_of_it(desk: Desk, gateway: Program) -> None:
    page = desk.send(ask_to_disconnect(desk, "ONE"), "Disconnect")
    assert page.messages == ["Disconnected: ONE."]
    assert list(Client.objects.values_list("ident", flat=True)) == ["TWO"]
    assert "disconnect ONE" in gateway.events()
    assert gateway.ok("topic_listen", "PRICES")["Already"] == 1, "TWO goes on"


def test_a_node_is_disconnected_from_its_own_page(desk: Desk, gateway: Program) -> None:
    page = desk.open(f"{CLIENTS}{Client.objects.get(ident='ONE').pk}/change/")
    page = desk.send(desk.send(page, "Disconnect…"), "Disconnect")
    assert page.messages == ["Disconnected: ONE."]


def test_the_history_says_who_was_disconnected(desk: Desk, gateway: Program) -> None:
    desk.send(ask_to_disconnect(desk, "ONE"), "Disconnect")
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.user) == ("ONE", desk.user)
    assert entry.change_message == f"Disconnected from user1 with pid {gateway.pid}."


def test_a_node_that_returned_before_the_confirmation_stays(desk: Desk, gateway: Program) -> None:
    page, former = ask_to_disconnect(desk, "ONE"), Client.objects.get(ident="ONE").pk
    gateway.ok("deinit", "ONE")
    gateway.ok("init", "ONE")
    desk.send(page, "Disconnect")
    assert not calls.disconnect(former)
    assert Client.objects.filter(ident="ONE").exists(), "what was confirmed was another connection"


def test_a_node_that_is_gone_is_told_as_a_crash(desk: Desk, gateway: Program) -> None:
    desk.world.rules("user2 WATCH Topic PRICES R 10")
    watch = desk.world.node("user2", "WATCH")
    watch.payloads()
    desk.world.kill(gateway)
    page = desk.send(ask_to_disconnect(desk, "ONE"), "Disconnect")
    assert page.messages == ["Gone already: ONE."]
    assert "crash ONE" in watch.events()


def test_a_disconnection_that_must_wait_too_long_says_why(desk: Desk, gateway: Program) -> None:
    page = ask_to_disconnect(desk, "ONE")
    desk.world.owner.connection.execute("BEGIN")
    desk.world.owner.connection.execute("LOCK TABLE messages._gate IN EXCLUSIVE MODE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psqlmessages.admin.calls._PATIENCE", "50ms")
        page = desk.send(page, "Disconnect")
    desk.world.owner.connection.execute("ROLLBACK")
    assert page.messages == ["Nothing was saved: canceling statement due to lock timeout."]
    assert Client.objects.filter(ident="ONE").exists()


OPEN = f"{CLIENTS}open-transactions/"


def test_whoever_may_ends_the_connection_that_holds_up_a_change_of_rules(
    desk: Desk, gateway: Program
) -> None:
    gateway.connection.execute("SET application_name = 'sitter'")
    gateway.connection.execute("BEGIN")
    gateway.ok("topic_unlisten", "PRICES")
    named = f"pid {gateway.pid} (user1, sitter)"
    desk.world.wait_for("SELECT pg_sleep(1.1) IS NOT NULL")
    page = desk.send(desk.follow(desk.open_rule(ident="TWO"), "Delete"), SURE)
    assert any(named in text for text in page.messages)
    page = desk.open(OPEN)
    assert named in page.text
    assert "idle in transaction" in page.text or "not shown" in page.text

    button = f"End pid {gateway.pid}…"
    viewer = desk.staff("view_client")
    assert not any(button in form.buttons for form in viewer.open(OPEN).forms)
    values = {**page.form(button).values, "confirmed": "yes"}
    viewer.client.cookies["csrftoken"] = desk.client.cookies["csrftoken"].value
    assert viewer.client.post(OPEN, values).status_code == 403
    assert desk.staff("view_auth").open(OPEN).status == 403

    admin = desk.staff("view_client", "terminate_session")
    page = admin.send(admin.open(OPEN), button)
    assert f"The connection of {named} will be ended." in page.text
    page = admin.send(page, "End the connection")
    assert page.messages[0].startswith("Not ended: role ")
    assert "Allow it with GRANT pg_signal_backend TO " in page.messages[0]
    desk.world.superuser().connection.execute(f"GRANT pg_signal_backend TO {calls.role()}")
    try:
        page = admin.send(admin.send(admin.open(OPEN), button), "End the connection")
    finally:
        desk.world.superuser().connection.execute(f"REVOKE pg_signal_backend FROM {calls.role()}")
    assert page.messages == [f"Ended: {named}."]
    assert LogEntry.objects.get(object_id=gateway.pid).change_message.startswith(
        f"Ended the connection of {named}"
    )
    desk.world.wait_for(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", gateway.pid
    )
    assert named not in desk.open(OPEN).text


def test_last_statements_are_shown_to_who_may_see_bodies(desk: Desk) -> None:
    owner = desk.world.owner
    owner.connection.execute("BEGIN")
    owner.connection.execute("UPDATE psqlmessages_element SET body = 'a secret body'")
    viewer = desk.staff("view_client", "terminate_session").open(OPEN).text
    assert f"pid {owner.pid}" in viewer
    assert "secret body" not in viewer
    assert "psqlmessages.view_bodies" in viewer
    assert "a secret body" in desk.staff("view_client", "view_bodies").open(OPEN).text
    owner.connection.execute("ROLLBACK")


def test_who_may_only_view_nodes_cannot_disconnect_them(desk: Desk, gateway: Program) -> None:
    viewer = desk.staff("view_client")
    key = Client.objects.get(ident="ONE").pk
    page = viewer.open(f"{CLIENTS}{key}/change/")
    assert page.status == 200
    assert not any("Disconnect…" in form.buttons for form in page.forms)
    token = desk.open(f"{CLIENTS}{key}/change/").forms[-1].values["csrfmiddlewaretoken"]
    viewer.client.cookies["csrftoken"] = desk.client.cookies["csrftoken"].value
    values = {"action": "disconnect", "_selected_action": key, "confirmed": "yes"}
    viewer.client.post(CLIENTS, {**values, "csrfmiddlewaretoken": token})
    assert Client.objects.count() == 2


def test_who_may_delete_nodes_can_disconnect_them(desk: Desk, gateway: Program) -> None:
    operator = desk.staff("view_client", "delete_client")
    page = operator.open(f"{CLIENTS}{Client.objects.get(ident='ONE').pk}/change/")
    page = operator.send(operator.send(page, "Disconnect…"), "Disconnect")
    assert page.messages == ["Disconnected: ONE."]


@pytest.mark.parametrize("path", [CLIENTS, TOPICS])
def test_what_nodes_do_cannot_be_added_or_deleted(desk: Desk, gateway: Program, path: str) -> None:
    model = Client if path == CLIENTS else Topic
    key = model.objects.first().pk
    assert desk.client.get(f"{path}add/").status_code == 403
    assert desk.client.get(f"{path}{key}/delete/").status_code == 403


def test_a_hundred_nodes_are_listed_in_few_statements(
    desk: Desk, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    desk.world.rules("user1 N* Topic * RW 10")
    gateway = desk.world.program("user1")
    for number in range(100):
        gateway.ok("init", f"N{number}")
        gateway.ok("topic_listen", f"T{number % 7}")
    with django_assert_max_num_queries(14):
        page = desk.open(CLIENTS)
    assert "100 connected nodes" in page.text


# Topics


def open_topic(desk: Desk, name: str) -> Page:
    return desk.open(f"{TOPICS}{Topic.objects.get(name=name).pk}/change/")


def test_the_list_of_topics_counts_who_listens_and_sends_now(desk: Desk, gateway: Program) -> None:
    assert "NEWS 0 1 0 0" in desk.open(TOPICS).text
    assert "PRICES 2 0" in desk.open(TOPICS).text
    desk.world.kill(gateway)
    assert "PRICES 0 0" in desk.open(TOPICS).text


def test_the_page_of_a_topic_names_who_listens_and_sends(desk: Desk, gateway: Program) -> None:
    text = open_topic(desk, "PRICES").text
    assert "Listeners ONE, TWO Notifiers nobody" in text


def test_the_page_of_a_topic_shows_the_rules_about_it_and_leads_to_them(
    desk: Desk, gateway: Program
) -> None:
    desk.world.rules("user2 ALL Topic * R 10", "user2 ELSE Topic PRICESX R 10")
    desk.world.rules("user2 PRICES Rpc PRICES W 10")
    page = open_topic(desk, "PRICES")
    assert "user1 ONE PRI* O (observe) 10 s" in page.text
    assert "user2 ALL * R (receive) 10 s" in page.text
    assert "ELSE" not in page.text
    assert "Rpc" not in page.text
    assert page.links["open"].startswith(RULES)


def test_a_topic_that_no_rule_is_about_says_so(desk: Desk, gateway: Program) -> None:
    Auth.objects.all().delete()
    assert "No rule is about this topic: nobody may use it." in open_topic(desk, "NEWS").text


def test_the_page_of_a_topic_lives_for_who_may_see_the_monitor(
    desk: Desk, gateway: Program
) -> None:
    page = open_topic(desk, "NEWS")
    assert 'data-topic="NEWS"' in page.html
    assert "psqlmessages/monitor/topic_status.js" in page.html


def test_who_may_not_see_the_monitor_is_told_so(desk: Desk, gateway: Program) -> None:
    viewer = desk.staff("view_topic")
    page = viewer.open(f"{TOPICS}{Topic.objects.get(name='NEWS').pk}/change/")
    assert "Who has the permission “Can view the live monitor” sees it change here." in page.text
    assert "Notifiers ONE" in page.text
    assert "topic_status.js" not in page.html


def test_who_may_not_see_rules_sees_none_on_the_page_of_a_topic(
    desk: Desk, gateway: Program
) -> None:
    viewer = desk.staff("view_topic")
    page = viewer.open(f"{TOPICS}{Topic.objects.get(name='PRICES').pk}/change/")
    assert "PRI*" not in page.text


def test_scripts_in_names_are_shown_as_text(desk: Desk) -> None:
    script = "<script>alert(1)</script>"
    desk.world.rule("user1", script, "Topic", script, "RW", 9)
    desk.world.rule("user1", script, "Topic", "*", "O", 9)
    node = desk.world.node("user1", script)
    for function in ("topic_listen", "topic_notify", "topic_observe"):
        node.ok(function, script)
    asked = ask_to_disconnect(desk, script)
    pages = [desk.open(CLIENTS), open_topic(desk, script), desk.open(TOPICS), asked]
    pages.append(desk.open(f"{CLIENTS}{Client.objects.get().pk}/change/"))
    pages.append(desk.send(asked, "Disconnect"))
    assert all(script in page.text for page in pages)
    assert not any("<script>alert" in page.html for page in pages)


def test_ten_thousand_topics_are_listed_in_few_statements(
    desk: Desk, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO psqlmessages_topic (name) SELECT 'T' || n FROM generate_series(1, 10000) n"
        )
    with django_assert_max_num_queries(10):
        assert "10000 topics" in desk.open(TOPICS).text
