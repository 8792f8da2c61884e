"""The runner goes on: after a connection that was lost, and after handlers that give up."""

import asyncio
from datetime import timedelta

import psycopg
import pytest
from asgiref.sync import sync_to_async

from psqlmessages import Message, Node, Options
from psqlmessages.client.calls import Call
from psqlmessages.handlers import Registry
from tests.django.test_runner import (
    Seen,
    _short_delays,
    registry,
    running_worker,
    seen,
    sender,
)
from tests.django.waiting import answer_to, wait_until
from tests.sql.conftest import Program, World

__all__ = ["_short_delays", "registry", "seen", "sender"]


def test_a_right_that_was_lost_while_the_node_was_away_is_used_again(
    sender: Program, registry: Registry, seen: Seen, shop: World
) -> None:
    @registry.on_topic("ORDERS")
    def handle(message: Message) -> None:
        seen.add(message.body)

    away = timedelta(seconds=2)
    with running_worker(registry, options=Options(backoff_least=away, backoff_most=away)) as runner:
        end_backends(shop, "psqlmessages worker")
        shop.owner.query("UPDATE messages.auth SET mode = 'W' WHERE ident = 'worker*' RETURNING 1")
        wait_until(lambda: runner._node.counters.reconnects)
        assert sender.call("topic_send", "ORDERS", "unheard")["Err"] == "10"
        shop.owner.query("UPDATE messages.auth SET mode = 'RW' WHERE ident = 'worker*' RETURNING 1")
        wait_until(lambda: sender.call("topic_send", "ORDERS", "heard")["Err"] == "0")
        assert set(seen.wait_for(1)) == {"heard"}


def test_a_handler_that_awaits_what_was_cancelled_is_tried_again(
    sender: Program, registry: Registry, seen: Seen
) -> None:
    @registry.on_topic("ORDERS", tries=2)
    async def handle(message: Message) -> None:
        await sync_to_async(seen.add)(message.body)
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    with running_worker(registry) as runner:
        sender.ok("topic_send", "ORDERS", "one")
        assert seen.wait_for(2) == ["one", "one"]
        wait_until(lambda: runner.tally.given_up)
        sender.ok("topic_send", "ORDERS", "two")
        assert seen.wait_for(3)[2] == "two"


def test_who_asked_is_told_of_an_answer_that_the_server_aborts(
    sender: Program, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(node: Node, message: Message, body: object) -> None:
        node._link.run(Call("SELECT set_config('lock_timeout', %s, false)", ("junk",), str))

    monkeypatch.setattr(Node, "reply", reply)
    registry.on_rpc(lambda _: "answer")
    with running_worker(registry) as runner:
        sender.ok("rpc", "worker", "ticket", "x")
        header = answer_to(sender)
    assert (header["Err"], header["Body"]) == ("56", "the answer could not be sent")
    assert runner.tally.unanswered == 1


def end_backends(shop: World, name: str) -> None:
    with psycopg.connect(shop.server.superuser_url, autocommit=True) as superuser:
        superuser.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            " WHERE application_name = %s",
            (name,),
        )
