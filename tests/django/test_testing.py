"""The helpers for the tests of projects, in a TestCase and without."""

import inspect
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import transaction
from django.test import TestCase, override_settings
from django.utils.module_loading import import_string

from psqlmessages import Message, testing
from psqlmessages.django import acall, call, send, send_many
from psqlmessages.exceptions import CallFailed, TopicNotExistent
from psqlmessages.handler_registry import HandlerRegistry
from psqlmessages.monitor import minute_writer
from psqlmessages.relay.asgi import START_WRITER
from psqlmessages.testing import SentMessages, answered_calls, ask, deliver, sent_messages
from tests.conftest import TestedServer
from tests.django.processes import environment, run_python
from tests.sql.conftest import World

pytest_plugins = ["psqlmessages.pytest_plugin"]

registry = HandlerRegistry()
IN_PARALLEL = """
import pytest
from psqlmessages import django, testing
pytest_plugins = ["psqlmessages.pytest_plugin"]
@pytest.mark.parametrize("number", range(4))
def test_it(db, number, sent_messages):
    testing.allow_topic("ORDERS")
    django.send("ORDERS", number)
    assert sent_messages.bodies("ORDERS") == [number]
"""


@registry.on_topic("TESTED")
def ship(message: Message) -> str:
    Group.objects.create(name=f"shipped {message.body['id']} for {message.sender}")
    if message.body["id"] == 13:
        raise ValueError("no luck")
    return "shipped"


@registry.on_rpc(node="prices")
def price(message: Message) -> object:
    return message.body["pair"][0], "EUR"


@transaction.atomic
def place_order(topic: str, body: object, *, fails: bool = False) -> None:
    Group.objects.create(name=f"order {body}")
    send(topic, body)
    if fails:
        raise ZeroDivisionError


@override_settings(PSQLMESSAGES={"NODE": "tested"})
class InATestCase(TestCase):
    """The transaction of a TestCase never commits: nothing leaves, and all can be asserted."""

    def setUp(self) -> None:
        testing.allow_topic("TESTED")

    def test_sent_messages_are_seen(self):
        with sent_messages() as sent:
            place_order("TESTED", {"id": 1})
            send_many("TESTED", [2, (3,)])
        place_order("TESTED", {"id": 4})
        assert sent.bodies("TESTED") == [{"id": 1}, 2, [3]]
        assert {(m.topic, m.ident, m.using) for m in sent} == {("TESTED", "tested", "default")}
        assert (len(sent), sent[0].has_receivers, sent.bodies("OTHER")) == (3, False, [])

    def test_rolled_back_and_refused_messages_are_not_seen(self):
        with sent_messages() as sent:
            place_order("TESTED", {"id": 1})
            with pytest.raises(ZeroDivisionError):
                place_order("TESTED", {"id": 2}, fails=True)
            with pytest.raises(TopicNotExistent):
                send("FORBIDDEN", 1)
        assert sent.bodies("TESTED") == [{"id": 1}]

    def test_messages_are_passed_to_handlers(self):
        assert deliver("TESTED", {"id": 4}, sender="shop", handlers=registry) == ["shipped"]
        assert deliver("OTHER", {"id": 4}, handlers=registry) == []
        assert Group.objects.get().name == "shipped 4 for shop"
        deliver("TESTED", {"id": 5}, handlers=registry)
        assert Group.objects.last().name == "shipped 5 for tested"
        # The exception of a handler reaches the test, and its writes are rolled back.
        with pytest.raises(ValueError, match="no luck"):
            deliver("TESTED", {"id": 13}, handlers=registry)
        assert Group.objects.count() == 2

    def test_a_call_is_passed_to_its_handler(self):
        assert ask("prices", {"pair": (5, 6)}, handlers=registry) == [5, "EUR"]
        with pytest.raises(KeyError):
            ask("prices", {}, handlers=registry)
        with pytest.raises(CallFailed, match="nobody has no RPC handler"):
            ask("nobody", {}, handlers=registry)

    def test_calls_are_answered_as_from_another_process(self):
        with answered_calls(registry):
            assert call("prices", {"pair": [5]}) == [5, "EUR"]
            assert async_to_sync(acall)("prices", {"pair": [6]}) == [6, "EUR"]
            with pytest.raises(CallFailed, match="KeyError"):
                call("prices", {})


def test_in_a_real_transaction_a_rollback_undoes_sends(shop: World, sent_messages: SentMessages):
    place_order("ORDERS", "kept")
    with pytest.raises(ZeroDivisionError):
        place_order("ORDERS", "taken back", fails=True)
    send("ORDERS", "without a transaction")
    assert sent_messages.bodies("ORDERS") == ["kept", "without a transaction"]
    assert "kept" in repr(sent_messages)
    assert sent_messages.deliver() == 0


@pytest.mark.usefixtures("answered_calls", "shop")
def test_the_fixture_answers_calls_with_the_project_s_own_handlers():
    with pytest.raises(CallFailed, match="PRICES has no RPC handler"):
        call("PRICES", 1)


def test_the_plugin_ends_the_session_of_the_history(shop: World, monkeypatch: pytest.MonkeyPatch):
    has_lock = f"locktype = 'advisory' AND granted AND classid = {minute_writer.LOCK_IDS[0]}"
    writers = f"FROM pg_locks WHERE {has_lock}"

    from psqlmessages import pytest_plugin

    monkeypatch.setattr(minute_writer, "START_SECONDS", 0)
    fixture = inspect.unwrap(pytest_plugin._close_sessions)()
    next(fixture)
    # The first WebSocket of a process starts the writer in this way.
    import_string(START_WRITER)()
    shop.wait_for(f"SELECT EXISTS (SELECT {writers})")
    pid = shop.owner.query(f"SELECT pid {writers}")
    assert next(fixture, None) is None
    # The server process ends a moment after the connection. Then another process, of an earlier
    # test, may get the lock.
    shop.wait_for(f"SELECT NOT EXISTS (SELECT {writers} AND pid = %s)", pid)


@pytest.mark.nightly  # each process migrates a database of its own
def test_a_project_runs_its_tests_in_parallel(server: TestedServer, tmp_path: Path):
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(IN_PARALLEL)
    run = ("-m", "pytest", "-n2", "--ds=tests.django.shop_settings", f"-c{tmp_path}/pytest.ini")
    done = run_python(*run, str(tmp_path), env=environment(server))
    assert "4 passed" in done.stdout, done.stdout
