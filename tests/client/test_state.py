"""The state of a node, without a database: what came, who waits, what is registered and due."""

import json
import logging
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages import exceptions as errors
from psqlmessages.client import calls
from psqlmessages.client.calls import BackendInfo
from psqlmessages.client.handlers import TopicHandlers, wants_reply
from psqlmessages.client.messages import Message, Notification, PendingCall
from psqlmessages.client.node_state import NodeState, text_of
from psqlmessages.client.options import Options, conninfo
from psqlmessages.client.registration import Registration
from psqlmessages.client.transactions import drive
from psqlmessages.retry import Backoff, RateLimitedLogger

OURS = "channel_of_ours"


def new_listening(**options: Any) -> NodeState:
    listening = NodeState("NODE1", Options(**options))
    listening.channel = OURS
    listening.on_connected(100.0)
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


def message_of(listening: NodeState) -> Message | None:
    arrival = listening.take()
    assert arrival is not None
    return listening.message(arrival, arrival.text, no_reply)


MALFORMED = (
    "", "not json", "[]",
    payload(), payload(Type=1), payload(Type=[]), payload(Type="Unknown"),
    payload("x", Type="Topic", From="B"),
    payload("x", Type="Topic", From="B", To=7),
    payload("x", Type="Topic", From="B", To="T", Size="7"),
    payload("x", Type="Topic", From="B", To="T", Id=True),
    payload("x", Type="Topic", From="B", To="T", Token=None),
    payload("x", Type="Return", From="B", To="T", Err="x"),
    payload(Type="Sys"), payload(Type="Sys", Evt="reconnected"),
    payload(Type="Probe", Nonce="guessed"),
)  # fmt: skip


def test_what_is_malformed_forged_or_of_another_channel_is_dropped_and_counted() -> None:
    listening = new_listening()
    for raw in MALFORMED:
        listening.feed(OURS, raw)
        assert listening.take() is None, raw
    assert listening.counters.malformed == len(MALFORMED)
    listening.feed(OURS, payload("{", Type="Topic", From="B", To="T", Enc="json"))
    assert message_of(listening) is None
    assert listening.counters.malformed == len(MALFORMED) + 1
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
def test_no_notification_whatsoever_raises(raw: str) -> None:
    listening = new_listening()
    listening.feed(OURS, raw)
    arrival = listening.take()
    if arrival is not None and not arrival.is_kept:
        listening.message(arrival, arrival.text, no_reply)


def test_a_body_beside_the_key_of_a_kept_one_is_not_believed() -> None:
    """Whoever knows the channel can write both, but not into the table of bodies."""
    header = {"Type": "Topic", "From": "A", "To": "T", "Size": 9_000, "Dkey": "1"}
    script = text_of(Notification(header, "forged", "payload 1"), new_listening())
    assert next(script) == calls.get_data("payload 1")


def next_answer(listening: NodeState, pending: PendingCall) -> Message:
    return drive(listening.next_answer(pending, no_reply), bool)


def answer_of(token: str, **more: str) -> str:
    return payload("a", Type="Return", From="B", To="A", Token=token, **more)


def test_an_answer_goes_to_who_asked_and_to_nobody_else() -> None:
    listening = new_listening()
    with listening.asking("B", bool) as first, listening.asking("B", bool) as second:
        listening.feed(OURS, answer_of(second.token))
        assert not first.answers
    assert next_answer(listening, second).body == "a"
    assert listening.take() is None
    # After the end of the wait it is counted and dropped.
    listening.feed(OURS, answer_of(first.token))
    assert listening.take() is None
    assert listening.counters.late_answers == 1
    listening.feed(OURS, answer_of("my own"))
    own = message_of(listening)
    assert own is not None
    assert (own.type, own.token, own.body, own.wants_answer) == ("Return", "my own", "a", False)
    with listening.asking("B", bool) as pending:
        listening.feed(OURS, answer_of(pending.token, Err="17", Errstr="x"))
    with pytest.raises(errors.NotConnected):
        next_answer(listening, pending)
    failed = Notification({"Type": "Return", "Err": "56", "Errstr": "it failed"}, "the reason", "")
    pending.answers.append(failed)
    with pytest.raises(errors.CallFailed, match="the reason"):
        next_answer(listening, pending)


