"""Actors: nodes that send, call and listen; one whose right comes and goes."""

import sys
import threading
from contextlib import suppress
from datetime import timedelta

from psqlmessages import Message, Node
from psqlmessages.exceptions import MessagesError, NoListeners
from tests.reliability.soak.acting import Actor

LARGE = "x" * 20_000
PATIENCE = timedelta(seconds=30)


def main() -> None:
    actor = Actor()
    alpha, beta, xray = (
        actor.node(ident, role)
        for ident, role in (("ALPHA", "user1"), ("BETA", "user2"), ("XRAY", "user3"))
    )
    for topic in ("TALK", "CHANGING"):
        alpha.topic_notify(topic)
    beta.topic_listen("TALK")
    beta.on_topic("TALK")(lambda message: talked(actor, message))
    beta.on_rpc(lambda message: message.body)
    beta.on_event("crash")(lambda message: heard(actor, message))
    actor.begin(
        lambda: send(actor, alpha),
        lambda: call(actor, alpha),
        beta.run,
        lambda: passed_over(alpha),
        lambda: listen_again(actor, xray),
    )
    actor.run(left=lambda: actor.counts["sent"] - actor.senders["ALPHA"].came)


def talked(actor: Actor, message: Message) -> None:
    """Count a message of ALPHA; the others of TALK are not numbered."""
    if message.sender == "ALPHA":
        actor.came("ALPHA", message.body["number"])


def heard(actor: Actor, message: Message) -> None:
    """Count the crash of a node that was killed; WebSockets break off, too."""
    actor.counts["crashes heard"] += message.ident.startswith("MORTAL.")


def send(actor: Actor, alpha: Node) -> None:
    """Send to all listeners, now and then more than a notification holds."""
    for number in actor.every(0.05):
        text = LARGE if number % 20 == 0 else "small"
        # Counted before: the soak may end while it is sent.
        actor.counts["sent"] = number
        alpha.topic_send("TALK", {"number": number, "text": text})
        if number % 10 == 0:
            with suppress(NoListeners):
                alpha.topic_send("CHANGING", number)


def call(actor: Actor, alpha: Node) -> None:
    """Ask BETA, with large questions among them."""
    for number in actor.every(0.2):
        question = LARGE if number % 10 == 0 else number
        if alpha.call("BETA", question, timeout=PATIENCE) != question:
            actor.counts["doubled"] += 1
        actor.counts["calls"] += 1


def passed_over(alpha: Node) -> None:
    """Take what comes to ALPHA."""
    for _ in alpha.messages():
        pass


def listen_again(actor: Actor, xray: Node) -> None:
    """Listen whenever the rules allow it: the right goes and comes back."""
    threading.Thread(target=lambda: passed_over(xray), daemon=True).start()
    for _ in actor.every(0.3):
        try:
            actor.counts["listened again"] += xray.topic_listen("CHANGING")
        except MessagesError as error:
            if error.number not in (2, 3, 9):
                raise
            actor.counts["refused"] += 1


if __name__ == "__main__":
    sys.exit(main())
