"""Queues with the ORM: pushed with its transaction, and taken with one effect each."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import OperationalError, connection, connections, transaction
from django.test import TestCase, override_settings

from psqlmessages import MalformedArgument, ModeNotAuthorized, NotPositive
from psqlmessages.django import apush, commit, pop, push, push_many, reserve, rollback
from psqlmessages.testing import allow_queue
from tests.sql.conftest import Program, World

HOUR = timedelta(hours=1)


@pytest.fixture
def queue(shop: World) -> World:
    """The project may push to orders and take from it."""
    allow_queue("orders")
    return shop


def saved() -> list[str]:
    return list(Group.objects.order_by("name").values_list("name", flat=True))


def pop_and_save(count: int = 1) -> list[str]:
    """Save a group for each order that is popped."""
    names = [element.body for element in pop("orders", count)]
    Group.objects.bulk_create(Group(name=name) for name in names)
    return names


@transaction.atomic
def push_and_fail() -> None:
    push("orders", "taken back")
    raise ZeroDivisionError


@transaction.atomic
def pop_and_fail() -> None:
    assert pop_and_save(2) == ["1", "2"]
    raise ZeroDivisionError


@transaction.atomic
def pop_and_be_killed(watcher: Program) -> None:
    assert pop_and_save(2) == ["1", "2"]
    pid = connection.connection.info.backend_pid
    watcher.query("SELECT pg_terminate_backend(%s, 60000)", pid)


@transaction.atomic
def save_and_commit(lease: str, name: str = "effect") -> None:
    Group.objects.create(name=name)
    if not commit(lease):
        raise ZeroDivisionError


def left(world: World) -> int:
    count: int = world.owner.query("SELECT count(*) FROM psqlmessages_element")
    return count


def test_what_is_pushed_is_there_with_the_commit_of_the_orm_or_not_at_all(queue: World) -> None:
    with transaction.atomic():
        Group.objects.create(name="order 1")
        id_ = push("orders", {"id": 1}, headers={"country": "it"}, tries=2)
        with pytest.raises(ZeroDivisionError):
            push_and_fail()
        assert left(queue) == 0
    with transaction.atomic():
        (element,) = pop("orders", 5)
    assert (element.id, element.body, element.headers) == (id_, {"id": 1}, {"country": "it"})
    assert (element.tries, element.lease) == (2, "")
    assert inspect.signature(apush) == inspect.signature(push)
    assert async_to_sync(apush)("orders", "1", headers={"a": 1}) > id_
    assert [element.headers for element in reserve("orders")] == [{"a": 1}]


def test_many_are_pushed_all_or_none(queue: World) -> None:
    ids = push_many("orders", ["a", None], headers=[{"n": 1.0}, None], keys=["k", None])
    assert push("orders", "again", key="k") == ids[0]
    assert push_many("orders", [], delay=HOUR) == []
    assert [(one.body, one.headers) for one in reserve("orders", 9)] == [
        ("a", {"n": 1.0}), (None, {}),
    ]  # fmt: skip


def test_what_is_popped_has_one_effect_whatever_fails(queue: World) -> None:
    push_many("orders", ["1", "2"])
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            pop_and_fail()
    with pytest.raises(OperationalError):
        pop_and_be_killed(queue.watcher)
    connection.close()
    assert saved() == []
    with transaction.atomic():
        assert pop_and_save(5) == ["1", "2"]
    assert (saved(), left(queue)) == (["1", "2"], 0)


def test_workers_share_what_there_is_and_none_waits_for_another(queue: World) -> None:
    def work(_: int) -> None:
        for _ in range(20):
            with transaction.atomic():
                pop_and_save(2)
        connections.close_all()

    push_many("orders", [f"{number:03}" for number in range(100)])
    with transaction.atomic():
        (first,) = pop("orders")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    assert first.body == "000"
    assert saved() == [f"{number:03}" for number in range(1, 100)]


def test_a_commit_with_the_effect_is_done_once(queue: World) -> None:
    push("orders", "x")
    (early,) = reserve("orders", duration=timedelta(microseconds=1))
    (late,) = reserve("orders")
    assert (late.id, late.tries) == (early.id, 1)
    with pytest.raises(ZeroDivisionError):
        save_and_commit(early.lease)
    save_and_commit(late.lease)
    with pytest.raises(ZeroDivisionError):
        save_and_commit(late.lease, "second effect")
    assert (saved(), left(queue)) == (["effect"], 0)
    # What is rolled back comes again.
    push_many("orders", ["a", "b"])
    first, second = reserve("orders", 2)
    assert rollback(first)
    assert rollback(second, delay=HOUR)
    assert [(one.body, one.tries) for one in reserve("orders", 2)] == [("a", 1)]


def test_a_refusal_is_raised_and_one_of_push_or_commit_breaks_no_transaction(
    queue: World,
) -> None:
    allow_queue("read-only", mode="R")
    with transaction.atomic():
        with pytest.raises(ModeNotAuthorized):
            push("read-only", "x")
        with pytest.raises(MalformedArgument):
            commit("x")
        with pytest.raises(TypeError, match="cannot be mixed"):
            push_many("orders", [b"x", "y"])
        Group.objects.create(name="order 2")
    assert saved() == ["order 2"]
    # A refused pop raises its error.
    allow_queue("write-only", mode="W")
    with pytest.raises(ModeNotAuthorized), transaction.atomic():
        pop("write-only")
    with pytest.raises(NotPositive), transaction.atomic():
        pop("orders", 0)
    with pytest.raises(NotPositive):
        reserve("orders", 0)
    with pytest.raises(transaction.TransactionManagementError, match=r"within transaction\.atomic"):
        pop("orders")


@override_settings(PSQLMESSAGES={"NODE": "tested"})
class InATestCase(TestCase):
    """What is pushed in a transaction that never commits can be popped there."""

    def test_what_was_pushed_can_be_popped(self) -> None:
        allow_queue("tested.*")
        push("tested.orders", {"id": 1})
        (element,) = pop("tested.orders")
        assert element.body == {"id": 1}
