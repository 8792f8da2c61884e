"""Columns of the source: their types, and Spark filters as SQL conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import datasource as spark
from pyspark.sql import types

from psqlmessages.pipeline import literals
from psqlmessages.pipeline.errors import ColumnRefused
from psqlmessages.wire import MAX_ID


def _schema(**columns: types.DataType) -> types.StructType:
    return types.StructType([types.StructField(name, type_) for name, type_ in columns.items()])


TOPIC_SCHEMA: Final = _schema(
    id=types.LongType(),
    topic=types.StringType(),
    sender=types.StringType(),
    body=types.StringType(),
    enc=types.StringType(),
    headers=types.StringType(),
    published_at=types.TimestampType(),
)
QUEUE_SCHEMA: Final = _schema(
    id=types.LongType(),
    queue=types.StringType(),
    body=types.StringType(),
    enc=types.StringType(),
    headers=types.StringType(),
    mature=types.TimestampType(),
    tries=types.IntegerType(),
    hops=types.IntegerType(),
    pushed_at=types.TimestampType(),
    state=types.StringType(),
)


def column_names(schema: types.StructType, known: types.StructType) -> tuple[str, ...]:
    """Return the column names of a schema; raise ColumnRefused if one is unknown."""
    names = tuple(schema.fieldNames())
    unknown = [name for name in names if name not in known.fieldNames()]
    if unknown:
        raise ColumnRefused(
            f"unknown column {', '.join(unknown)}. Known columns: {', '.join(known.fieldNames())}"
        )
    return names


def cast_batch(
    batch: pa.RecordBatch, schema: pa.Schema, constants: Mapping[str, str | None]
) -> pa.RecordBatch:
    """Cast a batch to a schema, column by column; raise ColumnRefused if a cast fails.

    ``constants`` has the columns that the batch lacks because all their values are equal. The batch
    begins with the other columns, in the order of the schema. Its further columns are dropped.
    """
    columns = []
    batch_columns = iter(batch.columns)
    for field in schema:
        if field.name in constants:
            column = pa.repeat(pa.scalar(constants[field.name], pa.string()), batch.num_rows)
        else:
            column = next(batch_columns)
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise ColumnRefused(
                f"cannot cast column {field.name} to {field.type}: {error}"
            ) from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# Filters that PostgreSQL evaluates with the same result as Spark.

_FILTERED_COLUMNS: Final = ("id", "topic", "sender", "published_at")
_COMPARISONS: Final[dict[type[spark.Filter], str]] = {
    spark.GreaterThan: ">",
    spark.GreaterThanOrEqual: ">=",
    spark.LessThan: "<",
    spark.LessThanOrEqual: "<=",
}


@dataclass(frozen=True)
class Condition:
    """A filter as SQL. Only rows of ``topics`` (None: all) with ids in (low, high] can match.

    If ``is_exact``, all these rows match, so PostgreSQL need not evaluate the filter.
    """

    sql: str
    topics: frozenset[str] | None = None
    low: int = -MAX_ID
    high: int = MAX_ID
    is_exact: bool = False


def to_condition(filter_: Any, schema: types.StructType) -> Condition | None:
    """Convert a Filter of Spark to SQL; return None if Spark must evaluate it."""
    if isinstance(filter_, spark.Not):
        inner = to_condition(filter_.child, schema)
        if inner is None or not isinstance(filter_.child, spark.EqualTo | spark.In):
            return None
        return Condition(f"NOT ({inner.sql})")
    name = ".".join(getattr(filter_, "attribute", ()))
    type_ = schema[name].dataType if name in schema.fieldNames() else None
    # If the schema of the user changes the type of the column, Spark must evaluate the filter.
    if name not in _FILTERED_COLUMNS or type_ != TOPIC_SCHEMA[name].dataType:
        return None
    if isinstance(filter_, spark.IsNull | spark.IsNotNull):
        is_null = isinstance(filter_, spark.IsNull)
        # These columns are never null.
        return Condition(f"{name} IS {'' if is_null else 'NOT '}NULL", is_exact=not is_null)
    try:
        return _convert_comparison(filter_, name)
    except ValueError:
        # PostgreSQL cannot store the value, so Spark must evaluate the filter.
        return None


def matching_topics(topics: Iterable[str], conditions: Sequence[Condition]) -> list[str]:
    """Return the topics that may have a row that meets all conditions."""
    topic_sets = [c.topics for c in conditions if c.topics is not None]
    return [topic for topic in topics if all(topic in topic_set for topic_set in topic_sets)]


def limit_ids(low: int, high: int, conditions: Sequence[Condition]) -> tuple[int, int]:
    """Return the range of ids that may meet all conditions: above low, up to high."""
    low = max([low, *(c.low for c in conditions)])
    return low, max(low, min([high, *(c.high for c in conditions)]))


def _convert_comparison(filter_: Any, name: str) -> Condition | None:
    value = filter_.value
    if isinstance(filter_, spark.EqualTo | spark.EqualNullSafe | spark.In):
        values = value if isinstance(filter_, spark.In) else [value]
        if None in values or not values:
            return None
        return _in_condition(name, values)
    operator = _COMPARISONS.get(type(filter_))
    # PostgreSQL compares text by collation, Spark by bytes.
    if value is None or operator is None or name in ("topic", "sender"):
        return None
    sql = f"{name} {operator} {_sql_literal(name, value)}"
    if name != "id":
        return Condition(sql)
    if operator.startswith(">"):
        return Condition(sql, low=value - (operator == ">="), is_exact=True)
    return Condition(sql, high=value - (operator == "<"), is_exact=True)


def _in_condition(name: str, values: Sequence[Any]) -> Condition:
    sql = f"{name} IN ({', '.join(_sql_literal(name, value) for value in values)})"
    if name == "topic":
        return Condition(sql, frozenset(values), is_exact=True)
    if name == "id":
        low, high = min(values) - 1, max(values)
        # Exact if the range has only one id.
        return Condition(sql, low=low, high=high, is_exact=high - low == 1)
    return Condition(sql)


def _sql_literal(name: str, value: Any) -> str:
    """Return a value of a column as SQL; raises ValueError if the column cannot store it."""
    if name == "id" and type(value) is int and abs(value) <= MAX_ID:
        return f"({value})::bigint"
    if name in ("topic", "sender") and isinstance(value, str):
        return literals.text(value)
    if name == "published_at" and isinstance(value, datetime):
        return literals.timestamp(value)
    raise ValueError(f"{value!r} is not a value of {name}")
