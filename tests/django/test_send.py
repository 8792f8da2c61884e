"""send: with the ORM's transaction, and what it does where it is refused."""

import inspect
import logging

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from pytest_django import Settings

from psqlmessages import (
    BodyTooLarge,
    DestinationNotAuthorized,
    NoListeners,
    NotConnected,
    NotInstalled,
    TopicNotExistent,
)
from psqlmessages.client.backoff import QuietLog
from psqlmessages.django import acall, asend, call, send, send_many
from tests.sql.conftest import Program, World


@pytest.fixture
def listener(shop: World) -> Program:
    """A program of another role that listens to ORDERS."""
    listener = shop.node("user2", "LISTENER")
    listener.ok("topic_listen", "ORDERS")
    return listener


@pytest.fixture
def small_bodies(shop: World) -> None:
    """A limit of 8 KiB; the flush after the test sets that of the settings again."""
    shop.owner.query("UPDATE messages._settings SET max_body_bytes = 8192 RETURNING 1")


@transaction.atomic
def order_that_fails(name: str) -> None:
    """Save an order, send it, and fail."""
    Group.objects.create(name=name)
    send("ORDERS", name)
    raise ZeroDivisionError


def bodies(listener: Program) -> list[str]:
    return [header["Body"] for header in listener.headers() if header["Type"] == "Topic"]


def test_a_message_leaves_with_the_commit_of_the_orm(listener: Program) -> None:
    with transaction.atomic():
        Group.objects.create(name="order 1")
        assert send("ORDERS", {"id": 1}) is True
        assert bodies(listener) == []
    (header,) = [header for header in listener.headers() if header["Type"] == "Topic"]
    assert (header["From"], header["Enc"], header["Body"]) == ("shop", "json", '{"id":1}')
    assert Group.objects.filter(name="order 1").exists()


def test_a_rollback_of_the_orm_takes_the_message_with_it(listener: Program) -> None:
    with pytest.raises(ZeroDivisionError):
        order_that_fails("order 2")
    assert bodies(listener) == []
    assert not Group.objects.filter(name="order 2").exists()


def test_a_rolled_back_inner_block_takes_its_message_alone(listener: Program) -> None:
    with transaction.atomic():
        send("ORDERS", "outer")
        with pytest.raises(ZeroDivisionError):
            order_that_fails("inner")
    assert bodies(listener) == ["outer"]


def test_where_nobody_listens_send_is_false_and_logs(
    shop: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The project's own says the same thing once in ten seconds.
    monkeypatch.setattr("psqlmessages.django._log", QuietLog(logging.getLogger("psqlmessages")))
    with caplog.at_level(logging.WARNING, "psqlmessages"):
        assert send("ORDERS", "unheard") is False
    assert "nobody listens to topic ORDERS" in caplog.text


def test_where_nobody_listens_the_order_is_saved_all_the_same(shop: World) -> None:
    with transaction.atomic():
        assert send("ORDERS", "unheard") is False
        Group.objects.create(name="order 3")
    assert Group.objects.filter(name="order 3").exists()


def test_who_requires_a_listener_gets_an_error_where_there_is_none(shop: World) -> None:
    with pytest.raises(NoListeners):
        send("ORDERS", "unheard", require_listener=True)


@pytest.mark.parametrize(
    ("topic", "body", "ident", "error"),
    [
        ("NOWHERE", "x", "shop", TopicNotExistent),
        ("ORDERS", "x", "LISTENER", DestinationNotAuthorized),
        ("ORDERS", "x" * 9000, "shop", BodyTooLarge),
    ],
)
@pytest.mark.usefixtures("small_bodies")
def test_a_refusal_is_raised_and_the_transaction_goes_on(
    listener: Program, topic: str, body: str, ident: str, error: type[Exception]
) -> None:
    with transaction.atomic():
        Group.objects.create(name="before")
        with pytest.raises(error):
            send(topic, body, ident=ident)
        Group.objects.create(name="after")
        send("ORDERS", "after")
    assert Group.objects.count() == 2
    assert bodies(listener) == ["after"]


def test_a_token_needs_a_node_that_receives_the_answers(listener: Program) -> None:
    with pytest.raises(NotConnected):
        send("ORDERS", "a question", token="ticket")


def test_what_no_body_can_hold_is_refused_before_anything_is_sent(shop: World) -> None:
    with pytest.raises(ValueError, match="NUL"):
        send("ORDERS", "a\0b")
    with pytest.raises(TypeError, match="Group"):
        send("ORDERS", Group())


def test_a_large_body_arrives_whole(listener: Program) -> None:
    send("ORDERS", "x" * 100_000)
    (payload,) = [payload for payload in listener.payloads() if "Dkey" in payload]
    assert listener.data(payload)[1] == "x" * 100_000


def test_many_bodies_leave_in_their_order(listener: Program) -> None:
    assert send_many("ORDERS", [f"order {number}" for number in range(500)]) == 500
    assert bodies(listener) == [f"order {number}" for number in range(500)]


@pytest.mark.usefixtures("small_bodies")
def test_of_many_bodies_one_refused_takes_all_back_and_no_more(listener: Program) -> None:
    with transaction.atomic():
        send("ORDERS", "before")
        with pytest.raises(BodyTooLarge):
            send_many("ORDERS", ["first", "x" * 9000])
        send("ORDERS", "after")
    assert bodies(listener) == ["before", "after"]


def test_many_bodies_that_nobody_hears_are_none(shop: World) -> None:
    assert send_many("ORDERS", ["a", {"b": 1}]) == 0
    with pytest.raises(NoListeners):
        send_many("ORDERS", ["a"], require_listener=True)
    assert send_many("ORDERS", []) == 0


def test_an_asynchronous_view_sends_too(listener: Program) -> None:
    assert async_to_sync(asend)("ORDERS", [1, 2]) is True
    assert bodies(listener) == ["[1,2]"]


def test_without_a_node_in_the_settings_it_says_what_to_set(
    shop: World, settings: Settings
) -> None:
    settings.PSQLMESSAGES = {}
    with pytest.raises(ImproperlyConfigured, match="PSQLMESSAGES = "):
        send("ORDERS", "x")


def test_without_the_functions_it_says_to_migrate(
    shop: World,
) -> None:
    transaction.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER FUNCTION messages.topic_send_as(text, text, text, text, text) RENAME TO gone"
        )
    with pytest.raises(NotInstalled, match="migrations"):
        send("ORDERS", "x")
    transaction.rollback()
    transaction.set_autocommit(True)


@pytest.mark.parametrize(("sync", "asynchronous"), [(send, asend), (call, acall)])
def test_the_asynchronous_functions_take_the_same_arguments(
    sync: object, asynchronous: object
) -> None:
    assert inspect.signature(sync) == inspect.signature(asynchronous)
