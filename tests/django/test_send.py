"""send: with the ORM's transaction, and what it does where it is refused."""

import inspect
import logging

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from pytest_django import Settings

from psqlmessages import exceptions
from psqlmessages.django import acall, asend, call, send, send_many
from psqlmessages.exceptions import NoListeners, NotInstalled
from psqlmessages.retry import RateLimitedLogger
from tests.django.conftest import Changed
from tests.sql.conftest import Program, World

SEND_AS = "messages.topic_send_as(text, text, text, text, text)"


@pytest.fixture
def listener(shop: World) -> Program:
    return shop.node("user2", "LISTENER", listen="ORDERS")


@transaction.atomic
def order_that_fails(name: str) -> None:
    Group.objects.create(name=name)
    send("ORDERS", name)
    raise ZeroDivisionError


def test_a_message_leaves_with_the_commit_of_the_orm_or_not_at_all(listener: Program) -> None:
    with transaction.atomic():
        Group.objects.create(name="order 1")
        assert send("ORDERS", {"id": 1}) is True
        assert listener.bodies() == []
    (header,) = [header for header in listener.headers() if header["Type"] == "Topic"]
    assert (header["From"], header["Enc"], header["Body"]) == ("shop", "json", '{"id":1}')
    with pytest.raises(ZeroDivisionError):
        order_that_fails("order 2")
    assert listener.bodies() == []
    # A rolled back inner block takes its message alone.
    with transaction.atomic():
        send("ORDERS", "outer")
        with pytest.raises(ZeroDivisionError):
            order_that_fails("inner")
    assert listener.bodies() == ["outer"]
    assert [group.name for group in Group.objects.all()] == ["order 1"]
    assert async_to_sync(asend)("ORDERS", [1, 2]) is True
    assert listener.bodies() == ["[1,2]"]


def test_where_nobody_listens_the_order_is_saved_all_the_same_unless_one_is_required(
    shop: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The project's own says the same thing once in ten seconds.
    monkeypatch.setattr(
        "psqlmessages.django._log", RateLimitedLogger(logging.getLogger("psqlmessages"))
    )
    with caplog.at_level(logging.WARNING, "psqlmessages"), transaction.atomic():
        assert send("ORDERS", "unheard") is False
        Group.objects.create(name="order 3")
    assert "topic ORDERS of database default has no listeners" in caplog.text
    assert Group.objects.filter(name="order 3").exists()
    assert send_many("ORDERS", ["a", {"b": 1}]) == 0
    assert send_many("ORDERS", []) == 0
    for function in (send, send_many):
        with pytest.raises(NoListeners):
            function("ORDERS", ["a"], require_listener=True)


def test_a_refusal_is_raised_and_the_transaction_goes_on(
    shop: World, listener: Program, changed: Changed
) -> None:
    large, change = "x" * 9000, "UPDATE messages._settings SET max_body_bytes ="
    before = shop.owner.query("SELECT max_body_bytes FROM messages._settings")
    changed(f"{change} 8192", f"{change} {before}")
    with transaction.atomic():
        send("ORDERS", "before")
        for error, function, topic, body, given in (
            (exceptions.TopicNotExistent, send, "NOWHERE", "x", {}),
            (exceptions.DestinationNotAuthorized, send, "ORDERS", "x", {"ident": "LISTENER"}),
            (exceptions.BodyTooLarge, send, "ORDERS", large, {}),
            # Of many one that is refused takes all of them back, and no more.
            (exceptions.BodyTooLarge, send_many, "ORDERS", ["first", large], {}),
            # A token needs a node that receives the answers.
            (exceptions.NotConnected, send, "ORDERS", "a question", {"token": "ticket"}),
        ):
            with pytest.raises(error):
                function(topic, body, **given)
        with pytest.raises(ValueError, match="NUL"):
            send("ORDERS", "a\0b")
        with pytest.raises(TypeError, match="Group"):
            send("ORDERS", Group())
        Group.objects.create(name="after")
        send("ORDERS", "after")
    assert Group.objects.count() == 1
    assert listener.bodies() == ["before", "after"]


def test_large_and_many_bodies_arrive_whole_and_in_their_order(listener: Program) -> None:
    send("ORDERS", "x" * 100_000)
    (payload,) = [payload for payload in listener.payloads() if "Dkey" in payload]
    assert listener.data(payload)[1] == "x" * 100_000
    assert send_many("ORDERS", [f"order {number}" for number in range(500)]) == 500
    assert listener.bodies() == [f"order {number}" for number in range(500)]


def test_what_is_missing_is_said(shop: World, settings: Settings) -> None:
    transaction.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER FUNCTION {SEND_AS} RENAME TO gone")
    with pytest.raises(NotInstalled, match="migrations"):
        send("ORDERS", "x")
    transaction.rollback()
    transaction.set_autocommit(True)
    settings.PSQLMESSAGES = {}
    for function in (send, call):
        with pytest.raises(ImproperlyConfigured, match="PSQLMESSAGES = "):
            function("ORDERS", "x")


def test_the_asynchronous_functions_take_the_same_arguments() -> None:
    for sync, asynchronous in ((send, asend), (call, acall)):
        assert inspect.signature(sync) == inspect.signature(asynchronous)
