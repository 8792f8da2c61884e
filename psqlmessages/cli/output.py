"""Arguments and output of the commands."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any, Self, TextIO

from psqlmessages.wire import MalformedText, parse_strict_json


@dataclass(frozen=True)
class CliCommand:
    """A command. ``configure`` adds arguments to its parser; ``run`` returns the exit code."""

    name: str
    help: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def natural(text: str) -> int:
    """Read a whole number that is not negative."""
    return _number(text, 0)


def positive(text: str) -> int:
    """Read a whole number of at least one."""
    return _number(text, 1)


def duration(text: str) -> timedelta:
    """Read a number of seconds that is not negative, as a timedelta."""
    try:
        value = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise ArgumentTypeError(f"not a number of seconds: {text!r}") from None
    if value < timedelta(0):
        raise ArgumentTypeError(f"seconds cannot be negative: {text!r}")
    return value


def time_with_zone(text: str) -> datetime:
    """Read a time in ISO 8601. A time without a zone is in the time zone of this machine."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ArgumentTypeError(f"not a time in ISO 8601: {text!r:.100}") from None


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = parse_strict_json(text)
    except MalformedText as error:
        raise ArgumentTypeError(error.sentence()) from None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"not a JSON object: {text:.100}")
    return value


def _number(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"not a whole number: {text!r}") from None
    if number < minimum:
        raise ArgumentTypeError(f"must be at least {minimum}: {text!r}")
    return number


AddCommand = Callable[[str, Callable[[Namespace], int], str], ArgumentParser]


def subcommands(parser: ArgumentParser, *, is_required: bool = True) -> AddCommand:
    """Return a function that adds a subcommand, given its name, function and help text."""
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=is_required)

    def add(name: str, function: Callable[[Namespace], int], help_: str) -> ArgumentParser:
        subparser: ArgumentParser = subparsers.add_parser(name, help=help_, description=help_)
        subparser.set_defaults(subcommand=function)
        return subparser

    return add


def run_subcommand(arguments: Namespace) -> int:
    """Run the chosen subcommand."""
    code: int = arguments.subcommand(arguments)
    return code


def add_bodies(parser: ArgumentParser, verb: str) -> None:
    """Add the arguments of `read_bodies`, and --batch; ``verb`` is a word of the help text."""
    parser.add_argument(
        "body",
        metavar="BODY",
        nargs="?",
        default="-",
        help=f"the text to {verb}; - (the default) reads one body per line from standard input",
    )
    parser.add_argument("--json", action="store_true", help="BODY, or each line, is JSON")
    add_batch(parser)


def add_json(parser: ArgumentParser, *, per_line: bool = False) -> None:
    """Add --json, which selects JSON as the format of the output."""
    what = "one JSON object per line" if per_line else "one JSON object"
    parser.add_argument("--json", action="store_true", help=f"print {what}, for programs")


def add_batch(parser: ArgumentParser) -> None:
    """Add --batch."""
    parser.add_argument(
        "--batch", type=positive, default=1, help="number of bodies per call (default: 1)"
    )


def read_bodies(arguments: Namespace) -> Iterator[Any]:
    """Yield BODY, or the lines of standard input if BODY is ``-``; with --json, parse each."""
    texts = read_lines() if arguments.body == "-" else iter([arguments.body])
    return map(parse_body, texts) if arguments.json else texts


def parse_body(text: str) -> Any:
    """Parse a body that is JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None


def read_input(name: str) -> bytes:
    """Read a file, or standard input if its name is ``-``."""
    return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


def read_lines() -> Iterator[str]:
    """Yield the lines of standard input."""
    return (line.rstrip("\r\n") for line in sys.stdin)


# Output: tables and rates. On a terminal the rate is one refreshed line, in a file many lines.

_TERMINAL_INTERVAL_SECONDS = 0.2
_FILE_INTERVAL_SECONDS = 10.0
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Counts messages; shows their rate, and the remaining time if the total is known.

    By default it writes to standard error, so that standard output contains only results.
    """

    def __init__(self, verb: str, total: int | None = None, stream: TextIO | None = None) -> None:
        self._verb = verb
        self._total = total
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._interval = _TERMINAL_INTERVAL_SECONDS if self._is_terminal else _FILE_INTERVAL_SECONDS
        self._started_at = self._shown_at = monotonic()
        self._is_line_open = False
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Write a last line with the count and the mean rate."""
        self._write(self._summary(), is_last=True)

    def add(self, count: int = 1) -> None:
        """Add to the count, and show the rate if it is due."""
        self.count += count
        self.show()

    def update(self, count: int) -> None:
        """Set the count; after a change, show the rate if it is due."""
        if count != self.count:
            self.add(count - self.count)

    def show(self) -> None:
        """Show the rate if it is due."""
        now = monotonic()
        if now - self._shown_at >= self._interval:
            self._shown_at = now
            self._write(self._summary())

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line; on a terminal, the next rate appears below it."""
        if self._is_line_open:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._is_line_open = False
        print(text, file=stream or self._stream, flush=True)

    def _summary(self) -> str:
        elapsed = max(monotonic() - self._started_at, 1e-9)
        rate = self.count / elapsed
        text = f"{self._verb} {self.count:,} in {elapsed:,.1f} s, {rate:,.0f}/s"
        if self._total is not None and 0 < self.count < self._total:
            remaining = self._total - self.count
            text += f", {remaining:,} to go, {remaining / rate:,.0f} s"
        return text

    def _write(self, text: str, *, is_last: bool = False) -> None:
        if not self._is_terminal:
            print(text, file=self._stream, flush=True)
            return
        width = shutil.get_terminal_size().columns
        end = "\n" if is_last else ""
        self._stream.write(f"{_CLEAR_LINE}{text[: width - 1]}{end}")
        self._stream.flush()
        self._is_line_open = not is_last


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> str:
    """Format a table; ``right`` has the indexes of the columns to align right."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def one_line(text: str) -> str:
    """Escape control characters, so that text is safe for a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print each text in one line."""
    for line in lines:
        print(one_line(line), file=file or sys.stdout)


def fail(*texts: str) -> int:
    """Print each error in one line; return exit code 1."""
    print_lines((f"psqlmessages: {text}" for text in texts), sys.stderr)
    return 1


def format_body(body: Any) -> str:
    """Format a body for people."""
    if isinstance(body, str | bytes):
        return body if isinstance(body, str) else repr(body)
    return json.dumps(body, ensure_ascii=False)
