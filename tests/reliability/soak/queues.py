"""Actors: queues with keys, leases that run out and dead letters, and what exchanges move."""

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

from psqlmessages import Element, Node
from tests.reliability.soak.acting import Actor, opened
from tests.reliability.soak.tally import Outstanding

SECOND = timedelta(seconds=1)


def main() -> None:
    actor = Actor()
    jobs, doomed, left, right = (
        Outstanding(name, actor.counts) for name in ("jobs", "doomed", "copies.a", "copies.b")
    )
    worker, clerk, shop = (
        actor.node(ident, role)
        for ident, role in (("WORKER", "user2"), ("CLERK", "user2"), ("SHOP", "user1"))
    )
    actor.begin(
        lambda: push(actor, shop, jobs, doomed),
        lambda: push_orders(actor, shop, left, right),
        lambda: work(actor, worker, jobs),
        lambda: dawdle(actor),
        lambda: take(worker, "dead", doomed),
        lambda: take(clerk, "copies.a", left),
        lambda: take(clerk, "copies.b", right),
    )
    actor.run(left=lambda: sum(each.left for each in (jobs, doomed, left, right)))


def push(actor: Actor, shop: Node, jobs: Outstanding, doomed: Outstanding) -> None:
    """Push with a key, some of them twice; every tenth fails at each try, and is to be buried."""
    for number in actor.every(0.1):
        is_doomed = number % 10 == 0
        (doomed if is_doomed else jobs).push(number)
        for _ in range(1 + (number % 5 == 0)):
            shop.push("jobs", {"number": number, "doomed": is_doomed}, key=f"job {number}")


def push_orders(actor: Actor, shop: Node, *copies: Outstanding) -> None:
    """Push what an exchange copies to two queues, many at once and with delays."""
    number = 0
    for _ in actor.every(1):
        numbers = range(number, number + 10)
        number += 10
        for each in numbers:
            for copy in copies:
                copy.push(each)
        delay = SECOND if number % 50 == 0 else None
        shop.push_many("orders", list(numbers), delay=delay)


def work(actor: Actor, worker: Node, jobs: Outstanding) -> None:
    """Do jobs one by one; what is doomed fails."""
    while True:
        for element in worker.reserve("jobs", 5, 30 * SECOND, timeout=timedelta.max):
            if element.body["doomed"]:
                worker.rollback(element, delay=SECOND / 10)
            else:
                finish(worker, element, jobs)
            actor.counts["tries"] += 1


def finish(worker: Node, element: Element, tally: Outstanding) -> None:
    """Commit, and count what was really done."""
    if worker.commit(element):
        tally.done(element.body["number"])


def dawdle(actor: Actor) -> None:
    """Reserve by a node that comes and goes, and do nothing: the lease runs out."""
    for _ in actor.every(2):
        with closing(opened("DAWDLER", actor.places["user2"])) as node:
            actor.counts["leases that ran out"] += len(node.reserve("jobs", 1, SECOND))


def take(node: Node, queue: str, tally: Outstanding) -> None:
    """Take what comes to a queue, for ever."""
    number: Callable[[Element], int] = (
        (lambda element: element.body["number"]) if queue == "dead" else (lambda e: e.body)
    )
    while True:
        for element in node.pop(queue, 10, timeout=timedelta.max):
            tally.done(number(element))


if __name__ == "__main__":
    main()
