"""Messages through bad conditions: none is lost, none doubled, none read that was rolled back."""

from collections.abc import Iterator

import pytest

from tests.reliability.counts import report, size
from tests.sql.conftest import World
from tests.streams.flow import Flow

FAULT = "publishers commit in random order and roll back"
BAD = "lost", "duplicated", "rolled_back_but_read"


@pytest.fixture
def unrelated(world: World) -> Iterator[None]:
    other = world.program("user1")
    other.execute("BEGIN")
    other.execute("CREATE TEMP TABLE unrelated AS SELECT 1")
    yield
    assert other.query("SELECT count(*) FROM unrelated") == 1
    other.execute("ROLLBACK")


@pytest.mark.versions
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("unrelated")
# The nightly run takes the minutes of the full size.
@pytest.mark.parametrize(
    "messages", [size(3_000, 100_000), pytest.param(100_000, marks=pytest.mark.nightly)]
)
def test_no_message_is_lost_doubled_or_read_if_rolled_back(world: World, messages: int):
    flow = Flow(world.server.url(), messages)
    counts = flow.run()
    report(FAULT, "8 publishers, a tenth rolled back; the reader is killed", **counts)
    assert [counts[bad] for bad in BAD] == [0, 0, 0]
    assert counts["committed"] >= messages
    assert counts["rolled_back"] > messages / 100
    assert min(counts["reader_kills"], counts["reader_rollbacks"]) > 0
    assert messages < 100_000 or flow.emptied > 5
