"""Command exchange: load, list, show, test, start, stop, delete and run exchanges."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from functools import partial

from django.db.models import Count

from psqlmessages.cli.output import (
    CliCommand,
    fail,
    format_table,
    json_object,
    natural,
    one_line,
    print_lines,
    read_input,
    run_subcommand,
    subcommands,
)
from psqlmessages.exchanges.model import SelectorInput
from psqlmessages.exchanges.routing import DryRunCopy, dry_run_exchange
from psqlmessages.exchanges.store import definitions, files, repository
from psqlmessages.exchanges.store.definitions import DefinedExchange, MalformedExchanges
from psqlmessages.exchanges.store.permissions import find_missing_rules
from psqlmessages.exchanges.store.route_graph import find_cycles
from psqlmessages.exchanges.store.stats import (
    ELEMENT_OUTCOMES,
    count_outcomes,
    format_state,
    has_live_worker,
    read_missing_rules,
)
from psqlmessages.models import Exchange, ExchangeCount
from psqlmessages.monitor.minute_writer import start_history_writer
from psqlmessages.wire import MalformedText, parse_strict_json

_HEAD = ("exchange", "state", "processes", "source", "destinations")


def list_exchanges(arguments: Namespace) -> int:
    """Print a table of the exchanges, and a line for each missing rule."""
    rows = list(repository.rows(arguments.database))
    if not rows:
        print("no exchanges")
        return 0
    using = arguments.database
    counts, missing = count_outcomes(rows, using), read_missing_rules(using)
    live = ExchangeCount.objects.using(using).filter(has_live_worker()).values_list("exchange")
    processes = Counter(dict(live.annotate(Count("worker", distinct=True))))
    lines = []
    for row in rows:
        definition = repository.to_definition(row)
        cells = (
            definition.name,
            format_state(is_running=row.is_running, is_blocked=row.pk in missing),
            str(processes[row.pk]),
            str(definition.source),
            ", ".join(map(str, definition.destinations)),
            *(f"{counts[row.pk, outcome]:,}" for outcome in ELEMENT_OUTCOMES),
        )
        lines.append([one_line(cell) for cell in cells])
    head = (*_HEAD, *(outcome.label for outcome in ELEMENT_OUTCOMES))
    print(format_table(head, lines, right=(2, *range(len(_HEAD), len(head)))))
    for row in rows:
        for rule in missing.get(row.pk, ()):
            print(one_line(f"{row.name} is blocked: missing rule in {rule}"))
    return 0


def load(arguments: Namespace) -> int:
    """Load a file. If it has errors, print each on a line, change nothing, and fail."""
    try:
        wanted = definitions.parse_text(read_input(arguments.file))
    except MalformedExchanges as error:
        return fail(*map(str, error.errors))
    current = repository.read_all(arguments.database)
    difference = repository.compare(current, wanted, replace_all=arguments.replace_all)
    print_lines(difference.describe())
    if not arguments.dry_run:
        expected, using = repository.fingerprint(current), arguments.database
        try:
            added = repository.apply(difference, expected, using, with_rules=arguments.with_rules)
        except repository.ExchangesChanged:
            return fail("the exchanges have changed during the load: run it again")
        print_lines(f"+ rule in {rule.namespace}: {rule.statement}" for rule in added)
    print(f"{'dry run: ' if arguments.dry_run else ''}{difference.summary()}", file=sys.stderr)
    names = {exchange.name for exchange in wanted}
    others = [] if arguments.replace_all else [each for each in current if each.name not in names]
    problems = _describe_problems(wanted, [*wanted, *others], arguments.database)
    print_lines(problems, sys.stderr)
    return 0


def _describe_problems(
    wanted: tuple[DefinedExchange, ...], all_exchanges: list[DefinedExchange], using: str
) -> Iterator[str]:
    """Yield a line for each missing rule, database that could not be checked, and cycle."""
    missing = find_missing_rules(wanted, using)
    for rule in missing.rules:
        yield f"missing rule in {rule.namespace}: {rule.statement}"
    for namespace, why in missing.errors.items():
        yield f"could not check the rules in {namespace}: {why}"
    for cycle in find_cycles(all_exchanges):
        yield f"cycle: {', '.join(map(str, cycle))}"


def _test(arguments: Namespace) -> int:
    """Route an element without pushing it; print a line per destination and per copy."""
    row = repository.rows(arguments.database).get(name=arguments.name)
    try:
        exchange = repository.compile_exchange(row)
    except MalformedExchanges as error:
        return fail(*map(str, error.errors))
    source = exchange.source
    try:
        body = parse_strict_json(arguments.body) if arguments.json_body else arguments.body
    except MalformedText as error:
        return fail(f"--json-body: {error}")
    options = {"tries": arguments.tries, "queue": source.name, "ns": source.namespace}
    result = dry_run_exchange(exchange, SelectorInput(body, arguments.headers, **options))
    for destination in result.destinations:
        verdict = destination.verdict
        answer = "yes" if verdict.is_accepted else "no"
        print(one_line(f"{destination.queue}: {answer}, {verdict.error or verdict.why}"))
        if destination.copy is not None:
            _print_copy(destination.copy)
    if result.fallback is not None:
        print(one_line(f"{result.outcome}: to {result.fallback.queue}"))
        _print_copy(result.fallback)
    elif result.outcome == "discarded":
        print("discarded: no selector accepts the element")
    return 0


def _print_copy(copy: DryRunCopy) -> None:
    document = {"headers": copy.headers, "body": copy.body}
    for option in ("delay", "mature"):
        if (seconds := getattr(copy, option)) is not None:
            document[option] = seconds
    if copy.tries:
        document["tries"] = copy.tries
    print(f"    {json.dumps(document, ensure_ascii=False, default=_to_text)}")


def _to_text(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _configure(parser: ArgumentParser) -> None:
    add = subcommands(parser)
    loading = add("load", load, "create and change exchanges from a YAML or JSON file")
    loading.add_argument("file", metavar="FILE", help='the file; "-" is the standard input')
    loading.add_argument("--dry-run", action="store_true", help="only print the changes")
    loading.add_argument(
        "--replace-all", action="store_true", help="remove exchanges that are not in the file"
    )
    loading.add_argument(
        "--with-rules",
        action="store_true",
        help="also add the rules that the exchanges need in this database",
    )
    add("list", list_exchanges, "print the exchanges with their states and counters")
    show = add("show", _show, "print the definition of one or all exchanges, in the format of load")
    show.add_argument("name", metavar="NAME", nargs="?", help="the exchange (default: all)")
    show.add_argument(
        "--format", choices=("yaml", "json"), default="yaml", help="output format (default: yaml)"
    )
    test = add("test", _test, "dry run: show which destinations would get an element, and why")
    test.add_argument("name", metavar="NAME", help="the exchange")
    test.add_argument(
        "--headers", type=json_object, default="{}", help="the headers, a JSON object (default: {})"
    )
    test.add_argument("--body", default="", help="the body: text (default: empty)")
    test.add_argument("--json-body", action="store_true", help="the body is JSON")
    test.add_argument(
        "--tries", type=natural, default=0, help="number of failed attempts (default: 0)"
    )
    start = partial(_set_running, is_running=True)
    stop = partial(_set_running, is_running=False)
    for name, function, help_ in (
        ("start", start, "start an exchange in all processes that run it"),
        ("stop", stop, "stop an exchange after its current batches"),
        ("delete", _delete, "remove an exchange; its queues stay"),
    ):
        add(name, function, help_).add_argument("name", metavar="NAME", help="the exchange")
    run_ = add("run", _run, "run exchanges in this process, until Ctrl-C")
    run_.add_argument("names", metavar="NAME", nargs="*", help="the exchanges (default: all)")


def run(arguments: Namespace) -> int:
    """Run the chosen command."""
    try:
        return run_subcommand(arguments)
    except Exchange.DoesNotExist:
        return fail(f"there is no exchange {arguments.name}")


def _show(arguments: Namespace) -> int:
    name, using = arguments.name, arguments.database
    if name is None:
        exchanges = repository.read_all(using)
    else:
        exchanges = (repository.to_definition(repository.rows(using).get(name=name)),)
    write = files.write_json if arguments.format == "json" else files.write_yaml
    sys.stdout.write(write(definitions.to_document(exchanges, with_running=True)))
    return 0


def _set_running(arguments: Namespace, *, is_running: bool) -> int:
    is_changed = repository.set_running(arguments.name, is_running, arguments.database)
    state = "running" if is_running else "stopped"
    print(f"{one_line(arguments.name)} {'is' if is_changed else 'was already'} {state}")
    return 0


def _delete(arguments: Namespace) -> int:
    if not repository.delete([arguments.name], arguments.database):
        raise Exchange.DoesNotExist
    print(f"{one_line(arguments.name)} is removed; its queues and rules stay")
    return 0


def _run(arguments: Namespace) -> int:
    from psqlmessages.exchanges.store import worker

    start_history_writer()
    return worker.run(arguments.names, arguments.database)


COMMAND = CliCommand(
    "exchange", "load, list, show, test, start, stop, delete and run exchanges", _configure, run
)
