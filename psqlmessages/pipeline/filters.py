"""Filters: those of Spark that PostgreSQL can judge alike, as conditions of SQL. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

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
from pyspark.sql.types import DataType, LongType, StringType, StructType, TimestampType

from psqlmessages.pipeline import literals

PUSHED: Final = ("id", "topic", "sender", "published_at")

_EQUALITIES: Final = (EqualTo, EqualNullSafe)
_COMPARISONS: Final[dict[type[Filter], str]] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_MOST_ID: Final = 2**63 - 1


@dataclass(frozen=True)
class Condition:
    """A filter as SQL. ``topics``: outside of these it is false; None: it does not say."""

    sql: str
    topics: frozenset[str] | None = None


def condition(filter_: Filter, schema: StructType) -> Condition | None:
    """Return a filter as SQL; None where it is to be left to Spark."""
    try:
        return _condition(filter_, schema)
    except ValueError:
        # A value that PostgreSQL cannot hold: nothing there equals it, but Spark may know better.
        return None


def topics_left(topics: Iterable[str], conditions: Sequence[Condition]) -> list[str]:
    """Return those topics of which a row may meet all conditions."""
    bounds = [c.topics for c in conditions if c.topics is not None]
    return [topic for topic in topics if all(topic in bound for bound in bounds)]


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
        return Condition(f"{name} IS {'' if isinstance(filter_, IsNull) else 'NOT '}NULL")
    constant = _constant_of(name, schema[name].dataType)
    return None if constant is None else _compared(filter_, name, constant)


def _compared(filter_: Any, name: str, constant: Callable[[Any], str]) -> Condition | None:
    if isinstance(filter_, In):
        if None in filter_.value or not filter_.value:
            return None
        values = ", ".join(constant(value) for value in filter_.value)
        return Condition(f"{name} IN ({values})", _bound(name, filter_.value))
    if filter_.value is None:
        return None
    if isinstance(filter_, _EQUALITIES):
        return Condition(f"{name} = {constant(filter_.value)}", _bound(name, [filter_.value]))
    operator = _COMPARISONS.get(type(filter_))
    # Text compares in a collation here, and by bytes in Spark.
    if operator is None or name in ("topic", "sender"):
        return None
    return Condition(f"{name} {operator} {constant(filter_.value)}")


def _column(filter_: Any) -> str | None:
    path: tuple[str, ...] = getattr(filter_, "attribute", ())
    return path[0] if len(path) == 1 else None


def _bound(name: str, values: Iterable[str]) -> frozenset[str] | None:
    return frozenset(values) if name == "topic" else None


def _constant_of(name: str, type_: DataType) -> Callable[[Any], str] | None:
    """Return how to write a value of a column, where it is declared with the type it has."""
    if name == "id" and isinstance(type_, LongType):
        return _id
    if name in ("topic", "sender") and type_ == StringType():
        return _text
    if name == "published_at" and isinstance(type_, TimestampType):
        return _moment
    return None


def _id(value: Any) -> str:
    if type(value) is not int or abs(value) > _MOST_ID:
        raise ValueError(f"{value!r} is no id")
    return f"({value})::bigint"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")  # noqa: TRY004 - left to Spark, as what cannot be held
    return literals.text(value)


def _moment(value: Any) -> str:
    if not isinstance(value, datetime):
        raise ValueError(f"{value!r} is no time")  # noqa: TRY004 - likewise
    return literals.moment(value)
