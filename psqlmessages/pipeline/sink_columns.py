"""The columns that the sink takes, and how they become columns of messages.staged. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructType,
    VariantType,
)

from psqlmessages.pipeline.errors import ColumnRefused
from psqlmessages.wire import BASE64

# What a topic keeps of a row, and what a queue does.
TOPIC_COLUMNS: Final = ("body", "enc")
QUEUE_COLUMNS: Final = ("body", "enc", "headers", "key")

_ARRAYS: Final = {"body": "bodies", "enc": "encs", "headers": "headers", "key": "keys"}
# Of 200 bytes each, bodies take a third less of the server's time in arrays of 200 than one by one.
_CHUNK_ROWS: Final = 200
_CHUNK_BYTES: Final = 64 * 1024


def check(schema: StructType, known: Sequence[str]) -> None:
    """Refuse a DataFrame that cannot be written: raise ColumnRefused, which says what to do."""
    names = schema.fieldNames()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ColumnRefused(
            f"not a column to write: {', '.join(unknown)}. Known are {', '.join(known)};"
            ' choose them, as in df.select("body", "enc")'
        )
    if "body" not in names:
        raise ColumnRefused("the column body is missing: name it, as in df.select(… AS body)")
    if len(names) != len(set(names)):
        raise ColumnRefused(f"a column is there twice: {', '.join(names)}")
    for field in schema.fields:
        _check_type(field.name, field.dataType)
    if "enc" in names and isinstance(schema["body"].dataType, BinaryType):
        raise ColumnRefused("a binary body is stored as b64: leave the column enc out")


def _check_type(name: str, kind: DataType) -> None:
    if isinstance(kind, StringType) or (name == "body" and isinstance(kind, BinaryType)):
        return
    told = f"the column {name} is of type {kind.simpleString()}"
    if isinstance(kind, StructType | MapType | ArrayType | VariantType):
        hint = f"write it as JSON: to_json({name}) AS {name}"
        raise ColumnRefused(f"{told}: {hint}" + (", 'json' AS enc" if name == "body" else ""))
    wanted = "a string or binary" if name == "body" else "a string"
    raise ColumnRefused(f"{told}, not {wanted}: cast it, as in CAST({name} AS string)")


def staged(batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Turn rows into rows of messages.staged without names: each has arrays of some bodies.

    Binary bodies become base64, null ones empty. Places count from 0 over all batches. Batches
    without rows are left out.
    """
    place = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        # By place, not by name: Spark does not promise the names.
        columns = dict(zip(names, batch.columns, strict=True))
        body = columns["body"]
        if pa.types.is_binary(body.type) or pa.types.is_large_binary(body.type):
            body = _base64(body)
            columns["enc"] = pa.repeat(BASE64, batch.num_rows)
        # As publish and push do.
        columns["body"] = body.fill_null("")
        chunks = _chunks(batch.num_rows, columns["body"].nbytes)
        arrays = {
            _ARRAYS[name]: pa.ListArray.from_arrays(chunks, column)
            for name, column in columns.items()
        }
        count = len(chunks) - 1
        arrays["place"] = pa.array(range(place, place + count), pa.int64())
        place += count
        yield pa.RecordBatch.from_pydict(arrays)


def _chunks(rows: int, size: int) -> pa.Array:
    """Cut so many rows of so many bytes into chunks: where each begins, and the end."""
    step = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES * rows // max(size, 1)))
    return pa.array([*range(0, rows, step), rows], pa.int32())


def _base64(column: pa.Array) -> pa.Array:
    return pa.array([b64encode(v or b"").decode() for v in column.to_pylist()], pa.string())
