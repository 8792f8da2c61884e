"""Filters that PostgreSQL judges: the same rows as where Spark does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

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
    StringStartsWith,
)
from pyspark.sql.types import IntegerType, StringType, StructType

from psqlmessages.pipeline import columns
from psqlmessages.pipeline.filters import bounded, condition, topics_left
from psqlmessages.pipeline.options import SourceOptions
from psqlmessages.pipeline.topic_batch import FilteredTopicBatchReader
from tests.sql.conftest import World

TESTS: dict[type, Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    EqualNullSafe: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
    In: lambda a, b: a in b,
}
SENDERS = ("A", "a", "O'Neil", "back\\slash", "ü", " A")
MOMENT = datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)

LEFT: tuple[Filter, ...] = (
    EqualTo(("body",), "x"),
    EqualTo(("id", "part"), 1),
    EqualTo(("sender",), None),
    EqualTo(("sender",), "NUL \0"),
    EqualTo(("sender",), "\ud800"),
    In(("topic",), ("T", None)),
    LessThan(("sender",), "b"),
    StringStartsWith(("topic",), "T"),
    EqualTo(("id",), 2**63),
    EqualTo(("id",), True),
    EqualTo(("published_at",), "2030-01-01"),
    EqualTo(("published_at",), datetime(1, 1, 1, tzinfo=UTC)),
    Not(IsNull(("id",))),
)
SELECT = """
    SELECT array_agg(id ORDER BY id) FROM (SELECT * FROM json_to_recordset(%s) AS r
        (id bigint, topic text, sender text, published_at timestamptz)) AS t
"""


def judged(filter_: Any, row: dict[str, Any]) -> bool:
    """What Spark makes of a filter; no column is null here."""
    if isinstance(filter_, Not):
        return not judged(filter_.child, row)
    if isinstance(filter_, IsNull | IsNotNull):
        return isinstance(filter_, IsNotNull)
    return TESTS[type(filter_)](row[filter_.attribute[0]], filter_.value)


def some_rows(chance: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "topic": chance.choice(("T", "T2", "'")),
            "sender": chance.choice(SENDERS),
            "published_at": MOMENT + timedelta(microseconds=chance.randint(-3, 3)),
        }
        for number in range(60)
    ]


def any_filter(chance: random.Random) -> Filter:
    """Make a filter of a column and values that often meet."""
    name = chance.choice(("id", "topic", "sender", "published_at"))
    values: dict[str, Callable[[], Any]] = {
        "id": lambda: chance.randint(-1, 61),
        "topic": lambda: chance.choice(("T", "T2", "'", "none")),
        "sender": lambda: chance.choice((*SENDERS, "A ")),
        "published_at": lambda: MOMENT + timedelta(microseconds=chance.randint(-4, 4)),
    }
    kind: Any = chance.choice((*TESTS, IsNull, IsNotNull))
    if kind in (IsNull, IsNotNull):
        made: Filter = kind((name,))
    elif kind is In:
        made = In((name,), tuple(values[name]() for _ in range(chance.randint(1, 3))))
    else:
        made = kind((name,), values[name]())
    return Not(made) if chance.random() < 0.3 else made


def test_a_condition_means_what_the_filter_means(world: World) -> None:
    chance, pushed = random.Random(1), 0  # noqa: S311
    rows = some_rows(chance)
    document = json.dumps(rows, default=str)
    for _ in range(500):
        filter_ = any_filter(chance)
        made = condition(filter_, columns.TOPIC)
        if made is None:
            continue
        pushed += 1
        found = world.owner.query(f"{SELECT} WHERE {made.sql}", document) or []
        wanted = [row["id"] for row in rows if judged(filter_, row)]
        assert found == wanted, filter_
        left = topics_left(("T", "T2", "'"), [made])
        low, high = bounded(-1, 60, [made])
        within = [r["id"] for r in rows if r["topic"] in left and low < r["id"] <= high]
        assert set(wanted) <= set(within), filter_
        assert wanted == within or not made.is_by_range, filter_
    assert pushed > 200


def test_what_postgresql_may_judge_otherwise_is_left_to_spark() -> None:
    assert [each for each in LEFT if condition(each, columns.TOPIC) is not None] == []
    other_types = StructType().add("id", StringType()).add("topic", IntegerType())
    filters: list[Filter] = [EqualTo(("id",), "5"), EqualTo(("topic",), 5), IsNull(("sender",))]
    assert [condition(filter_, other_types) for filter_ in filters] == [None] * 3
    reader = FilteredTopicBatchReader(SourceOptions.of({"topic": "T"}), columns.TOPIC)
    filters = [EqualTo(("topic",), "T"), EqualTo(("body",), "x"), GreaterThan(("id",), 5)]
    assert list(reader.pushFilters(filters)) == [filters[1]]