# What is heard of the node asked before the question was put and after, and whether it is over.
HEARD = (
    ("", "", False), ("crash connect", "", False), ("disconnect", "", True),
    ("connect crash", "", True), ("", "crash", True), ("", "disconnect", True),
    ("crash connect", "disconnect connect", True), ("", "connect", False),
)  # fmt: skip


def test_the_end_of_the_node_asked_ends_the_wait_and_no_other() -> None:
    failures = []
    for before, after, is_over in HEARD:
        listening = new_listening()
        with listening.asking("B", bool) as asked, listening.asking("C", bool) as other:
            for event in before.split():
                listening.feed(OURS, payload(Type="Sys", Evt=event, Ident="B"))
            asked.was_sent()
            other.was_sent()
            for event in after.split():
                listening.feed(OURS, payload(Type="Sys", Evt=event, Ident="B"))
            ends = [type(answer) for answer in asked.answers]
            if ends != [errors.CalleeGone] * is_over or other.answers:
                failures.append((before, after, ends, other.answers))
    assert not failures


def test_a_lost_connection_and_a_stop_end_the_waits_of_what_was_asked() -> None:
    listening = new_listening()
    with listening.asking("B", bool) as pending, listening.asking("", bool) as of_all:
        # Not put yet, it goes over the next connection.
        listening.on_connection_lost("gone", 200.0)
        listening.on_connected(201.0)
        for each in (pending, of_all):
            each.was_sent()
            assert not each.answers
        listening.on_connection_lost("again", 202.0)
        listening.on_stopped()
        for each in (pending, of_all):
            assert isinstance(each.answers.popleft(), errors.ConnectionLost)
            assert isinstance(each.answers.popleft(), errors.NodeClosed)


def reconnected(
    listening: NodeState, refused: dict[str, errors.MessagesError] | None = None
) -> list[str]:
    """Run the calls of a new connection; return those that register something."""
    listening.on_connection_lost("gone", 200.0)
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
            answer = OURS if ran != ["init NODE1"] else (BackendInfo(8, "now"), OURS)
    except StopIteration:
        return ran


def listening_to(*made: calls.Call[Any]) -> NodeState:
    listening = new_listening()
    for call in made:
        listening.on_call_succeeded(call)
    return listening


def test_the_first_connection_registers_the_node_and_further_ones_all_again() -> None:
    listening = NodeState("NODE1", Options())
    script = listening.opening()
    assert next(script) == calls.open_as("NODE1", synchronous_commit=False)
    with pytest.raises(StopIteration):
        script.send((BackendInfo(7, "now"), OURS))
    assert (listening.channel, listening.backend) == (OURS, BackendInfo(7, "now"))
    listening = listening_to(
        calls.topic_listen("T"), calls.topic_notify("T"), calls.topic_listen("U"),
        calls.topic_unlisten("U"), calls.init("NODE9"), calls.topic_observe("*"),
        calls.use("NODE1"),
    )  # fmt: skip
    assert reconnected(listening) == [
        "init NODE1", "topic_listen T", "topic_notify T", "init NODE9", "topic_observe *",
        "use NODE1",
    ]  # fmt: skip
    listening.on_connected(207.5)
    message = message_of(listening)
    assert message is not None
    assert (message.event, message.away) == ("reconnected", timedelta(seconds=7.5))
    assert listening.counters.reconnects == 1
    # Without a node it is opened all the same.
    listening = listening_to(calls.deinit("NODE1"))
    assert next(listening.opening()) == calls.backend_info(synchronous_commit=False)


def test_what_is_no_longer_allowed_is_dropped_but_never_the_node_s_own_ident() -> None:
    listening = listening_to(
        calls.topic_listen("T"), calls.topic_listen("U"), calls.init("NODE9"), calls.use("NODE1")
    )
    with pytest.raises(errors.ConnectionLost):
        reconnected(listening, {"topic_listen T": errors.ConnectionLost("again")})
    assert listening.registration.topics("topic_listen") == {"T", "U"}
    reconnected(
        listening,
        {"topic_listen T": errors.TopicNotExistent("T"), "init NODE9": errors.NotAuthorized("no")},
    )
    assert listening.registration.topics("topic_listen") == {"U"}
    assert listening.registration.idents == ("NODE1",)
    with pytest.raises(errors.NotAuthorized):
        reconnected(listening, {"init NODE1": errors.NotAuthorized("no")})
    assert listening.registration.idents == ("NODE1",)


