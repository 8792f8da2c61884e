"""PostgreSQL restarts under twenty nodes: each comes back as it was, once, and says little."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from psqlmessages import Node, Options
from tests.client.nodes import Driven
from tests.servers import SERVER
from tests.temporary_server import temporary_server

NODES = [(kind, f"{kind.__name__}.{number}") for kind in (Node, Driven) for number in range(10)]
LONG = timedelta(minutes=3)
# Twenty connections at once may keep a slow machine busy for longer than a probe takes by itself.
PATIENT = Options(probe_timeout=LONG, reconnect_wait=LONG)
RULES = ", ".join(
    f"('psqlmessages', '{kind}.*', 'Topic', 'T', 'RW', 5)" for kind in ("Node", "Driven")
)


def events_until_the_last(node: Any) -> list[str]:
    """Return how often the node says that it is back, until the last message comes."""
    seen = []
    for message in node.messages(timeout=LONG):
        if message.body == "last":
            break
        seen.append(message.event)
    return [event for event in seen if event == "reconnected"]


# The other way is nightly, as each has a server of its own.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [pytest.param("fast", marks=pytest.mark.nightly), "immediate"])
def test_twenty_nodes_return_once_and_log_little(tmp_path: Path, pytestconfig, caplog, how: str):
    caplog.set_level(logging.INFO, "psqlmessages")
    binaries = pytestconfig.stash[SERVER].binaries
    with ExitStack() as stack, ThreadPoolExecutor(len(NODES)) as pool:
        own = stack.enter_context(temporary_server(tmp_path, binaries, rules=RULES))
        nodes = [kind(ident, own.url(), options=PATIENT) for kind, ident in NODES]
        for node in nodes:
            stack.callback(node.end if isinstance(node, Driven) else node.close)
            node.open()
            node.topic_listen("T")
            node.topic_notify("T")
        waits = [pool.submit(events_until_the_last, node) for node in nodes]
        stopped_at = monotonic()
        own.server.stop(how)
        own.server.start()
        while set(nodes[0].topic_status("T").listeners) != {ident for _, ident in NODES}:
            assert monotonic() - stopped_at < LONG.total_seconds()
        nodes[0].topic_send("T", "last")
        assert [wait.result() for wait in waits] == [["reconnected"]] * len(nodes)
        assert len(nodes[0].topic_status("T").notifiers) == len(nodes)
    # That it is lost and that it is back, and every ten seconds that there is nothing yet.
    tens = ceil((monotonic() - stopped_at) / 10)
    assert len(caplog.records) <= (2 + tens) * len(NODES), caplog.text
