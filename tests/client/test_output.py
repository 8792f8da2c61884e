"""Progress and tables: one refreshed line on a terminal, plain lines elsewhere."""

import io

import pytest

from psqlmessages.commands import output
from psqlmessages.commands.output import Progress, one_line, table


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by hand."""
    now = [0.0]
    monkeypatch.setattr(output, "monotonic", lambda: now[0])
    return now


def test_a_terminal_has_one_line_that_is_refreshed(clock: list[float]) -> None:
    stream = Terminal()
    with Progress("sent", 100, stream) as progress:
        for second in (0.1, 0.5, 1.0):
            clock[0] = second
            progress.add(10)
        clock[0] = 2.0
    assert stream.getvalue() == (
        "\r\x1b[Ksent 20 in 0.5 s, 40/s, 80 to go, 2 s"
        "\r\x1b[Ksent 30 in 1.0 s, 30/s, 70 to go, 2 s"
        "\r\x1b[Ksent 30 in 2.0 s, 15/s, 70 to go, 5 s\n"
    )


def test_a_line_said_meanwhile_stands_above_it(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress("sent", stream=stream)
    clock[0] = 1.0
    progress.add()
    progress.say("hello")
    assert stream.getvalue() == "\r\x1b[Ksent 1 in 1.0 s, 1/s\r\x1b[Khello\n"


def test_elsewhere_there_are_plain_lines_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    with Progress("sent", stream=stream) as progress:
        for second in range(1, 25):
            clock[0] = float(second)
            progress.add()
    assert stream.getvalue() == (
        "sent 10 in 10.0 s, 1/s\nsent 20 in 20.0 s, 1/s\nsent 24 in 24.0 s, 1/s\n"
    )


def test_a_table_has_columns() -> None:
    assert table(["name", "n"], [["a", "10"], ["long name", "5"]], right=[1]) == (
        "name        n\na          10\nlong name   5"
    )


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert one_line("Ä\x1b[2J\r\n\u202e") == "Ä\\x1b[2J\\r\\n\\u202e"
