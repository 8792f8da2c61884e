"""What the monitor remembers, and how much at most: no database, no clock of its own."""

from typing import Any

import pytest

from psqlmessages.models.names import is_name, patterns
from psqlmessages.monitor import history as module
from psqlmessages.monitor.frames import BODY_BYTES, heard, row, topic_changes, whole_topic
from psqlmessages.monitor.history import EVENTS, TAIL, History
from psqlmessages.monitor.names import new_ident
from psqlmessages.monitor.pacing import FRAMES, PATIENCE_SECONDS, Window
from psqlmessages.monitor.seconds import KEPT, Amount, Seconds
from psqlmessages.monitor.standing import Standing

NOW = 1_800_000_000


def message(topic: str = "T", size: int = 5, **fields: Any) -> dict[str, Any]:
    return {"Type": "Topic", "To": topic, "From": "N", "Size": size, "Id": 1, **fields}


# Seconds


def test_each_second_has_its_messages_and_bytes() -> None:
    seconds = Seconds(NOW)
    for second, size in ((NOW, 10), (NOW, 20), (NOW + 2, 5)):
        seconds.add(second, size)
    assert seconds.each(NOW - 1, NOW + 3) == [(0, 0), (2, 30), (0, 0), (1, 5), (0, 0)]
    assert seconds.between(NOW, NOW + 2) == Amount(3, 35)


def test_what_is_older_than_ten_minutes_is_forgotten() -> None:
    seconds = Seconds(NOW)
    seconds.add(NOW, 1)
    seconds.add(NOW + KEPT - 1, 1)
    assert seconds.between(NOW, NOW + KEPT).count == 2
    seconds.add(NOW + KEPT, 1)
    assert seconds.between(NOW - KEPT, NOW + KEPT).count == 2
    seconds.add(NOW + 5 * KEPT, 1)
    assert seconds.between(NOW, NOW + 5 * KEPT).count == 1


def test_steps_add_up_their_seconds() -> None:
    seconds = Seconds(NOW)
    for second in range(NOW, NOW + KEPT + 7):
        seconds.add(second, 1)
    newest = NOW + KEPT + 6
    assert seconds.sums(newest - 24, 10, 3) == [10, 10, 5]
    assert seconds.sums(newest - KEPT - 4, 10, 2) == [5, 10]
    assert seconds.sums(newest - 3 * KEPT, 10, 2) == [0, 0]


def test_a_clock_that_is_put_back_loses_no_message() -> None:
    seconds = Seconds(NOW)
    seconds.add(NOW - 100, 1)
    assert seconds.between(NOW, NOW) == Amount(1, 1)


# Messages


