"""Columns of the source: Spark and Arrow types, and filters pushed to SQL."""

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


def _schema(**columns: types.DataType) -> types.StructType:
    return types.StructType([types.StructField(name, type_) for name, type_ in columns.items()])


TOPIC: Final = _schema(
    id=types.LongType(),
    topic=types.StringType(),
    sender=types.StringType(),
    body=types.StringType(),
    enc=types.StringType(),
    headers=types.StringType(),
    published_at=types.TimestampType(),
)
QUEUE: Final = _schema(
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


def chosen(schema: types.StructType, known: types.StructType) -> tuple[str, ...]:
    """Return the column names of a schema; raises ColumnRefused if one is unknown."""
    names = tuple(schema.fieldNames())
    unknown = [name for name in names if name not in known.fieldNames()]
    if unknown:
        raise ColumnRefused(
            f"unknown column {', '.join(unknown)}. Known columns: {', '.join(known.fieldNames())}"
        )
    return names


def fitted(
    batch: pa.RecordBatch, schema: pa.Schema, constants: Mapping[str, str | None]
) -> pa.RecordBatch:
    """Cast a batch to a schema, column by column; raises ColumnRefused if a cast fails.

    The batch lacks the columns in ``constants``, whose value is the same in each row. It has extra
    columns after those of the schema.
    """
    columns = []
    read = iter(batch.columns)
    for field in schema:
        if field.name in constants:
            value = pa.scalar(constants[field.name], pa.string())
            column = pa.repeat(value, batch.num_rows)
        else:
            column = next(read)
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise ColumnRefused(
                f"cannot cast column {field.name} to {field.type}: {error}"
            ) from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# Filters: Spark filters that PostgreSQL evaluates with the same result, as SQL. Pure functions.

_COMPARISONS: Final[dict[type[spark.Filter], str]] = {
    spark.GreaterThan: ">",
    spark.GreaterThanOrEqual: ">=",
    spark.LessThan: "<",
    spark.LessThanOrEqual: "<=",
}
_MOST_ID: Final = 2**63 - 1


@dataclass(frozen=True)
class Condition:
    """A filter as SQL, with the topics and the range of ids for which it can be true.

    ``is_by_range``: the filter is true for all rows of that range, so no row needs filtering.
    """

    sql: str
    topics: frozenset[str] | None = None
    low: int = -_MOST_ID
    high: int = _MOST_ID
    is_by_range: bool = False


def condition(filter_: spark.Filter, schema: types.StructType) -> Condition | None:
    """Return a filter as SQL; None if Spark has to evaluate it."""
    try:
        return _condition(filter_, schema)
    except ValueError:
        # A value that PostgreSQL cannot store equals nothing there; Spark may see that differently.
        return None


def topics_left(topics: Iterable[str], conditions: Sequence[Condition]) -> list[str]:
    """Return the topics that may have a row that meets all conditions."""
    bounds = [c.topics for c in conditions if c.topics is not None]
    return [topic for topic in topics if all(topic in bound for bound in bounds)]


def bounded(low: int, high: int, conditions: Sequence[Condition]) -> tuple[int, int]:
    """Return the range of ids that may meet all conditions: low exclusive, high inclusive."""
    low = max([low, *(c.low for c in conditions)])
    return low, max(low, min([high, *(c.high for c in conditions)]))


def _condition(filter_: Any, schema: types.StructType) -> Condition | None:
    if isinstance(filter_, spark.Not):
        inner = _condition(filter_.child, schema)
        if inner is None or not isinstance(filter_.child, spark.EqualTo | spark.In):
            return None
        return Condition(f"NOT ({inner.sql})")
    name = ".".join(getattr(filter_, "attribute", ()))
    if name not in schema.fieldNames() or not _is_pushed(name, schema[name].dataType):
        return None
    if isinstance(filter_, spark.IsNull | spark.IsNotNull):
        is_null = isinstance(filter_, spark.IsNull)
        # None of these columns is ever null.
        return Condition(f"{name} IS {'' if is_null else 'NOT '}NULL", is_by_range=not is_null)
    return _compared(filter_, name)


def _compared(filter_: Any, name: str) -> Condition | None:
    value = filter_.value
    if isinstance(filter_, spark.EqualTo | spark.EqualNullSafe | spark.In):
        values = value if isinstance(filter_, spark.In) else [value]
        if None in values or not values:
            return None
        return _among(name, values)
    operator = _COMPARISONS.get(type(filter_))
    # PostgreSQL compares text by collation, Spark by bytes.
    if value is None or operator is None or name in ("topic", "sender"):
        return None
    sql = f"{name} {operator} {_constant(name, value)}"
    if name != "id":
        return Condition(sql)
    is_inclusive = operator.endswith("=")
    if operator.startswith(">"):
        return Condition(sql, low=value - is_inclusive, is_by_range=True)
    return Condition(sql, high=value - (not is_inclusive), is_by_range=True)


def _is_pushed(name: str, type_: types.DataType) -> bool:
    """Return whether a column has filters pushed down; not if its type is unusual."""
    if name == "id":
        return isinstance(type_, types.LongType)
    if name == "published_at":
        return isinstance(type_, types.TimestampType)
    return name in ("topic", "sender") and type_ == types.StringType()


def _among(name: str, values: Sequence[Any]) -> Condition:
    sql = f"{name} IN ({', '.join(_constant(name, value) for value in values)})"
    if name == "topic":
        return Condition(sql, frozenset(values), is_by_range=True)
    if name == "id":
        low, high = min(values) - 1, max(values)
        return Condition(sql, low=low, high=high, is_by_range=high - low == 1)
    return Condition(sql)


def _constant(name: str, value: Any) -> str:
    """Return a value of a column as SQL; raises ValueError if PostgreSQL cannot store it."""
    if name == "id" and type(value) is int and abs(value) <= _MOST_ID:
        return f"({value})::bigint"
    if name in ("topic", "sender") and isinstance(value, str):
        return literals.text(value)
    if name == "published_at" and isinstance(value, datetime):
        return literals.moment(value)
    raise ValueError(f"{value!r} is not a value of {name}")
