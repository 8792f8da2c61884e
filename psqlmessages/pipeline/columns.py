"""Columns of the source: their types in Spark and in Arrow, and those that a schema chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from psqlmessages.pipeline.errors import ColumnRefused


def _schema(**types: DataType) -> StructType:
    return StructType([StructField(name, type_) for name, type_ in types.items()])


TOPIC: Final = _schema(
    id=LongType(),
    topic=StringType(),
    sender=StringType(),
    body=StringType(),
    enc=StringType(),
    headers=StringType(),
    published_at=TimestampType(),
)
QUEUE: Final = _schema(
    id=LongType(),
    queue=StringType(),
    body=StringType(),
    enc=StringType(),
    headers=StringType(),
    mature=TimestampType(),
    tries=IntegerType(),
    hops=IntegerType(),
    pushed_at=TimestampType(),
    state=StringType(),
)


def chosen(schema: StructType, known: StructType) -> tuple[str, ...]:
    """Return the names of a schema's columns; raises ColumnRefused where one is not known."""
    names = tuple(schema.fieldNames())
    unknown = [name for name in names if name not in known.fieldNames()]
    if unknown:
        raise ColumnRefused(
            f"no column {', '.join(unknown)}; there are {', '.join(known.fieldNames())}"
        )
    return names


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects batches of a schema to have."""
    return to_arrow_schema(schema, timezone="UTC")


def fitted(
    batch: pa.RecordBatch, schema: pa.Schema, constants: Mapping[str, str | None]
) -> pa.RecordBatch:
    """Cast a batch to a schema, column by column; raises ColumnRefused where one cannot be.

    The batch lacks the columns that have the same ``constants`` in each row, and has further ones
    behind those of the schema.
    """
    columns = []
    read = iter(batch.columns)
    for field in schema:
        if field.name in constants:
            value = pa.scalar(constants[field.name], pa.string())
            column = pa.repeat(value, batch.num_rows)
        else:
            column = next(read)
        if column.type == field.type:
            columns.append(column)
            continue
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise ColumnRefused(f"column {field.name} is no {field.type}: {error}") from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)
