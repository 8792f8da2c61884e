"""Streams with the ORM: published with its transaction, and read with one effect each."""

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import OperationalError, connection, connections, transaction

from project.postgres import Server
from psqlmessages import ModeNotAuthorized, NotPositive, StreamMessage, TopicNotExistent
from psqlmessages.django import apublish, node, publish, publish_many, read_stream
from psqlmessages.testing import sent_messages
from tests.sql.conftest import Program, World


@pytest.fixture
def subscribed(shop: World) -> Iterator[World]:
    """The node worker.1 has subscribed to ORDERS."""
    publish("ORDERS", "before anyone subscribes")
    with transaction.atomic():
        assert read_stream("worker.1", "ORDERS") == []
    yield shop
    shop.owner.connection.execute("DELETE FROM psqlmessages_subscription")


def read_and_save() -> list[str]:
    """Save a group for each order that is read."""
    names = [message.body for message in read_stream("worker.1", "ORDERS")]
    Group.objects.bulk_create(Group(name=name) for name in names)
    return names


@transaction.atomic
def read_and_fail() -> None:
    assert read_and_save() == ["1", "2"]
    raise ZeroDivisionError


@transaction.atomic
def publish_and_fail() -> None:
    publish("ORDERS", "taken back")
    raise ZeroDivisionError


@transaction.atomic
def read_and_be_killed(watcher: Program) -> None:
    assert read_and_save() == ["1", "2"]
    pid = connection.connection.info.backend_pid
    watcher.query("SELECT pg_terminate_backend(%s, 60000)", pid)


def saved() -> list[str]:
    return list(Group.objects.order_by("name").values_list("name", flat=True))


def test_what_is_published_is_there_with_the_commit_of_the_orm_or_not_at_all(
    subscribed: World,
) -> None:
    with transaction.atomic():
        Group.objects.create(name="order 1")
        answer = publish("ORDERS", {"id": 1})
        assert answer[1:] == (0, 1)
        with pytest.raises(ZeroDivisionError):
            publish_and_fail()
    with transaction.atomic():
        (message,) = read_stream("worker.1", "ORDERS")
    assert message == StreamMessage(answer.id, "ORDERS", "shop", {"id": 1}, message.published_at)
    assert inspect.signature(apublish) == inspect.signature(publish)
    assert async_to_sync(apublish)("ORDERS", "1").subscribers == 1


def test_what_is_read_has_one_effect_whatever_fails(subscribed: World) -> None:
    publish_many("ORDERS", ["1", "2"])
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            read_and_fail()
    with pytest.raises(OperationalError):
        read_and_be_killed(subscribed.watcher)
    connection.close()
    assert saved() == []
    with transaction.atomic():
        assert read_and_save() == ["1", "2"]
    with transaction.atomic():
        assert read_and_save() == []
    assert saved() == ["1", "2"]


def test_readers_of_one_subscription_share_what_comes(subscribed: World) -> None:
    def work(_: int) -> None:
        for _ in range(25):
            with transaction.atomic():
                for message in read_stream("worker.1", "ORDERS", max_rows=2):
                    Group.objects.create(name=f"{message.body:03}")
        connections.close_all()

    publish_many("ORDERS", range(100))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert saved() == [f"{number:03}" for number in range(100)]


def test_a_refusal_is_raised_and_that_of_publish_breaks_no_transaction(subscribed: World) -> None:
    with transaction.atomic():
        with pytest.raises(TopicNotExistent):
            publish("UNHEARD", "x")
        with pytest.raises(TypeError, match="cannot be mixed"):
            publish_many("ORDERS", [b"x", "y"])
        Group.objects.create(name="order 2")
    assert saved() == ["order 2"]
    with pytest.raises(transaction.TransactionManagementError, match=r"within transaction\.atomic"):
        read_stream("worker.1", "ORDERS")
    subscribed.rules(f"{Server.owner} writer Topic ORDERS W 60")
    with pytest.raises(ModeNotAuthorized), transaction.atomic():
        read_stream("writer", "ORDERS")
    with pytest.raises(NotPositive), transaction.atomic():
        read_stream("worker.1", "ORDERS", timedelta(0))


def test_a_node_tells_when_there_is_reason_to_read(subscribed: World) -> None:
    with node("worker.1") as waiting:
        assert waiting.wait_published("ORDERS", timedelta(seconds=60))
        with transaction.atomic():
            assert read_and_save() == []
        assert not waiting.wait_published("ORDERS", timedelta(seconds=0.1))
        publish("ORDERS", "1")
        assert waiting.wait_published("ORDERS", timedelta(seconds=60))
        with transaction.atomic():
            assert read_and_save() == ["1"]


def test_published_messages_are_collected_in_tests(shop: World) -> None:
    with sent_messages() as sent:
        publish("ORDERS", {"id": 1})
        publish_many("ORDERS", [2, 3])
        with pytest.raises(ZeroDivisionError):
            publish_and_fail()
        assert sent.bodies("ORDERS") == [{"id": 1}, 2, 3]
        assert not sent[0].is_heard
        with transaction.atomic():
            read_stream("worker.1", "ORDERS")
        publish("ORDERS", "with a subscription")
        assert sent[-1].is_heard