def test_messages_are_counted_by_topic() -> None:
    history = History()
    for _ in range(100):
        history.message(message("A", 7), "seven b", NOW + 0.5)
    history.message(message("B"), "hello", NOW)
    assert (history.topics["A"].count, history.topics["A"].size) == (100, 700)
    shown = row(history.topics["A"], NOW + 1, 2)
    assert (shown["count"], shown["rate"], shown["size_rate"]) == (100, 20.0, 140.0)
    assert shown["buckets"] == [NOW // 10 - 1, 0, 100]


def test_the_rate_falls_to_zero_after_the_last_message() -> None:
    history = History()
    history.message(message(), "x", NOW)
    assert row(history.topics["T"], NOW + 5, 2)["rate"] == 0.2
    assert row(history.topics["T"], NOW + 6, 2)["rate"] == 0


def test_the_tail_holds_the_last_messages_only() -> None:
    history = History()
    for number in range(TAIL + 10):
        history.message(message(), str(number), NOW)
    assert [m.body for m in history.topics["T"].tail] == [str(n) for n in range(10, TAIL + 10)]


def test_a_body_is_cut_to_what_may_be_shown() -> None:
    history = History()
    history.message(message(size=12_288), "€" * 4097, NOW)
    shown = heard(history.topics["T"].tail[0], with_body=True)
    assert shown["body"] == "€" * (BODY_BYTES // 3)
    assert shown["is_cut"]


def test_bodies_of_all_topics_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODIES_CHARACTERS", 1000)
    history = History()
    for topic in "ABC":
        for _ in range(4):
            history.message(message(topic), "x" * 100, NOW)
    kept = {name: [m.body is not None for m in t.tail] for name, t in history.topics.items()}
    assert kept == {"A": [False, False, True, True], "B": [True] * 4, "C": [True] * 4}


def test_kept_bodies_are_a_size_alone() -> None:
    history = History()
    history.message(message(size=9_000), None, NOW)
    shown = heard(history.topics["T"].tail[0], with_body=True)
    assert (shown["is_kept"], shown["size"], "body" in shown) == (True, 9000, False)


def test_without_the_permission_a_message_is_shown_without_its_body() -> None:
    history = History()
    history.message(message(), "secret", NOW)
    whole = whole_topic(history.topics["T"], NOW, with_bodies=False)
    changes = topic_changes(history.topics["T"], 0, range(NOW, NOW), NOW, with_bodies=False)
    assert "secret" not in str(whole) + str(changes)


def test_the_token_of_a_message_is_never_shown() -> None:
    history = History()
    history.message(message(Token="1.abc 5 mine", Dkey="60.4.1.2"), "x", NOW)
    shown = heard(history.topics["T"].tail[0], with_body=True)
    assert shown["wants_answer"]
    assert "abc" not in str(shown)
    assert "60.4" not in str(shown)


# Topics


def test_the_busiest_topics_stay_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOPICS", 10)
    monkeypatch.setattr(module, "_LEAVING", 3)
    history = History()
    history.watched = frozenset({"quiet"})
    history.place([("quiet", [], [])], 0)
    for number in range(9):
        for _ in range(number + 1):
            history.message(message(f"T{number}"), "x", NOW)
    history.message(message("new"), "x", NOW)
    assert sorted(history.topics) == ["T3", "T4", "T5", "T6", "T7", "T8", "new", "quiet"]
    assert sorted(history.take_changes()[1]) == ["T0", "T1", "T2"]


def test_topics_that_the_database_does_not_name_are_gone() -> None:
    history = History()
    history.place([("A", ["N"], []), ("B", [], ["L"])], history.number)
    history.take_changes()
    history.place([("B", [], ["L"])], history.number)
    changed, gone = history.take_changes()
    assert ([topic.name for topic in changed], gone) == ([], ["A"])


def test_a_topic_that_was_made_while_the_database_was_asked_stays() -> None:
    history = History()
    before = history.number
    history.message(message("NEW"), "x", NOW)
    history.place([], before)
    assert history.topics["NEW"].count == 1
    history.place([], history.number)
    assert not history.topics


def test_events_change_who_sends_and_listens() -> None:
    history = History()
    for event in ("topic_listen L T", "topic_notify N T", "topic_listen K T", "topic_unlisten L T"):
        history.event(*event.split(), NOW)
    assert (history.topics["T"].notifiers, history.topics["T"].listeners) == ({"N"}, {"K"})
    history.event("topic_none_listen", "", "T", NOW)
    assert history.topics["T"].listeners == set()


def test_events_are_bounded() -> None:
    history = History()
    for number in range(EVENTS + 5):
        history.event("connect", f"N{number}", "", NOW)
    assert [event.ident for event in history.events] == [f"N{n}" for n in range(5, EVENTS + 5)]


# Standing


def test_the_monitor_is_live_from_the_moment_it_observes() -> None:
    standing = Standing()
    assert standing.as_json(NOW)["is"] == "starting"
    standing.observes(NOW)
    assert standing.as_json(NOW + 1) == {
        "is": "live", "since": NOW, "why": "", "missing_role": None, "gaps": [],
    }  # fmt: skip


def test_what_was_not_heard_is_a_gap() -> None:
    standing = Standing()
    standing.observes(NOW)
    standing.lost(NOW + 10)
    assert standing.as_json(NOW + 11)["is"] == "away"
    assert standing.as_json(NOW + 11)["gaps"] == [(NOW + 10, None)]
    standing.returned(NOW + 20)
    assert standing.as_json(NOW + 21)["is"] == "live"
    assert standing.as_json(NOW + 21)["gaps"] == [(NOW + 10, NOW + 20)]
    assert standing.as_json(NOW + 21 + KEPT)["gaps"] == []


def test_a_missing_rule_is_told_with_its_role() -> None:
    standing = Standing()
    standing.refused(NOW, "app", "cannot use Topic to *")
    state = standing.as_json(NOW)
    assert (state["is"], state["missing_role"]) == ("not_observing", "app")


def test_a_database_that_answers_no_questions_is_away() -> None:
    standing = Standing()
    standing.observes(NOW)
    standing.unread(NOW + 1)
    assert standing.name(NOW + 5) == "live"
    assert standing.name(NOW + 7) == "away"
    standing.read()
    assert standing.name(NOW + 8) == "live"


# Pacing


def test_no_more_frames_travel_than_were_agreed() -> None:
    window = Window()
    numbers = [window.number(n) for n in range(FRAMES)]
    assert window.is_full
    window.echoed(numbers[2], 10.0)
    assert not window.is_full
    assert window.lag == 8.0


def test_only_who_read_a_frame_can_echo_it() -> None:
    window = Window()
    numbers = [window.number(0) for _ in range(FRAMES)]
    for guess in (0, 1, numbers[0] + 1):
        window.echoed(guess, 1.0)
    assert window.is_full
    assert window.lag is None


def test_a_viewer_that_reads_nothing_is_overdue() -> None:
    window = Window()
    for n in range(FRAMES):
        assert not window.is_overdue(n + 2 * PATIENCE_SECONDS)
        window.number(n)
    assert not window.is_overdue(PATIENCE_SECONDS)
    assert window.is_overdue(PATIENCE_SECONDS + 0.1)


# Names


def test_the_patterns_of_a_name_are_all_that_mean_it() -> None:
    assert patterns("AB") == ["AB", "*", "A*", "AB*"]


@pytest.mark.parametrize("name", ["", "x" * 101, "a\0b", "\ud800"])
def test_what_postgresql_cannot_hold_is_no_name(name: str) -> None:
    assert not is_name(name)


def test_the_longest_node_leaves_room_for_the_monitors_name(settings: Any) -> None:
    settings.PSQLMESSAGES = {"NODE": "n" * 70}
    assert len(new_ident()) <= 100
    assert is_name(new_ident())
