"""Commands that do not need Django, for `psqlmessages` and `manage.py psqlmessages`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Protocol

from psqlmessages.cli import (
    bench,
    call,
    demo,
    doctor,
    prune,
    queue,
    receive,
    send,
    status,
    stream,
)


class CliCommand(Protocol):
    """Interface of a command module; ``run`` returns the exit code."""

    NAME: str
    HELP: str

    def configure(self, parser: ArgumentParser) -> None:
        """Add the command's own arguments."""

    def run(self, arguments: Namespace) -> int:
        """Run the command on the database ``arguments.dsn``."""
        ...


COMMANDS: tuple[CliCommand, ...] = (
    send,
    receive,
    stream,
    queue,
    call,
    status,
    demo,
    doctor,
    prune,
    bench,
)