def test_an_earlier_connection_that_the_server_holds_alive_is_ended() -> None:
    listening = new_listening()
    listening.backend = BackendInfo(7, "then")
    listening.on_connection_lost("gone", 200.0)
    script = listening.opening()
    next(script)
    assert script.throw(errors.IdentTaken("pid 7")) == calls.end_backend(BackendInfo(7, "then"))
    with pytest.raises(errors.IdentTaken):
        script.send(True)
    # The next attempt may have to end it again.
    assert listening.backend == BackendInfo(7, "then")


def test_what_an_administrator_ends_is_not_registered_again() -> None:
    registration = Registration("A")
    registration.on_call_succeeded("topic_listen", "T")
    registration.on_call_succeeded("topic_notify", "T")
    for heard, left in (
        (("topic_unlisten", "B", "T"), ({"T"}, {"T"})),
        (("topic_listen", "B", "U"), ({"T"}, {"T"})),
        (("topic_unlisten", "A", "T"), (set(), {"T"})), (("disconnect", "A", ""), (set(), set())),
    ):  # fmt: skip
        registration.on_event(*heard)
        assert (registration.topics("topic_listen"), registration.topics("topic_notify")) == left


def test_the_newest_ident_left_acts_after_a_deinit() -> None:
    registration = Registration("A")
    for call, ident, acting in (
        ("init", "B", "B"), ("init", "C", "C"), ("deinit", "C", "B"), ("use", "A", "A"),
        ("deinit", "B", "A"), ("deinit", "A", ""),
    ):  # fmt: skip
        registration.on_call_succeeded(call, ident)
        assert registration.acting == acting
    registration.on_call_succeeded("topic_listen", "T")
    assert registration.replay() == []


def test_evaluation_is_due_each_second_and_a_probe_is_overdue_unless_something_comes() -> None:
    listening = new_listening()
    pulse = listening.heartbeat
    due = [pulse.evaluation_due(t) for t in (100.5, 101.0, 101.9, 102.0)]
    assert due == [False, True, False, True]
    assert pulse.probe_due(114.0) is None
    probe = pulse.probe_due(115.0)
    assert probe is not None
    assert pulse.probe_due(131.0) is None, "one at a time"
    assert listening.is_healthy(119.0)
    pulse.on_received(119.5)
    assert listening.is_healthy(124.0)
    assert pulse.is_overdue(124.5)
    assert not listening.is_healthy(124.5)
    listening.feed(OURS, probe)
    assert (listening.take(), listening.counters.malformed) == (None, 0)
    assert not pulse.is_overdue(1000.0)


@given(st.floats(0, 1), st.integers(1, 2000))
def test_delays_grow_to_a_limit_with_jitter(chance: float, attempts: int) -> None:
    backoff = Backoff(timedelta(seconds=1), timedelta(seconds=30), chance=lambda: chance)
    for attempt in range(attempts):
        ceiling = min(30, 2.0 ** min(attempt, 100))
        delay = backoff.failed(now=1000.0)
        assert ceiling / 2 <= delay <= ceiling
        assert backoff.next_at == 1000.0 + delay


def test_a_connection_that_breaks_at_once_does_not_shorten_the_delays() -> None:
    listening = new_listening(backoff_least=timedelta(seconds=1))
    for now in (101.0, 102.0, 103.0):
        listening.on_connection_lost("flapping", now)
        listening.on_connected(now + 0.1)
    assert listening.backoff.attempts == 3
    listening.on_connection_lost("after a while", 200.0)
    assert listening.backoff.attempts == 1


def test_the_log_says_the_same_thing_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    log = RateLimitedLogger(
        logging.getLogger("psqlmessages"), timedelta(seconds=10), lambda: clock[0]
    )
    for second in range(25):
        clock[0] = float(second)
        log.warning("%s is away", "NODE1")
    again = "NODE1 is away (and 9 more times since)"
    assert [r.getMessage() for r in caplog.records] == ["NODE1 is away", again, again]


def test_handlers_are_chosen_by_type_topic_and_event() -> None:
    handlers, called = TopicHandlers(), []
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
    with pytest.raises(ValueError, match="no token"):
        Message("Topic").reply("x")


def test_what_a_connection_string_sets_itself_stays() -> None:
    assert "connect_timeout=5" in conninfo("dbname=app", "N")
    completed = conninfo("dbname=app connect_timeout=1 application_name=mine", "N")
    assert "connect_timeout=1" in completed
    assert "application_name=mine" in completed
    assert "client_encoding=UTF8" in conninfo("client_encoding=LATIN1", "N")
