"""Parallel senders, each a process with a Node, and one listener that counts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection as Pipe
from time import monotonic

from benchmarks.send_methods import SENDER
from benchmarks.send_receiver import TOPIC, Receiver
from psqlmessages import Node

WARM_UP = 20
JOIN_SECONDS = 10


def _send(pipe: Pipe, dsn: str, number: int, body: str) -> None:
    """Send messages in each round with a new node, so that notifications wake no idle sender."""
    while True:
        try:
            messages = pipe.recv()
        except EOFError:
            return
        with Node(f"{SENDER}.{number}", dsn) as node:
            node.topic_notify(TOPIC)
            for _ in range(WARM_UP):
                node.topic_send(TOPIC, body)
            pipe.send(None)
            pipe.recv()
            for _ in range(messages):
                node.topic_send(TOPIC, body)
            pipe.send(None)


@contextmanager
def _sender(dsn: str, number: int, body: str) -> Iterator[Pipe]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, dsn, number, body), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(JOIN_SECONDS)


def parallel_rates(
    dsn: str, receiver: Receiver, body: str, senders: int, messages: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Return sends/s of all senders together, and of one sender, which take turns."""
    together, alone = [], []
    with ExitStack() as stack:
        pipes = [stack.enter_context(_sender(dsn, n, body)) for n in range(senders)]
        for turn in range(rounds):
            for is_alone in (False, True) if turn % 2 else (True, False):
                active = pipes[:1] if is_alone else pipes
                rate = _measure_rate(active, receiver, messages // len(active))
                (alone if is_alone else together).append(rate)
    return together, alone


def _measure_rate(pipes: list[Pipe], receiver: Receiver, messages: int) -> float:
    receiver.expect("count", (WARM_UP + messages) * len(pipes))
    for pipe in pipes:
        pipe.send(messages)
    for pipe in pipes:
        pipe.recv()
    begun = monotonic()
    for pipe in pipes:
        pipe.send(None)
    for pipe in pipes:
        pipe.recv()
    rate = messages * len(pipes) / (monotonic() - begun)
    receiver.done_at()
    return rate
