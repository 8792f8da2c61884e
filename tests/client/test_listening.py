"""The state of a node, without a database: what came, who waits, what is registered and due."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.client import calls
from psqlmessages.client.calls import Opened
from psqlmessages.client.listening import Arrival, Listening
from psqlmessages.client.messages import Message
from psqlmessages.client.options import Options
from psqlmessages.exceptions import (
    CalleeGone,
    CallFailed,
    ConnectionLost,
    IdentTaken,
    MessagesError,
    NodeClosed,
    NotAuthorized,
    NotConnected,
    TopicNotExistent,
)

OURS = "channel_of_ours"


def new_listening(**options: Any) -> Listening:
    listening = Listening("NODE1", Options(**options))
    listening.channel = OURS
    listening.opened(100.0)
    return listening


def payload(text: str | None = None, **header: Any) -> str:
    line = json.dumps(header)
    return line if text is None else f"{line}\n{text}"


class Answers:
    """Stands for the node that answers."""

    def __init__(self) -> None:
        self.given: list[tuple[str, object]] = []

    def reply(self, message: Message, body: Any) -> None:
        self.given.append(("reply", body))

    def reply_error(self, message: Message, reason: str) -> None:
        self.given.append(("error", reason))


no_reply = Answers()


def ignore() -> None:
    pass


def message_of(listening: Listening) -> Message | None:
    arrival = listening.take()
    assert arrival is not None
    return listening.message(arrival, arrival.text, no_reply)


class TestWhatCame:
    def test_a_topic_message(self) -> None:
        listening = new_listening()
        listening.feed(
            OURS, payload('{"a":1}', Type="Topic", From="B", To="T", Size=7, Id=5, Enc="json")
        )
        message = message_of(listening)
        assert message is not None
        assert (message.type, message.sender, message.to) == ("Topic", "B", "T")
        assert (message.topic, message.size, message.id) == ("T", 7, 5)
        assert message.body == {"a": 1}
        assert not message.wants_answer

    def test_a_system_event(self) -> None:
        listening = new_listening()
        listening.feed(OURS, payload(Type="Sys", Evt="topic_listen", Ident="B", Topic="T", Id=1))
        message = message_of(listening)
        assert message is not None
        assert (message.event, message.ident, message.topic) == ("topic_listen", "B", "T")
        assert message.sender == ""
        assert message.body is None

    def test_a_kept_body_is_left_to_be_fetched(self) -> None:
        listening = new_listening()
        raw = payload(Type="Topic", From="B", To="T", Size=9000, Dkey="60.1")
        listening.feed(OURS, raw)
        arrival = listening.take()
        assert arrival is not None
        assert arrival.is_kept
        assert arrival.payload == raw

    def test_a_body_that_could_not_be_fetched_raises_why_when_it_is_read(self) -> None:
        listening = new_listening()
        listening.feed(OURS, payload(Type="Topic", From="B", To="T", Size=9000, Dkey="60.1"))
        arrival = listening.take()
        assert arrival is not None
        message = listening.without_body(arrival, MessagesError("over"), no_reply)
        assert message is not None
        with pytest.raises(MessagesError, match="over"):
            _ = message.body
        assert listening.counters.lost_bodies == 1

    @pytest.mark.parametrize(
        "raw",
        [
            "",
            "not json",
            "[]",
            payload(),
            payload(Type=1),
            payload(Type=[]),
            payload(Type="Unknown"),
            payload("x", Type="Topic", From="B"),
            payload("x", Type="Topic", From="B", To=7),
            payload("x", Type="Topic", From="B", To="T", Size="7"),
            payload("x", Type="Topic", From="B", To="T", Id=True),
            payload("x", Type="Topic", From="B", To="T", Token=None),
            payload("x", Type="Return", From="B", To="T", Err="x"),
            payload(Type="Sys"),
            payload(Type="Sys", Evt="reconnected"),
            payload(Type="Probe", Nonce="guessed"),
        ],
    )
    def test_a_malformed_or_forged_notification_is_dropped_and_counted(self, raw: str) -> None:
        listening = new_listening()
        listening.feed(OURS, raw)
        assert listening.take() is None
        assert listening.counters.malformed == 1

    def test_a_malformed_body_is_dropped_and_counted(self) -> None:
        listening = new_listening()
        listening.feed(OURS, payload("{", Type="Topic", From="B", To="T", Enc="json"))
        assert message_of(listening) is None
        assert listening.counters.malformed == 1

    def test_what_comes_on_another_channel_is_not_for_us(self) -> None:
        listening = new_listening()
        listening.feed("other", payload("x", Type="Topic", From="B", To="T"))
        assert listening.take() is None
        assert listening.counters.foreign == 1

    @given(
        st.text()
        | st.dictionaries(
            st.sampled_from(["Type", "From", "To", "Token", "Evt", "Ident", "Err", "Id", "Dkey"]),
            st.sampled_from(["Topic", "Rpc", "Return", "Sys", "Probe", "0", "7", ""])
            | st.integers()
            | st.none()
            | st.lists(st.none()),
        ).map(json.dumps)
    )
    def test_no_notification_whatsoever_raises(self, raw: str) -> None:
        listening = new_listening()
        listening.feed(OURS, raw)
        arrival = listening.take()
        if arrival is not None and not arrival.is_kept:
            listening.message(arrival, arrival.text, no_reply)


class TestQuestions:
    def test_an_answer_goes_to_who_asked_and_to_nobody_else(self) -> None:
        listening = new_listening()
        with listening.asking("B", ignore) as first, listening.asking("B", ignore) as second:
            listening.feed(OURS, payload("a", Type="Return", From="B", To="A", Token=second.token))
            assert not first.answers
            arrival = second.answers.popleft()
        assert isinstance(arrival, Arrival)
        assert listening.answer(arrival, arrival.text, no_reply).body == "a"
        assert listening.take() is None

    def test_an_answer_after_the_end_of_the_wait_is_counted_and_dropped(self) -> None:
        listening = new_listening()
        with listening.asking("B", ignore) as pending:
            pass
        listening.feed(OURS, payload("a", Type="Return", From="B", To="A", Token=pending.token))
        assert listening.take() is None
        assert listening.counters.late_answers == 1

    def test_an_answer_to_a_token_of_the_caller_s_own_is_a_message(self) -> None:
        listening = new_listening()
        listening.feed(OURS, payload("a", Type="Return", From="B", To="A", Token="my own"))
        message = message_of(listening)
        assert message is not None
        assert (message.type, message.token, message.body) == ("Return", "my own", "a")
        assert not message.wants_answer

    def test_an_answer_that_carries_an_error_raises_it(self) -> None:
        listening = new_listening()
        with listening.asking("B", ignore) as pending:
            listening.feed(
                OURS,
                payload(Type="Return", From="B", To="A", Token=pending.token, Err="17", Errstr="x"),
            )
        arrival = pending.answers.popleft()
        assert isinstance(arrival, Arrival)
        with pytest.raises(NotConnected):
            listening.answer(arrival, arrival.text, no_reply)
        failed = Arrival({"Type": "Return", "Err": "56", "Errstr": "it failed"}, "the reason", "")
        with pytest.raises(CallFailed, match="the reason"):
            listening.answer(failed, failed.text, no_reply)

    @pytest.mark.parametrize("event", ["crash", "disconnect"])
    def test_the_end_of_the_node_asked_ends_the_wait(self, event: str) -> None:
        listening = new_listening()
        with listening.asking("B", ignore) as asked, listening.asking("C", ignore) as other:
            asked.was_put()
            other.was_put()
            listening.feed(OURS, payload(Type="Sys", Evt=event, Ident="B"))
            assert isinstance(asked.answers.popleft(), CalleeGone)
            assert not other.answers

    def test_a_lost_connection_and_a_stop_end_every_wait(self) -> None:
        listening = new_listening()
        with listening.asking("B", ignore) as pending:
            pending.was_put()
            listening.lost("gone", 200.0)
            assert isinstance(pending.answers.popleft(), ConnectionLost)
            listening.stopped()
            assert isinstance(pending.answers.popleft(), NodeClosed)

    def test_a_question_that_was_not_put_yet_goes_over_the_next_connection(self) -> None:
        listening = new_listening()
        with listening.asking("B", ignore) as pending, listening.asking("", ignore) as of_all:
            listening.lost("gone", 200.0)
            listening.opened(201.0)
            for each in (pending, of_all):
                each.was_put()
                assert not each.answers
            listening.lost("again", 202.0)
            for each in (pending, of_all):
                assert isinstance(each.answers.popleft(), ConnectionLost)


class TestOpening:
    def test_the_first_connection_registers_the_node(self) -> None:
        listening = Listening("NODE1", Options())
        script = listening.opening()
        assert next(script) == calls.opened_as("NODE1", synchronous_commit=False)
        with pytest.raises(StopIteration):
            script.send((Opened(7, "now"), OURS))
        assert (listening.channel, listening.backend) == (OURS, Opened(7, "now"))

    def test_a_connection_without_nodes_is_opened_all_the_same(self) -> None:
        listening = new_listening()
        listening.ran(calls.deinit("NODE1"))
        script = listening.opening()
        assert next(script) == calls.opened(synchronous_commit=False)
        with pytest.raises(StopIteration):
            script.send(Opened(8, "now"))
        assert listening.backend == Opened(8, "now")

    def test_a_further_connection_registers_all_again_and_tells(self) -> None:
        listening = new_listening()
        for call in (
            calls.topic_listen("T"),
            calls.topic_notify("T"),
            calls.topic_listen("U"),
            calls.topic_unlisten("U"),
            calls.init("NODE9"),
            calls.topic_observe("*"),
            calls.use("NODE1"),
        ):
            listening.ran(call)
        listening.lost("gone", 200.0)
        assert run_script(listening) == [
            "init NODE1",
            "topic_listen T",
            "topic_notify T",
            "init NODE9",
            "topic_observe *",
            "use NODE1",
        ]
        listening.opened(207.5)
        message = message_of(listening)
        assert message is not None
        assert (message.type, message.event) == ("Sys", "reconnected")
        assert message.away == timedelta(seconds=7.5)
        assert listening.counters.reconnects == 1

    def test_a_topic_that_is_no_longer_allowed_is_dropped_and_the_others_stay(self) -> None:
        listening = new_listening()
        listening.ran(calls.topic_listen("T"))
        listening.ran(calls.topic_listen("U"))
        listening.lost("gone", 200.0)
        ran = run_script(listening, {"topic_listen T": TopicNotExistent("T")})
        assert ran == ["init NODE1", "topic_listen T", "topic_listen U"]
        assert listening.registration.topics("topic_listen") == {"U"}

    def test_a_connection_that_breaks_meanwhile_drops_nothing(self) -> None:
        listening = new_listening()
        listening.ran(calls.topic_listen("T"))
        listening.lost("gone", 200.0)
        with pytest.raises(ConnectionLost):
            run_script(listening, {"topic_listen T": ConnectionLost("again")})
        assert listening.registration.topics("topic_listen") == {"T"}

    def test_a_further_ident_that_is_no_longer_allowed_is_dropped(self) -> None:
        listening = new_listening()
        listening.ran(calls.init("NODE9"))
        listening.lost("gone", 200.0)
        ran = run_script(listening, {"init NODE9": NotAuthorized("no")})
        assert ran == ["init NODE1", "init NODE9"]
        assert listening.registration.idents == ("NODE1",)

    def test_the_node_s_own_ident_is_never_given_up(self) -> None:
        listening = new_listening()
        listening.lost("gone", 200.0)
        with pytest.raises(NotAuthorized):
            run_script(listening, {"init NODE1": NotAuthorized("no")})
        assert listening.registration.idents == ("NODE1",)

    def test_an_earlier_connection_that_the_server_holds_alive_is_ended(self) -> None:
        listening = new_listening()
        listening.backend = Opened(7, "then")
        listening.lost("gone", 200.0)
        script = listening.opening()
        next(script)
        ending = script.throw(IdentTaken("pid 7"))
        assert ending == calls.end_backend(Opened(7, "then"))
        with pytest.raises(IdentTaken):
            script.send(True)
        # The next attempt may have to end it again.
        assert listening.backend == Opened(7, "then")


def run_script(listening: Listening, refused: dict[str, MessagesError] | None = None) -> list[str]:
    """Run the calls of a new connection; return those that register something."""
    script, ran = listening.opening(), []
    answer: Any = None
    try:
        while True:
            call = script.send(answer)
            while True:
                assert call.registers is not None
                ran.append(" ".join(call.registers))
                error = (refused or {}).get(ran[-1])
                if error is None:
                    break
                call = script.throw(error)
            answer = OURS if ran != ["init NODE1"] else (Opened(8, "now"), OURS)
    except StopIteration:
        return ran
