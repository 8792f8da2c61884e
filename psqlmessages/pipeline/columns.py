"""Columns of the source: Spark and Arrow types, and filters pushed to SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
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

from psqlmessages.pipeline import literals
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
    """Return the column names of a schema; raises ColumnRefused if one is unknown."""
    names = tuple(schema.fieldNames())
    unknown = [name for name in names if name not in known.fieldNames()]
    if unknown:
        raise ColumnRefused(
            f"unknown column {', '.join(unknown)}. Known columns: {', '.join(known.fieldNames())}"
        )
    return names


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects batches of a schema to have."""
    return to_arrow_schema(schema, timezone="UTC")


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
        if column.type == field.type:
            columns.append(column)
            continue
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise ColumnRefused(
                f"cannot cast column {field.name} to {field.type}: {error}"
            ) from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# Filters: Spark filters that PostgreSQL evaluates with the same result, as SQL. Pure functions.

PUSHED: Final = ("id", "topic", "sender", "published_at")

_EQUALITIES: Final = (EqualTo, EqualNullSafe)
_COMPARISONS: Final[dict[type[Filter], str]] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_MOST_ID: Final = 2**63 - 1
# The range of ids for which a comparison is true: lower bound exclusive, upper bound inclusive.
_BOUNDS: Final[dict[type[Filter], Callable[[int], tuple[int, int]]]] = {
    GreaterThan: lambda id_: (id_, _MOST_ID),
    GreaterThanOrEqual: lambda id_: (id_ - 1, _MOST_ID),
    LessThan: lambda id_: (-_MOST_ID, id_ - 1),
    LessThanOrEqual: lambda id_: (-_MOST_ID, id_),
}


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


def condition(filter_: Filter, schema: StructType) -> Condition | None:
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


def _condition(filter_: Filter, schema: StructType) -> Condition | None:
    if isinstance(filter_, Not):
        inner = _condition(filter_.child, schema)
        if inner is None or not isinstance(filter_.child, EqualTo | In):
            return None
        return Condition(f"NOT ({inner.sql})")
    name = _column(filter_)
    if name is None or name not in PUSHED or name not in schema.fieldNames():
        return None
    if isinstance(filter_, IsNull | IsNotNull):
        is_null = isinstance(filter_, IsNull)
        # None of these columns is ever null.
        return Condition(f"{name} IS {'' if is_null else 'NOT '}NULL", is_by_range=not is_null)
    constant = _constant_of(name, schema[name].dataType)
    return None if constant is None else _compared(filter_, name, constant)


def _compared(filter_: Any, name: str, constant: Callable[[Any], str]) -> Condition | None:
    if isinstance(filter_, In):
        if None in filter_.value or not filter_.value:
            return None
        values = ", ".join(constant(value) for value in filter_.value)
        return _bound(f"{name} IN ({values})", name, filter_.value)
    if isinstance(filter_, _EQUALITIES) and filter_.value is not None:
        return _bound(f"{name} = {constant(filter_.value)}", name, [filter_.value])
    operator = _COMPARISONS.get(type(filter_))
    # PostgreSQL compares text by collation, Spark by bytes.
    if filter_.value is None or operator is None or name in ("topic", "sender"):
        return None
    sql = f"{name} {operator} {constant(filter_.value)}"
    if name != "id":
        return Condition(sql)
    low, high = _BOUNDS[type(filter_)](filter_.value)
    return Condition(sql, low=low, high=high, is_by_range=True)


def _column(filter_: Any) -> str | None:
    path: tuple[str, ...] = getattr(filter_, "attribute", ())
    return path[0] if len(path) == 1 else None


def _bound(sql: str, name: str, values: Sequence[Any]) -> Condition:
    if name == "topic":
        return Condition(sql, frozenset(values), is_by_range=True)
    if name == "id":
        low, high = min(values) - 1, max(values)
        return Condition(sql, low=low, high=high, is_by_range=high - low == 1)
    return Condition(sql)


def _constant_of(name: str, type_: DataType) -> Callable[[Any], str] | None:
    """Return the function that writes a column's values as SQL; None if its type is unusual."""
    if name == "id" and isinstance(type_, LongType):
        return _id
    if name in ("topic", "sender") and type_ == StringType():
        return _text
    if name == "published_at" and isinstance(type_, TimestampType):
        return _moment
    return None


def _id(value: Any) -> str:
    if type(value) is not int or abs(value) > _MOST_ID:
        raise ValueError(f"{value!r} is not an id")
    return f"({value})::bigint"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")  # noqa: TRY004 - left to Spark, like values PostgreSQL cannot store
    return literals.text(value)


def _moment(value: Any) -> str:
    if not isinstance(value, datetime):
        raise ValueError(f"{value!r} is not a time")  # noqa: TRY004 - likewise
    return literals.moment(value)
