"""What the sink refuses of options and columns, and how batches are staged. Without Spark."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import pytest

from psqlmessages.pipeline.errors import ColumnRefused, OptionRefused

pa = pytest.importorskip("pyarrow")
types = pytest.importorskip("pyspark.sql.types")

from psqlmessages.pipeline import sink  # noqa: E402
from psqlmessages.pipeline.sink_columns import (  # noqa: E402
    QUEUE_COLUMNS,
    TOPIC_COLUMNS,
    check,
    staged,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

STRING, BINARY = types.StringType(), types.BinaryType()
PAIR = types.StructType().add("a", STRING)


def schema(**columns: types.DataType) -> StructType:
    made = types.StructType()
    for name, kind in columns.items():
        made = made.add(name, kind)
    return made


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"enc": STRING}, "the column body is missing"),
        ({"body": STRING, "id": STRING}, "not a column to write: id. Known are body, enc"),
        ({"body": STRING, "key": STRING}, "not a column to write: key"),
        ({"body": PAIR}, "to_json(body) AS body, 'json' AS enc"),
        ({"body": types.ArrayType(STRING)}, "to_json(body) AS body"),
        ({"body": types.MapType(STRING, STRING)}, "to_json(body) AS body"),
        ({"body": types.LongType()}, "of type bigint, not a string or binary"),
        ({"body": types.NullType()}, "CAST(body AS string)"),
        ({"body": STRING, "enc": BINARY}, "the column enc is of type binary, not a string"),
        ({"body": BINARY, "enc": STRING}, "a binary body is stored as b64"),
    ],
)
def test_columns_that_a_topic_does_not_take_are_refused(
    columns: dict[str, types.DataType], told: str
) -> None:
    with pytest.raises(ColumnRefused) as raised:
        check(schema(**columns), TOPIC_COLUMNS)
    assert told in str(raised.value)


def test_a_queue_takes_headers_as_text_only() -> None:
    check(schema(body=STRING, headers=STRING, key=STRING, enc=STRING), QUEUE_COLUMNS)
    with pytest.raises(ColumnRefused, match=r"to_json\(headers\) AS headers$"):
        check(schema(body=STRING, headers=PAIR), QUEUE_COLUMNS)


def test_a_column_that_is_there_twice_is_refused() -> None:
    twice = types.StructType().add("body", STRING).add("body", STRING)
    with pytest.raises(ColumnRefused, match="twice"):
        check(twice, TOPIC_COLUMNS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"topic": "A", "topics": "B"}, "known are client, dsnFile, query, queue, topic"),
        ({"topic": "A", "startingOffsets": "latest"}, "unknown option startingoffsets"),
        ({"topic": "A", "path": "/x"}, "unknown option path"),
        ({"topic": "A", "queue": "B"}, "either the option topic or the option queue"),
        ({}, "either the option topic or the option queue"),
    ],
)
def test_options_that_the_sink_does_not_know_are_refused(
    options: dict[str, str], told: str
) -> None:
    with pytest.raises(OptionRefused) as raised:
        sink.batch_writer(options, schema(body=STRING), overwrite=False)
    assert told in str(raised.value)


def test_places_count_over_all_batches_and_empty_ones_are_left_out() -> None:
    batches = [pa.record_batch({"x": pa.array(bodies)}) for bodies in (["a", None], ["b"])]
    empty = batches[0].slice(0, 0)
    found = list(staged(iter([empty, *batches, empty]), ["body"]))
    assert [batch["place"].to_pylist() for batch in found] == [[0], [1]]
    assert [batch["bodies"].to_pylist() for batch in found] == [[["a", ""]], [["b"]]]


@pytest.mark.parametrize(
    ("rows", "size", "lengths"),
    [(450, 10, [200, 200, 50]), (3, 100_000, [1, 1, 1]), (100, 3_000, [21, 21, 21, 21, 16])],
)
def test_chunks_hold_some_hundred_bodies_or_some_kilobytes(
    rows: int, size: int, lengths: list[int]
) -> None:
    bodies = [f"{number:06}".ljust(size) for number in range(rows)]
    columns = {"x": pa.array(bodies), "e": pa.array([None] * (rows - 1) + ["json"])}
    (found,) = staged(iter([pa.record_batch(columns)]), ["body", "enc"])
    chunks, encs = found["bodies"].to_pylist(), found["encs"].to_pylist()
    assert [len(chunk) for chunk in chunks] == lengths == [len(chunk) for chunk in encs]
    assert list(chain.from_iterable(chunks)) == bodies
    assert list(chain.from_iterable(encs)) == [None] * (rows - 1) + ["json"]
