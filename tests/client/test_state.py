"""The parts of a node's state: what is registered, what is due, when to try again, who handles."""

import logging
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.client.backoff import Backoff, QuietLog
from psqlmessages.client.handlers import Handlers, wants_reply
from psqlmessages.client.messages import Message
from psqlmessages.client.options import conninfo
from psqlmessages.client.registration import Registration
from tests.client.test_listening import OURS, Answers, new_listening


class TestRegistration:
    def test_what_an_administrator_ends_is_not_registered_again(self) -> None:
        registration = Registration("A")
        registration.ran("topic_listen", "T")
        registration.ran("topic_notify", "T")
        registration.heard("topic_unlisten", "A", "T")
        registration.heard("topic_unlisten", "B", "T")
        registration.heard("topic_listen", "B", "U")
        assert registration.topics("topic_listen") == frozenset()
        assert registration.topics("topic_notify") == {"T"}
        registration.heard("disconnect", "A", "")
        assert registration.topics("topic_notify") == frozenset()

    def test_the_newest_ident_left_acts_after_a_deinit(self) -> None:
        registration = Registration("A")
        registration.ran("init", "B")
        registration.ran("init", "C")
        registration.ran("deinit", "C")
        assert registration.acting == "B"
        registration.ran("use", "A")
        registration.ran("deinit", "B")
        assert registration.acting == "A"
        registration.ran("deinit", "A")
        assert (registration.acting, registration.idents) == ("", ())
        registration.ran("topic_listen", "T")
        assert registration.replay() == []


class TestPulse:
    def test_evaluation_is_due_each_second(self) -> None:
        pulse = new_listening().pulse
        assert [pulse.evaluation_due(t) for t in (100.5, 101.0, 101.9, 102.0)] == [
            False,
            True,
            False,
            True,
        ]

    def test_a_probe_that_is_not_echoed_is_overdue_unless_something_else_comes(self) -> None:
        listening = new_listening()
        pulse = listening.pulse
        assert pulse.probe_due(114.0) is None
        assert pulse.probe_due(115.0) is not None
        assert pulse.probe_due(131.0) is None, "one at a time"
        assert listening.is_healthy(119.0)
        pulse.heard(119.5)
        assert listening.is_healthy(124.0)
        assert pulse.is_overdue(124.5)
        assert not listening.is_healthy(124.5)

    def test_the_echo_of_a_probe_ends_it_and_is_no_message(self) -> None:
        listening = new_listening()
        probe = listening.pulse.probe_due(115.0)
        assert probe is not None
        listening.feed(OURS, probe)
        assert listening.take() is None
        assert listening.counters.malformed == 0
        assert not listening.pulse.is_overdue(1000.0)

    def test_what_is_due_next(self) -> None:
        pulse = new_listening(evaluate_interval=timedelta(hours=1)).pulse
        assert pulse.next_at() == 115.0
        pulse.probe_due(115.0)
        assert pulse.next_at() == 120.0


class TestBackoff:
    @given(st.floats(0, 1), st.integers(1, 2000))
    def test_delays_grow_to_a_limit_with_jitter(self, chance: float, attempts: int) -> None:
        backoff = Backoff(timedelta(seconds=1), timedelta(seconds=30), chance=lambda: chance)
        for attempt in range(attempts):
            ceiling = min(30, 2.0 ** min(attempt, 100))
            delay = backoff.failed(now=1000.0)
            assert ceiling / 2 <= delay <= ceiling
            assert backoff.next_at == 1000.0 + delay

    def test_a_connection_that_breaks_at_once_does_not_shorten_the_delays(self) -> None:
        listening = new_listening(backoff_least=timedelta(seconds=1))
        for now in (101.0, 102.0, 103.0):
            listening.lost("flapping", now)
            listening.opened(now + 0.1)
        assert listening.backoff.attempts == 3
        listening.lost("after a while", 200.0)
        assert listening.backoff.attempts == 1


def test_the_log_says_the_same_thing_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    log = QuietLog(logging.getLogger("psqlmessages"), timedelta(seconds=10), lambda: clock[0])
    for second in range(25):
        clock[0] = float(second)
        log.warning("%s is away", "NODE1")
    assert [record.getMessage() for record in caplog.records] == [
        "NODE1 is away",
        "NODE1 is away (and 9 times more since)",
        "NODE1 is away (and 9 times more since)",
    ]


def test_handlers_are_chosen_by_type_topic_and_event() -> None:
    handlers, called = Handlers(), []
    handlers.on_topic("A")(lambda m: called.append("exact"))
    handlers.on_topic("A*")(lambda m: called.append("pattern"))
    handlers.on_rpc(lambda m: called.append("rpc"))
    handlers.on_event(lambda m: called.append("any event"))
    handlers.on_event("crash", "disconnect")(lambda m: called.append("crash"))
    for message in (
        Message("Topic", topic="A"),
        Message("Topic", topic="AB"),
        Message("Topic", topic="B"),
        Message("Rpc"),
        Message("Sys", event="connect"),
        Message("Sys", event="crash"),
        Message("Return"),
    ):
        for handler in handlers.matching(message):
            handler(message)
    assert called == ["exact", "pattern", "pattern", "rpc", "any event", "any event", "crash"]
    assert handlers.topics_to_listen() == ["A"]


def test_an_rpc_is_answered_even_with_none_but_only_once() -> None:
    answers = Answers()
    question = Message("Rpc", token="t", replier=answers)
    assert wants_reply(question, None)
    question.reply("by hand")
    assert not wants_reply(question, 1)
    Message("Topic", token="t", replier=answers).reply_error("no")
    assert answers.given == [("reply", "by hand"), ("error", "no")]
    assert not wants_reply(Message("Topic", token="t"), None)
    assert wants_reply(Message("Topic", token="t"), 0)
    assert not wants_reply(Message("Topic"), 1)


def test_a_message_without_a_token_cannot_be_answered() -> None:
    with pytest.raises(ValueError, match="no token"):
        Message("Topic").reply("x")


def test_what_a_connection_string_sets_itself_stays() -> None:
    assert "connect_timeout=5" in conninfo("dbname=app", "N")
    completed = conninfo("dbname=app connect_timeout=1 application_name=mine", "N")
    assert "connect_timeout=1" in completed
    assert "application_name=mine" in completed
    assert "client_encoding=UTF8" in conninfo("client_encoding=LATIN1", "N")
