"""Queues: a look that takes nothing, and streams that take each element once."""

from itertools import chain
from typing import Any

import pytest

from psqlmessages.exceptions import DestinationNotAuthorized, ModeNotAuthorized
from psqlmessages.pipeline import reader as reader_module
from psqlmessages.pipeline.data_source import MessagesSource
from tests.pipeline.driving import Query, Source


def sizes(source: Source) -> tuple[int, int]:
    answer = source.world.program("user2").ok("sizes", "READ", "Q")
    return answer["Available"], answer["Reserved"]


def look(dsn_file: str, queue: str = "Q", client: str = "READ") -> list[dict[str, Any]]:
    source = MessagesSource({"queue": queue, "client": client, "dsnFile": dsn_file})
    reader = source.reader(source.schema())
    batches = chain.from_iterable(map(reader.read, reader.partitions()))
    rows = [row for batch in batches for row in batch.to_pylist()]
    reader_module._connections.close()
    return rows


def planned(source: Source, *bodies: str, **options: Any) -> Query:
    source.push(*bodies)
    query = source.query(queue="Q", **options)
    query.begin(planned=True)
    return query


def test_a_look_takes_nothing(source: Source):
    source.sender.ok("push", "SEND", "Q", "1", None, '{"a": [1]}')
    (row,) = look(source.dsn_file)
    found = [row[name] for name in ("queue", "body", "headers", "state", "tries")]
    assert found == ["Q", "1", '{"a": [1]}', "available", 0]
    assert sizes(source) == (1, 0)


def test_neither_a_look_nor_a_stream_is_allowed_without_a_rule(source: Source):
    source.world.rules("user2 OTHER Queue ELSE R 10")
    with pytest.raises(DestinationNotAuthorized):
        look(source.dsn_file, client="OTHER")
    with pytest.raises(DestinationNotAuthorized):
        planned(source, "1", client="OTHER")
    source.world.rules("user2 OTHER Queue Q W 10")
    with pytest.raises(ModeNotAuthorized, match="rule of role user2 and node OTHER in"):
        planned(source, "1", client="OTHER")


def test_a_query_takes_each_available_element_once(source: Source):
    bodies = [str(number) for number in range(10)]
    source.push(*bodies)
    query = source.query(queue="Q", maxRowsPerTrigger=4)
    batches = query.available_now()
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(chain.from_iterable(batches)) == bodies
    assert sizes(source) == (0, 0)
    source.push("before")
    query.reader.prepareForTriggerAvailableNow()
    source.push("later")
    assert [query.bodies(), query.bodies()] == [["before"], []]
    assert sizes(source) == (1, 0)
    source.push(*map(str, range(4000)))
    assert len(set(source.query(queue="Q", maxRowsPerTrigger=3500).bodies())) == 3500


def test_a_streamed_element_has_all_columns_and_any_name(source: Source):
    queue = "Q'\\\" $1 %s ü"
    source.sender.ok("push", "SEND", queue, "it's \\ \n", "json", '{"x-hop-count": 3}')
    assert look(source.dsn_file, queue)[0]["queue"] == queue
    (row,) = source.query(queue=queue).batch()
    assert {name: row[name] for name in row if name not in ("id", "mature", "pushed_at")} == {
        "queue": queue, "body": "it's \\ \n", "enc": "json", "headers": '{"x-hop-count": 3}',
        "tries": 0, "hops": 3, "state": "reserved",
    }  # fmt: skip


def test_a_batch_is_committed_once_it_is_done_and_read_again_after_a_crash(source: Source):
    query = planned(source, "1", "2")
    first = query.read()
    query.restart()
    # The offset contains the leases of both.
    assert len(query.end["leases"]) == 2 * 32
    source.push("3")
    assert sizes(source) == (1, 2)
    assert first == query.read()
    query.done()
    # Spark calls commit() for this batch only after the next one is planned.
    query.plan()
    assert sizes(source) == (0, 1)
    assert [row["body"] for row in query.read()] == ["3"]
    query.done()
    query.plan()
    assert sizes(source) == (0, 0)


def test_an_element_with_a_lost_lease_is_skipped_and_reported(source: Source, caplog):
    query = planned(source, "1", "2", "3", partitions=1)
    query.restart()
    source.owner.execute("UPDATE psqlmessages_element SET available_at = now() WHERE body = '2'")
    (other,) = source.world.program("user2").elements("reserve", "READ", "Q", 1, 60.0)
    assert sorted(row["body"] for row in query.read()) == ["1", "3"]
    assert "1 of 3 elements of queue Q are missing" in caplog.text
    source.world.program("user2").ok("release", "READ", [other.lease])
    query.done()
    assert query.bodies() == ["2"]


def test_leases_are_renewed_while_a_batch_takes_long(source: Source):
    planned(source, "1", timeout=3)
    available = "SELECT available_at FROM psqlmessages_element"
    before = source.owner.query(available)
    source.world.wait_for(f"SELECT ({available}) > %s + interval '0.5 s'", before)
