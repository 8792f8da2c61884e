"""Progress and tables: one refreshed line on a terminal, plain lines elsewhere."""

import io

import pytest

from psqlmessages.cli import output
from psqlmessages.cli.output import Progress, format_table, one_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(output, "monotonic", lambda: now[0])
    return now


def test_a_terminal_shows_one_refreshed_line_below_the_messages(clock: list[float]):
    stream = Terminal()
    with Progress("sent", 100, stream) as progress:
        for clock[0] in (0.1, 0.5, 1.0):
            progress.add(10)
        progress.say("hello")
        clock[0] = 2.0
    assert stream.getvalue().split("\r\x1b[K") == [
        "", "sent 20 in 0.5 s, 40/s, 80 to go, 2 s", "sent 30 in 1.0 s, 30/s, 70 to go, 2 s",
        "hello\n", "sent 30 in 2.0 s, 15/s, 70 to go, 5 s\n",
    ]  # fmt: skip


def test_elsewhere_there_are_plain_lines_now_and_then(clock: list[float]):
    stream = io.StringIO()
    with Progress("sent", stream=stream) as progress:
        for clock[0] in map(float, range(1, 25)):
            progress.add()
    assert stream.getvalue() == "".join(f"sent {n} in {n}.0 s, 1/s\n" for n in (10, 20, 24))


def test_a_table_has_columns_and_control_characters_are_not_obeyed():
    assert format_table(["name", "n"], [["a", "10"], ["long name", "5"]], right=[1]) == (
        "name        n\na          10\nlong name   5"
    )
    assert one_line("Ä\x1b[2J\r\n\u202e") == "Ä\\x1b[2J\\r\\n\\u202e"
