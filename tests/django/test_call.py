"""call: a session of the process's own, which outlives connections, threads and forks."""

import asyncio
import inspect
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic

import pytest
from django.db import connection, transaction
from django.test import Client

from project.postgres import Server
from psqlmessages import Message, Node, exceptions, rpc_client
from psqlmessages.django import acall, call, node, push, reserve_many
from psqlmessages.exceptions import CalleeGone, CallFailed, CallTimeout
from psqlmessages.exchanges.store import repository
from psqlmessages.exchanges.store.definitions import parse_exchange
from psqlmessages.orm import database_dsn
from psqlmessages.rpc_client import close_clients
from psqlmessages.testing import allow_queue
from tests.client.programs import PROMPTLY
from tests.client.proxy import Proxy
from tests.django.processes import environment, run_python
from tests.django.waiting import wait_until
from tests.exchanges.conftest import namespace
from tests.exchanges.field import AWAITED, working
from tests.reliability.counts import report, size
from tests.reliability.test_vanished import QUICK, through
from tests.sql.conftest import World

SHORT = timedelta(milliseconds=300)
LONG = timedelta(seconds=100)
SESSIONS = "SELECT count(*) FROM psqlmessages_client WHERE ident LIKE 'shop.%%'"


@pytest.fixture(autouse=True)
def _long_calls(monkeypatch) -> None:
    """Give calls without a timeout of their own time on a slow machine."""
    for function in (call, acall):
        monkeypatch.setitem(function.__kwdefaults__, "timeout", LONG)


@pytest.fixture
def prices(shop: World) -> Iterator[Node]:
    """The node PRICES in a thread of its own; it answers all but the question "silence"."""
    with node("PRICES") as prices:

        @prices.on_rpc
        def handle(message: Message) -> object:
            if message.body == "fail":
                raise ValueError("secret")
            if message.body == "refuse":
                raise CallFailed("no such article")
            message.is_answered = message.body == "silence"
            return message.sender if message.body == "who" else {"answer": message.body}

        thread = threading.Thread(target=prices.run)
        thread.start()
        yield prices
        prices.stop()
        thread.join()


def test_calls_go_on_after_a_firewall_forgot(prices: Node, proxy: Proxy, monkeypatch):
    if not size(0, 1):
        monkeypatch.setattr(rpc_client, "OPTIONS", QUICK)
    caller = rpc_client.RpcClient("shop.far", through(proxy, database_dsn()))
    assert caller.submit("PRICES", "at first", LONG).result() == {"answer": "at first"}
    proxy.stall(new=True)
    cut_at = monotonic()
    with ThreadPoolExecutor() as pool:

        def asked() -> float:
            while True:
                with suppress(CallTimeout, exceptions.ConnectionLost, exceptions.ServerUnreachable):
                    caller.submit("PRICES", "again", timedelta(seconds=1)).result()
                    return monotonic() - cut_at

        back = pool.submit(asked)
        threading.Event().wait(size(1, 15))
        proxy.forget()
        seconds = back.result()
    caller.close()
    report("a firewall drops connections", "`call`: time until it works again", seconds=seconds)
    assert seconds < 60


def test_a_call_leaves_at_once_and_takes_nothing_from_the_transaction_around_it(prices: Node):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id_if_assigned()")
        assert call("PRICES", [1, "x"]) == {"answer": [1, "x"]}
        cursor.execute("SELECT pg_current_xact_id_if_assigned()")
        assert cursor.fetchone() == (None,)
    with pytest.raises(CallFailed, match="ValueError") as raised:
        call("PRICES", "fail")
    assert "secret" not in str(raised.value)
    with pytest.raises(CallFailed, match="no such article"):
        call("PRICES", "refuse")
    with pytest.raises(CallTimeout):
        call("PRICES", "silence", timeout=SHORT)
    assert call("PRICES", 1) == {"answer": 1}


@pytest.mark.usefixtures("prices")
def test_behind_a_pooler_sessions_listen_by_the_alias_direct(shop: World, request, settings):
    settings.PSQLMESSAGES = {"NODE": "shop", "METRICS": True}
    shop.rules(f"{Server.owner} exchange.x Queue * RW 60")
    for queue in ("a", "b"):
        allow_queue(queue)
    repository.store(parse_exchange("x", {"src": {"queue": "a"}, "dst": [{"queue": "b"}]}))
    with namespace("direct"):
        request.getfixturevalue("django_by_transaction")
        close_clients()
        assert call("PRICES", 1) == {"answer": 1}
        for page in ("/healthz", "/metrics"):
            assert Client().get(page).status_code == 200
        with working("x"):
            wait_until(lambda: shop.owner.query(AWAITED, "a"))
            push("a", "it")
            wait_until(lambda: [element.body for element in reserve_many("b", 1)] == ["it"])


