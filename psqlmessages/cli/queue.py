"""Command queue: push, take, acknowledge, show sizes."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from psqlmessages.cli.direct_calls import connect_as, fetch, run_call
from psqlmessages.cli.messaging import body_fields, body_or_error
from psqlmessages.cli.output import (
    CliCommand,
    Progress,
    add_bodies,
    add_json,
    duration,
    fail,
    format_table,
    json_object,
    natural,
    one_line,
    positive,
    read_bodies,
    run_subcommand,
    subcommands,
    time_with_zone,
)
from psqlmessages.client import queue_calls
from psqlmessages.client.calls import Call
from psqlmessages.client.node import Node
from psqlmessages.client.queue_calls import AckResult, Element
from psqlmessages.client.transactions import SqlStatement

T = TypeVar("T")

_COUNTERS = ("puts", "gets", "reserves", "commits", "rollbacks", "dead_letters", "removes")
_COLUMNS = ", ".join(("queue", "paused", *_COUNTERS))
_QUEUES_QUERY = f"SELECT {_COLUMNS} FROM messages.queues ORDER BY queue"  # noqa: S608


def _configure(parser: ArgumentParser) -> None:
    add_command = subcommands(parser)

    def add(name: str, function: Callable[[Namespace], int], help_: str) -> ArgumentParser:
        command = add_command(name, function, help_)
        command.add_argument("node", metavar="NODE", help="the node to act as")
        if name not in ("commit", "rollback"):
            command.add_argument("queue", metavar="QUEUE")
        return command

    push = add("push", _push, "add elements to a queue and print their ids")
    add_bodies(push, "push")
    push.add_argument("--headers", type=json_object, help="a JSON object")
    push.add_argument(
        "--mature",
        type=time_with_zone,
        help="when the element becomes available (ISO 8601; without a zone: local time)",
    )
    push.add_argument("--delay", type=duration, help="seconds until the element is available")
    push.add_argument(
        "--tries", type=natural, default=0, help="initial number of failed attempts (default: 0)"
    )
    push.add_argument("--key", help="a second push with the same key adds nothing")
    _configure_take(add("pop", _pop, "take elements, remove them and print them"))
    reserve = add("reserve", _reserve, "lease elements, hide them for some time and print them")
    _configure_take(reserve)
    reserve.add_argument(
        "--duration",
        type=duration,
        default=queue_calls.DEFAULT_DURATION,
        help="seconds until elements that are not committed are delivered again (default: 120)",
    )
    commit = add("commit", _commit, "remove reserved elements for good")
    rollback_help = "make reserved elements available again, and count a failed attempt"
    rollback = add("rollback", _rollback, rollback_help)
    for command in (commit, rollback):
        command.add_argument("leases", metavar="LEASE", nargs="+", help="a lease from reserve")
    rollback.add_argument(
        "--delay", type=duration, help="seconds until the elements are available again"
    )
    add_json(add("sizes", _sizes, "print how many elements a queue contains"))
    list_help = "print the queues that the role may use, with their counters"
    add_json(add_command("list", _list, list_help), per_line=True)
    add("pause", _pause, "stop handing out elements of a queue; pushes continue")
    add("resume", _resume, "hand out elements again")
    add("drain", _drain, "remove all available elements and print their number")
    configure = add("configure", _configure_queue, "change the settings of a queue")
    configure.add_argument(
        "--max-tries",
        type=natural,
        help="after this many failed attempts an element becomes a dead letter (0: no maximum)",
    )
    configure.add_argument("--dead-letter-queue", help="the queue that gets the dead letters")
    configure.add_argument(
        "--key-timeout", type=positive, help="seconds during which a key can be used only once"
    )
    add("remove-queue", _remove_queue, "remove an empty queue with its settings")


def _configure_take(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--count", type=positive, default=1, help="maximum number of elements (default: 1)"
    )
    parser.add_argument("--timeout", type=duration, help="seconds to wait for the first element")
    add_json(parser, per_line=True)


def _push(arguments: Namespace) -> int:
    if arguments.body == "-" and arguments.key is not None:
        raise ValueError(
            "--key needs a BODY argument: bodies from standard input would all have the same key,"
            " so only the first would be added"
        )
    bodies = read_bodies(arguments)
    with connect_as(arguments.dsn, arguments.node) as connection, Progress("pushed") as progress:
        while batch := list(islice(bodies, arguments.batch)):
            call = queue_calls.push_many(
                arguments.node,
                arguments.queue,
                batch,
                headers=[arguments.headers] * len(batch),
                mature=arguments.mature,
                delay=arguments.delay,
                tries=arguments.tries,
                keys=[arguments.key] * len(batch),
            )
            for id_ in run_call(connection, call):
                progress.say(str(id_), sys.stdout)
            progress.add(len(batch))
    return 0


def _pop(arguments: Namespace) -> int:
    queue, count, timeout = arguments.queue, arguments.count, arguments.timeout
    if not timeout:
        return _take_now(arguments, queue_calls.pop(arguments.node, queue, count))
    with Node(arguments.node, arguments.dsn) as node:
        return _print_elements(arguments, node.pop(queue, count, timeout=timeout))


def _reserve(arguments: Namespace) -> int:
    options = (arguments.queue, arguments.count, arguments.duration)
    if not arguments.timeout:
        return _take_now(arguments, queue_calls.reserve(arguments.node, *options))
    with Node(arguments.node, arguments.dsn) as node:
        return _print_elements(arguments, node.reserve(*options, timeout=arguments.timeout))


def _take_now(arguments: Namespace, statement: SqlStatement) -> int:
    """Take and print elements without waiting, so that the node need not be connected."""
    with connect_as(arguments.dsn, arguments.node) as connection:
        rows = fetch(connection, statement)
    return _print_elements(arguments, queue_calls.elements(arguments.queue, rows))


def _print_elements(arguments: Namespace, elements: list[Element]) -> int:
    for element in elements:
        if arguments.json:
            print(json.dumps(_element_fields(element)), flush=True)
        else:
            lease = f" {element.lease}" if element.lease else ""
            print(one_line(f"{element.id}{lease}: {body_or_error(element)}"), flush=True)
    return 0 if elements else 1


def _element_fields(element: Element) -> dict[str, Any]:
    fields = {
        "id": element.id,
        "queue": element.queue,
        "headers": element.headers,
        "mature": element.mature.isoformat(),
        "tries": element.tries,
        "hops": element.hops,
        "pushed_at": element.pushed_at.isoformat(),
    }
    lease = {"lease": element.lease} if element.lease else {}
    return fields | lease | body_fields(element)


def _commit(arguments: Namespace) -> int:
    return _acknowledge(arguments, queue_calls.commit(arguments.node, *arguments.leases))


def _rollback(arguments: Namespace) -> int:
    call = queue_calls.rollback(arguments.node, *arguments.leases, delay=arguments.delay)
    return _acknowledge(arguments, call)


def _acknowledge(arguments: Namespace, call: Call[AckResult]) -> int:
    result = _run(arguments, call)
    for lease, is_done, is_dead in zip(arguments.leases, result, result.dead_lettered, strict=True):
        if not is_done:
            fail(f"{lease} is no longer valid")
        elif is_dead:
            print(f"{lease}: the element has become a dead letter", file=sys.stderr)
    return 0 if all(result) else 1


def _sizes(arguments: Namespace) -> int:
    sizes = _run(arguments, queue_calls.sizes(arguments.node, arguments.queue))
    fields = sizes._asdict()
    fields["next"] = sizes.next.isoformat() if sizes.next is not None else None
    if arguments.json:
        print(json.dumps(fields))
        return 0
    is_paused = fields.pop("is_paused")
    width = max(map(len, fields))
    for name, value in fields.items():
        print(f"{name.ljust(width)}  {value if value is not None else '-'}")
    if is_paused:
        print("paused")
    return 0


def _pause(arguments: Namespace) -> int:
    if not _run(arguments, queue_calls.pause(arguments.node, arguments.queue)):
        print(f"{one_line(arguments.queue)} was paused already", file=sys.stderr)
    return 0


def _resume(arguments: Namespace) -> int:
    if not _run(arguments, queue_calls.resume(arguments.node, arguments.queue)):
        print(f"{one_line(arguments.queue)} was not paused", file=sys.stderr)
    return 0


def _drain(arguments: Namespace) -> int:
    print(_run(arguments, queue_calls.drain(arguments.node, arguments.queue)))
    return 0


def _configure_queue(arguments: Namespace) -> int:
    call = queue_calls.configure_queue(
        arguments.node,
        arguments.queue,
        max_tries=arguments.max_tries,
        dead_letter_queue=arguments.dead_letter_queue,
        key_timeout=arguments.key_timeout,
    )
    settings = _run(arguments, call)
    print(f"max tries          {settings.max_tries or '-'}")
    print(f"dead-letter queue  {one_line(settings.dead_letter_queue)}")
    print(f"key timeout        {settings.key_timeout.total_seconds():.0f} s")
    return 0


def _remove_queue(arguments: Namespace) -> int:
    _run(arguments, queue_calls.remove_queue(arguments.node, arguments.queue))
    return 0


def _list(arguments: Namespace) -> int:
    with connect_as(arguments.dsn, "queues") as connection:
        rows = connection.execute(_QUEUES_QUERY).fetchall()
    if arguments.json:
        for row in rows:
            print(json.dumps(dict(zip(("queue", "is_paused", *_COUNTERS), row, strict=True))))
        return 0
    lines = [
        [one_line(name), "paused" if is_paused else "", *map(str, counts)]
        for name, is_paused, *counts in rows
    ]
    head = ["queue", "", *(name.replace("_", " ") for name in _COUNTERS)]
    print(format_table(head, lines, right=range(2, len(head))) if lines else "no queues")
    return 0


def _run(arguments: Namespace, call: Call[T]) -> T:
    with connect_as(arguments.dsn, arguments.node) as connection:
        return run_call(connection, call)


COMMAND = CliCommand(
    "queue", "push to a queue, take from it, and show its size", _configure, run_subcommand
)
