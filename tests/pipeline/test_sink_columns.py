"""What the sink refuses of options and columns, and how batches are staged. Without Spark."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructType,
)

from psqlmessages.pipeline import sink
from psqlmessages.pipeline.errors import ColumnRefused, OptionRefused
from psqlmessages.pipeline.sink_columns import staged

STRING, BINARY = StringType(), BinaryType()
PAIR = StructType().add("a", STRING)
EITHER = "either the option topic or the option queue"
COLUMNS: tuple[tuple[list[tuple[str, DataType]], str], ...] = (
    ([("enc", STRING)], "the column body is missing"),
    ([("body", STRING), ("id", STRING)], "not a column to write: id. Known are body, enc"),
    ([("body", STRING), ("key", STRING)], "not a column to write: key"),
    ([("body", STRING), ("body", STRING)], "twice"),
    ([("body", PAIR)], "to_json(body) AS body, 'json' AS enc"),
    ([("body", ArrayType(STRING))], "to_json(body) AS body"),
    ([("body", MapType(STRING, STRING))], "to_json(body) AS body"),
    ([("body", LongType())], "of type bigint, not a string or binary"),
    ([("body", NullType())], "CAST(body AS string)"),
    ([("body", STRING), ("enc", BINARY)], "the column enc is of type binary, not a string"),
    ([("body", BINARY), ("enc", STRING)], "a binary body is stored as b64"),
)
OPTIONS: tuple[tuple[dict[str, str], str], ...] = (
    ({"topic": "A", "topics": "B"}, "known are client, dsnFile, query, queue, topic"),
    ({"topic": "A", "startingOffsets": "latest"}, "unknown option startingoffsets"),
    ({"topic": "A", "path": "/x"}, "unknown option path"),
    ({"topic": "A", "queue": "B"}, EITHER),
    ({}, EITHER),
)


def refusal(options: dict[str, str], columns: list[tuple[str, DataType]]) -> str:
    """What making a writer is refused with; nothing if it is not."""
    schema = StructType()
    for name, kind in columns:
        schema = schema.add(name, kind)
    try:
        sink.stream_writer(options, schema, overwrite=False)
    except (ColumnRefused, OptionRefused) as error:
        return str(error)
    return ""


def test_columns_and_options_that_the_sink_does_not_know_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Refused before a database is looked for: there is none.
    monkeypatch.setenv("PSQLMESSAGES_DSN", "host=127.0.0.1 port=1")
    found = [(refusal({"topic": "A"}, columns), told) for columns, told in COLUMNS]
    found += [(refusal(options, [("body", STRING)]), told) for options, told in OPTIONS]
    headers: list[tuple[str, DataType]] = [("body", STRING), ("headers", PAIR)]
    found.append((refusal({"queue": "A"}, headers), "to_json(headers) AS headers"))
    assert [pair for pair in found if pair[1] not in pair[0]] == []


@pytest.mark.parametrize(
    ("rows", "size", "lengths"),
    [(450, 10, [200, 200, 50]), (3, 100_000, [1, 1, 1]), (100, 3_000, [21, 21, 21, 21, 16])],
)
def test_chunks_hold_some_hundred_bodies_or_some_kilobytes(
    rows: int, size: int, lengths: list[int]
) -> None:
    bodies = [f"{number:06}".ljust(size) for number in range(rows)]
    columns: dict[str, Any] = {"x": bodies, "e": [None] * (rows - 1) + ["json"]}
    batch = pa.record_batch({name: pa.array(values) for name, values in columns.items()})
    # Places count over all batches, and empty ones are left out.
    found = list(staged(iter([batch.slice(0, 0), batch, batch]), ["body", "enc"]))
    chunks, encs = found[0]["bodies"].to_pylist(), found[0]["encs"].to_pylist()
    assert [len(chunk) for chunk in chunks] == lengths == [len(chunk) for chunk in encs]
    assert list(chain.from_iterable(chunks)) == bodies
    assert list(chain.from_iterable(encs)) == columns["e"]
    places = [place for batch in found for place in batch["place"].to_pylist()]
    assert places == list(range(2 * len(lengths)))