@pytest.mark.usefixtures("prices")
def test_threads_and_tasks_share_one_session_until_it_is_closed(shop: World):
    async def ask_many() -> list[object]:
        return list(await asyncio.gather(*(acall("PRICES", number) for number in range(100))))

    with ThreadPoolExecutor(8) as threads:
        (sender,) = set(threads.map(lambda _: str(call("PRICES", "who")), range(40)))
    assert sender.startswith(f"shop.{os.getpid()}-")
    assert asyncio.run(ask_many()) == [{"answer": number} for number in range(100)]
    # Imported here: pytest must be the first to import its plugins.
    from psqlmessages import pytest_plugin

    # It closes the session at the end of a test.
    with contextmanager(inspect.unwrap(pytest_plugin._close_sessions))():
        assert shop.owner.query(SESSIONS) == 1
    assert shop.owner.query(SESSIONS) == 0
    assert call("PRICES", "who") != sender


@pytest.mark.usefixtures("prices")
def test_a_session_opened_too_late_fails_and_calls_go_on(shop: World, monkeypatch):
    with monkeypatch.context() as away:
        away.setitem(connection.settings_dict, "PORT", "1")
        with pytest.raises(ConnectionError, match="cannot connect"):
            call("PRICES", 1)
    monkeypatch.setattr(rpc_client, "_MIN_CONNECT_TIMEOUT", SHORT)
    other = shop.program().connection
    with other.transaction():
        other.execute("LOCK TABLE psqlmessages_session IN ACCESS EXCLUSIVE MODE")
        started = monotonic()
        with pytest.raises(CallTimeout, match="no session"):
            call("PRICES", 1, timeout=SHORT)
        assert monotonic() - started < PROMPTLY
    assert call("PRICES", 1) == {"answer": 1}


@pytest.mark.usefixtures("prices")
def test_calls_work_again_once_a_rule_that_was_removed_is_back(shop: World):
    remove = "UPDATE messages.auth SET ident = '-' || ident WHERE ident LIKE 'shop%%'"
    add = "UPDATE messages.auth SET ident = substr(ident, 2) WHERE ident LIKE '-shop%%'"
    assert call("PRICES", 1) == {"answer": 1}
    shop.execute(remove)
    for _ in range(2):
        with pytest.raises((exceptions.NotAuthorized, exceptions.IdentNotExistent)):
            call("PRICES", 2)
    shop.execute(add)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(size(5, 50)):
            assert list(threads.map(lambda _: call("PRICES", 3), range(40))) == [{"answer": 3}] * 40
            shop.execute(remove)
            shop.execute(add)


def test_a_node_that_leaves_ends_the_wait(prices: Node):
    asking = threading.Event()

    @prices.on_rpc
    def note(message: Message) -> None:
        asking.set()

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call, "PRICES", "silence", timeout=LONG)
        assert asking.wait(60)
        prices.stop()
        prices.close()
        with pytest.raises(CalleeGone):
            waiting.result(60)
    with pytest.raises(exceptions.NotConnected):
        call("PRICES", 1)


FORKING = """
import os, sys
import django
django.setup()
from datetime import timedelta
from psqlmessages.django import call
call.__kwdefaults__["timeout"] = timedelta(minutes=1)
parent = call("PRICES", "who")
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, call("PRICES", "who").encode())
    sys.exit(0)
os.waitpid(pid, 0)
child = os.read(read, 1000).decode()
assert call("PRICES", "who") == parent
print(parent.rpartition("-")[0] == f"shop.{os.getpid()}", child.startswith(f"shop.{pid}-"))
"""


@pytest.mark.usefixtures("prices")
def test_a_forked_process_calls_on_a_session_of_its_own_and_both_leave_at_their_end(shop: World):
    quiet = ("-W", "ignore::DeprecationWarning")
    done = run_python(*quiet, "-c", FORKING, env=environment(shop.server))
    assert (done.stdout, done.stderr, done.returncode) == ("True True\n", "", 0)
    assert shop.owner.query(SESSIONS) == 0
