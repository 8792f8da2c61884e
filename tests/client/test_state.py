"""The state of a node, without a database: arrivals, reconnects, probes, handlers."""

import json
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages import exceptions as errors
from psqlmessages.client import calls
from psqlmessages.client.calls import BackendInfo
from psqlmessages.client.handlers import NodeHandlers
from psqlmessages.client.messages import Message, Notification, fetch_text
from psqlmessages.client.node_state import NodeState
from psqlmessages.client.options import Options, complete_conninfo
from psqlmessages.retry import Backoff

OURS = "channel_of_ours"


def new_listening(**options: Any) -> NodeState:
    listening = NodeState("NODE1", Options(**options))
    listening.channel = OURS
    listening.on_connected(100.0)
    return listening


def payload(text: str | None = None, **header: Any) -> str:
    line = json.dumps(header)
    return line if text is None else f"{line}\n{text}"


@given(
    st.text()
    | st.dictionaries(
        st.sampled_from(["Type", "From", "To", "Token", "Evt", "Ident", "Err", "Id", "Dkey"]),
        st.sampled_from(["Topic", "Rpc", "Return", "Sys", "Probe", "0", "7", ""])
        | st.integers() | st.none() | st.lists(st.none()),
    ).map(json.dumps)
)  # fmt: skip
def test_no_notification_whatsoever_raises(raw: str):
    listening = new_listening()
    listening.feed(OURS, raw)
    arrival = listening.take()
    if arrival is not None and not arrival.is_large:
        listening.create_message(arrival, arrival.text, Mock())


def test_a_body_beside_the_key_of_a_kept_one_is_not_believed():
    """A role that knows the channel can forge both, but cannot write to the table of bodies."""
    header = {"Type": "Topic", "From": "A", "To": "T", "Size": 9_000, "Dkey": "1"}
    script = fetch_text(Notification(header, "forged", "payload 1"), ())
    assert next(script) == calls.get_data("payload 1")


def test_an_earlier_connection_that_the_server_holds_alive_is_ended():
    listening = new_listening()
    listening.backend = BackendInfo(7, "then")
    listening.on_connection_lost("gone", 200.0)
    script = listening.restore_calls()
    next(script)
    assert script.throw(errors.IdentTaken("pid 7")) == calls.end_backend(BackendInfo(7, "then"))
    with pytest.raises(errors.IdentTaken):
        script.send(True)
    # The next attempt may have to end it again.
    assert listening.backend == BackendInfo(7, "then")


def test_after_the_first_echo_a_connection_is_probed_by_a_query():
    listening = new_listening(evaluate_interval=timedelta(hours=1))
    (by_notify,) = listening.due_calls(115.0)
    assert "pg_notify" in by_notify.sql
    listening.feed(OURS, by_notify.params[1])
    (by_query,) = listening.due_calls(130.0)
    assert "pg_listening_channels" in by_query.sql
    by_query.read(True)
    with pytest.raises(errors.ConnectionLost):
        by_query.read(False)
    listening.on_connected(200.0)
    assert "pg_notify" in listening.due_calls(215.0)[0].sql


@given(st.floats(0, 1), st.integers(1, 2000))
def test_delays_grow_to_a_limit_with_jitter(jitter: float, attempts: int):
    backoff = Backoff(timedelta(seconds=1), timedelta(seconds=30), jitter=lambda: jitter)
    for attempt in range(attempts):
        ceiling = min(30, 2.0 ** min(attempt, 100))
        delay = backoff.record_failure(now=1000.0)
        assert ceiling / 2 <= delay <= ceiling
        assert backoff.next_at == 1000.0 + delay


def test_a_connection_that_breaks_at_once_does_not_shorten_the_delays():
    listening = new_listening(backoff_min=timedelta(seconds=1))
    for now in (101.0, 102.0, 103.0):
        listening.on_connection_lost("flapping", now)
        listening.on_connected(now + 0.1)
    assert listening.backoff.failures == 3
    listening.on_connection_lost("after a while", 200.0)
    assert listening.backoff.failures == 1


def test_handlers_are_chosen_by_type_topic_and_event():
    handlers, called = NodeHandlers(), []
    handlers.on_topic("A")(lambda m: called.append("exact"))
    handlers.on_topic("A*")(lambda m: called.append("pattern"))
    handlers.on_rpc(lambda m: called.append("rpc"))
    handlers.on_event(lambda m: called.append("any event"))
    handlers.on_event("crash", "disconnect")(lambda m: called.append("crash"))
    topical = [Message("Topic", topic=topic) for topic in ("A", "AB", "B")]
    events = [Message("Sys", event=event) for event in ("connect", "crash")]
    for message in (*topical, Message("Rpc"), *events, Message("Return")):
        for handler in handlers.matching(message):
            handler(message)
    assert called == ["exact", "pattern", "pattern", "rpc", "any event", "any event", "crash"]
    assert handlers.topics_to_listen() == ["A"]
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        Options(concurrency=0)


def test_options_of_a_connection_string_stay():
    assert "connect_timeout=5" in complete_conninfo("dbname=app", "N")
    completed = complete_conninfo("dbname=app connect_timeout=1 application_name=mine", "N")
    assert "connect_timeout=1" in completed
    assert "application_name=mine" in completed
    assert "client_encoding=UTF8" in complete_conninfo("client_encoding=LATIN1", "N")
