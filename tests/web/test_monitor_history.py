"""What the monitor remembers, and how much at most: no database, no clock of its own."""

from typing import Any

import pytest

from psqlmessages.models.names import is_name, patterns
from psqlmessages.monitor import history as module
from psqlmessages.monitor.frames import BODY_BYTES, heard, row, topic_changes, whole_topic
from psqlmessages.monitor.history import EVENTS, TAIL, History
from psqlmessages.monitor.names import new_ident
from psqlmessages.monitor.seconds import KEPT, Amount, Seconds
from psqlmessages.monitor.standing import Standing

NOW = 1_800_000_000


def message(topic: str = "T", size: int = 5, **fields: Any) -> dict[str, Any]:
    return {"Type": "Topic", "To": topic, "From": "N", "Size": size, "Id": 1, **fields}


def test_each_second_has_its_messages_and_bytes_for_ten_minutes() -> None:
    seconds = Seconds(NOW)
    for second, size in ((NOW, 10), (NOW, 20), (NOW + 2, 5)):
        seconds.add(second, size)
    assert seconds.each(NOW - 1, NOW + 3) == [(0, 0), (2, 30), (0, 0), (1, 5), (0, 0)]
    assert seconds.between(NOW, NOW + 2) == Amount(3, 35)
    seconds.add(NOW - 100, 1)
    assert seconds.between(NOW, NOW + 2).count == 4, "a clock that is put back loses none"
    for later, count in ((KEPT - 1, 5), (KEPT, 4), (5 * KEPT, 1)):
        seconds.add(NOW + later, 1)
        assert seconds.between(NOW + later - KEPT, NOW + later).count == count


def test_messages_are_counted_by_topic_and_the_rate_falls_to_zero() -> None:
    history = History()
    for _ in range(100):
        history.message(message("A", 7), "seven b", NOW + 0.5)
    history.message(message("B"), "hello", NOW)
    assert (history.topics["A"].count, history.topics["A"].size) == (100, 700)
    shown = row(history.topics["A"], NOW + 1, 2)
    assert (shown["count"], shown["rate"], shown["size_rate"]) == (100, 20.0, 140.0)
    assert shown["buckets"] == [NOW // 10 - 1, 0, 100]
    assert [row(history.topics["B"], NOW + later, 2)["rate"] for later in (5, 6)] == [0.2, 0]


def test_messages_bodies_and_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    for number in range(TAIL + 10):
        history.message(message(), str(number), NOW)
    assert [m.body for m in history.topics["T"].tail] == [str(n) for n in range(10, TAIL + 10)]
    for number in range(EVENTS + 5):
        history.event("connect", f"N{number}", "", NOW)
    assert [event.ident for event in history.events] == [f"N{n}" for n in range(5, EVENTS + 5)]
    monkeypatch.setattr(module, "BODIES_CHARACTERS", 1000)
    history = History()
    for topic in "ABC":
        for _ in range(4):
            history.message(message(topic), "x" * 100, NOW)
    kept = {name: [m.body is not None for m in t.tail] for name, t in history.topics.items()}
    assert kept == {"A": [False, False, True, True], "B": [True] * 4, "C": [True] * 4}


def test_what_is_shown_of_a_message_holds_no_secret_and_not_too_much() -> None:
    history = History()
    history.message(message(size=12_288), "€" * 4097, NOW)
    history.message(message(size=9_000), None, NOW)
    history.message(message(Token="1.abc 5 mine", Dkey="60.4.1.2"), "secret", NOW)
    long, large, asking = (heard(m, with_body=True) for m in history.topics["T"].tail)
    assert (long["body"], long["is_cut"]) == ("€" * (BODY_BYTES // 3), True)
    assert (large["is_kept"], large["size"], "body" in large) == (True, 9000, False)
    assert asking["wants_answer"]
    assert "abc" not in str(asking)
    assert "60.4" not in str(asking)
    whole = whole_topic(history.topics["T"], NOW, with_bodies=False)
    changed = topic_changes(history.topics["T"], 0, range(NOW, NOW), NOW, with_bodies=False)
    assert "secret" not in str(whole) + str(changed)


def test_the_busiest_topics_stay_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_topics_follow_the_database_and_events() -> None:
    history = History()
    history.place([("A", ["N"], []), ("B", [], ["L"])], history.number)
    history.take_changes()
    history.place([("B", [], ["L"])], history.number)
    changed, gone = history.take_changes()
    assert ([topic.name for topic in changed], gone) == ([], ["A"])
    before = history.number
    history.message(message("NEW"), "x", NOW)
    history.place([], before)
    assert list(history.topics) == ["NEW"], "made while the database was asked"
    for event in ("topic_listen L T", "topic_notify N T", "topic_listen K T", "topic_unlisten L T"):
        history.event(*event.split(), NOW)
    assert (history.topics["T"].notifiers, history.topics["T"].listeners) == ({"N"}, {"K"})
    history.event("topic_none_listen", "", "T", NOW)
    assert history.topics["T"].listeners == set()


def test_the_monitor_is_live_from_the_moment_it_observes_and_gaps_are_told() -> None:
    standing = Standing()
    assert standing.as_json(NOW)["is"] == "starting"
    standing.observes(NOW)
    live = {"is": "live", "since": NOW, "why": "", "missing_role": None, "gaps": []}
    assert standing.as_json(NOW + 1) == live
    standing.lost(NOW + 10)
    state = standing.as_json(NOW + 11)
    assert (state["is"], state["gaps"]) == ("away", [(NOW + 10, None)])
    standing.returned(NOW + 20)
    state = standing.as_json(NOW + 21)
    assert (state["is"], state["gaps"]) == ("live", [(NOW + 10, NOW + 20)])
    assert standing.as_json(NOW + 21 + KEPT)["gaps"] == []
    standing.unread(NOW + 31)
    assert [standing.name(NOW + later) for later in (35, 37)] == ["live", "away"]
    standing.read()
    assert standing.name(NOW + 38) == "live"
    standing.refused(NOW + 40, "app", "cannot use Topic to *")
    state = standing.as_json(NOW + 40)
    assert (state["is"], state["missing_role"]) == ("not_observing", "app")


def test_names_are_what_postgresql_can_hold(settings: Any) -> None:
    assert patterns("AB") == ["AB", "*", "A*", "AB*"]
    assert not [name for name in ("", "x" * 101, "a\0b", "\ud800") if is_name(name)]
    settings.PSQLMESSAGES = {"NODE": "n" * 70}
    assert is_name(new_ident()), "the longest node leaves room for the monitor's name"
