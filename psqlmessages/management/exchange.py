"""exchange: define exchanges by a file, show and try them, start and stop them, run them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from psqlmessages.commands.output import one_line
from psqlmessages.graph import definitions, parsing, stored
from psqlmessages.management import exchange_list, exchange_load, exchange_trial
from psqlmessages.models import Exchange

NAME = "exchange"
HELP = "define exchanges by a file, show and try them, start and stop them, run them"


def configure(parser: ArgumentParser) -> None:
    """Add the commands."""
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, act: Callable[[Namespace], int], help_: str) -> ArgumentParser:
        own: ArgumentParser = actions.add_parser(name, help=help_, description=help_)
        own.set_defaults(act=act)
        return own

    exchange_load.configure(
        add("load", exchange_load.run, "make exchanges what a YAML or JSON file says")
    )
    add("list", exchange_list.run, "print the exchanges, whether they run, and what they have done")
    show = add("show", _show, "print the definition of one exchange, or of all, as load takes it")
    show.add_argument("name", metavar="NAME", nargs="?", help="the exchange (default: all)")
    show.add_argument(
        "--format", choices=("yaml", "json"), default="yaml", help="how (default: yaml)"
    )
    exchange_trial.configure(
        add("test", exchange_trial.run, "say where an element would go, and why; nothing is pushed")
    )
    for name, act, help_ in (
        ("start", _start, "let the loops of an exchange run"),
        ("stop", _stop, "let the loops of an exchange end, after what they have in hand"),
        ("delete", _delete, "remove an exchange; its queues stay"),
    ):
        add(name, act, help_).add_argument("name", metavar="NAME", help="the exchange")
    run_ = add("run", _run, "run the loops of exchanges in this process; until Ctrl-C")
    run_.add_argument("names", metavar="NAME", nargs="*", help="the exchanges (default: all)")


def run(arguments: Namespace) -> int:
    """Do one of them."""
    try:
        code: int = arguments.act(arguments)
    except Exchange.DoesNotExist:
        print(f"psqlmessages: there is no exchange {one_line(arguments.name)}", file=sys.stderr)
        return 1
    return code


def _show(arguments: Namespace) -> int:
    if arguments.name is None:
        found = list(stored.present(arguments.database))
    else:
        found = [stored.definition(stored.rows(arguments.database).get(name=arguments.name))]
    write = parsing.as_json if arguments.format == "json" else parsing.as_yaml
    sys.stdout.write(write(definitions.as_document(found)))
    return 0


def _start(arguments: Namespace) -> int:
    return _set(arguments, is_running=True)


def _stop(arguments: Namespace) -> int:
    return _set(arguments, is_running=False)


def _set(arguments: Namespace, *, is_running: bool) -> int:
    is_new = stored.set_running(arguments.name, is_running, arguments.database)
    state = "running" if is_running else "stopped"
    print(f"{one_line(arguments.name)} is {state}{'' if is_new else ', as it was'}")
    return 0


def _delete(arguments: Namespace) -> int:
    if not stored.delete([arguments.name], arguments.database):
        raise Exchange.DoesNotExist
    print(f"{one_line(arguments.name)} is removed; its queues and rules stay")
    return 0


def _run(arguments: Namespace) -> int:
    from psqlmessages.graph import running

    code: int = running.run(arguments.names, arguments.database)
    return code
