"""Entry point of the console script, for commands that do not need Django."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import NoReturn

import psycopg

from psqlmessages import __version__
from psqlmessages.cli import COMMANDS
from psqlmessages.cli.output import CliCommand
from psqlmessages.exceptions import MessagesError
from psqlmessages.shutdown import signal_handler

DONE, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 if it succeeded, 1 if it failed, and 130 after Ctrl-C.

    Exits with code 2 if the arguments are invalid, and with 143 after SIGTERM.
    """
    parser = argparse.ArgumentParser(
        prog="psqlmessages", description="Send, receive and watch messages in PostgreSQL."
    )
    parser.add_argument(
        "--dsn",
        default=os.environ.get("PSQLMESSAGES_DSN", ""),
        help="connection string or address of the database"
        " (default: PSQLMESSAGES_DSN, else the PG… variables of libpq)",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_commands(parser, COMMANDS)
    return execute(parser.parse_args(arguments))


def add_commands(parser: argparse.ArgumentParser, commands: Iterable[CliCommand]) -> None:
    """Add a subparser for each command. In parsed arguments, ``run`` is the command's function."""
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.configure(subparser)
        subparser.set_defaults(run=command.run)


def execute(arguments: argparse.Namespace) -> int:
    """Run the chosen command; return its exit code. Print an error as text, without a traceback."""
    # A program may call a command in another thread, where Python allows no signal handlers.
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with signal_handler(_terminate, signal.SIGTERM) if is_main else nullcontext():
            code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The program that read the output has ended (| head). Avoid a second error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (MessagesError, psycopg.Error, OSError, ValueError) as error:
        if isinstance(error, MessagesError):
            error.caller = error.caller._replace(**_destination(arguments))
        print(f"psqlmessages: {str(error).strip()}", file=sys.stderr)
        if isinstance(error, MessagesError) and error.number is not None:
            print(f"See {error.url}", file=sys.stderr)
        return FAILED
    return code


def _destination(arguments: argparse.Namespace) -> dict[str, str]:
    """Return type and name of the topic or queue of a command, for the rule that it may need."""
    for type_ in ("Topic", "Queue"):
        if isinstance(dest := getattr(arguments, type_.lower(), None), str):
            return {"type": type_, "dest": dest}
    return {}


def _terminate(*_: object) -> NoReturn:
    sys.exit(TERMINATED)
