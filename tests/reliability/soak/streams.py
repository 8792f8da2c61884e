"""Actors: a publisher, a reader, and short-lived subscriptions of short-lived topics."""

from collections.abc import Iterable
from contextlib import closing
from datetime import timedelta

from psqlmessages import Message, Node
from psqlmessages.exceptions import TopicNotExistent
from tests.reliability.soak.acting import Actor, opened

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)


def main() -> None:
    actor = Actor()
    publisher, reader = actor.node("PUB", "user1"), actor.node("READER", "user2")
    messages = reader.subscribe("LEDGER", timeout=10 * MINUTE, max_rows=50)
    actor.begin(
        lambda: publish(actor, publisher),
        lambda: read(actor, messages),
        lambda: pass_by(actor),
    )
    actor.run(left=lambda: actor.counts["published"] - actor.senders["LEDGER"].came)


def publish(actor: Actor, publisher: Node) -> None:
    """Publish one by one and many at once, of a few hundred bytes."""
    number = 0
    for turn in actor.every(0.1):
        size = 20 if turn % 10 == 0 else 1
        bodies = [{"number": number + n, "text": "z" * 300} for n in range(1, size + 1)]
        number += size
        # Counted before: the soak may end while it is published.
        actor.counts["published"] = number
        publisher.publish_many("LEDGER", bodies)


def read(actor: Actor, messages: Iterable[Message]) -> None:
    """Count what is read."""
    for message in messages:
        actor.came("LEDGER", message.body["number"])


def pass_by(actor: Actor) -> None:
    """Subscribe to a topic of the moment by a pattern, read what came, and leave it to time out."""
    for number in actor.every(1):
        try:
            pass_one_by(actor, f"TEMP.{number}", is_left=number % 2 == 0)
        except TopicNotExistent:
            # A busy machine let it be removed before it was subscribed to, as nobody's.
            actor.counts["topics that nobody kept"] += 1


def pass_one_by(actor: Actor, topic: str, *, is_left: bool) -> None:
    """Do it once."""
    with (
        closing(opened("TEMPPUB", actor.places["user1"])) as publisher,
        closing(opened("PASSER", actor.places["user2"])) as reader,
    ):
        publisher.publish(topic, "that there is the topic")
        # It ends where a busy machine let the subscription time out before it was read.
        messages = reader.subscribe(topic, timeout=2 * SECOND, max_rows=10, idle=5 * SECOND)
        publisher.publish_many(topic, list(range(20)))
        for place, message in enumerate(messages):
            if message.body != place and reader.subscription(topic).is_recovered:
                actor.counts["lost"] += 1
            if place == 19:
                break
        if not is_left:
            reader.unsubscribe(topic)
    actor.counts["short subscriptions"] += 1


if __name__ == "__main__":
    main()
