"""The source's options and addresses, and the filters that PostgreSQL judges as Spark does."""

import json
import operator
import random
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import datasource as spark
from pyspark.sql.types import IntegerType, StringType, StructType

from psqlmessages.pipeline import columns, literals
from psqlmessages.pipeline.columns import limit_ids, matching_topics, to_condition
from psqlmessages.pipeline.database import add_defaults, dsn
from psqlmessages.pipeline.errors import NoValidDsn, OptionRefused
from psqlmessages.pipeline.source_options import SourceOptions
from psqlmessages.pipeline.topic_source import FilteredTopicBatchReader
from tests.sql.conftest import World

EITHER = "either the option topic or the option queue"
# Values of unknown options are not shown: they may contain a password.
UNKNOWN = (
    "unknown option endingoffsets, url. Known options: client, dsnFile, failOnDataLoss,"
    " maxRowsPerTrigger, partitions, queue, startingOffsets, timeout, topic"
)
REFUSED: tuple[tuple[dict[str, str], str], ...] = (
    ({}, EITHER),
    ({"topic": "A", "queue": "B"}, EITHER),
    ({"topic": "A,,B"}, "contains an empty name"),
    ({"topic": "A", "partitions": "0"}, "partitions '0' must be a number from 1 to"),
    ({"topic": "A", "maxRowsPerTrigger": "9" * 5000}, "999 must be a number from 1 to 2147483647"),
    ({"topic": "A", "timeout": "-5"}, "timeout '-5' must be a number"),
    ({"topic": "A", "failOnDataLoss": "no"}, "failOnDataLoss 'no' must be true or false"),
    ({"topic": "A", "startingOffsets": "9" * 5000}, "999 must be earliest, latest, an id up to 92"),
    ({"topic": "A", "startingOffsets": "2030-01-01"}, "needs a time zone"),
    ({"queue": "A", "startingOffsets": "latest"}, "startingOffsets is for topics"),
    ({"topic": "A", "endingOffsets": "latest", "url": "postgresql://u:s3cret@h/d"}, UNKNOWN),
)
JUDGED: dict[Any, Callable[[Any, Any], bool]] = {
    spark.EqualTo: operator.eq, spark.EqualNullSafe: operator.eq,
    spark.GreaterThan: operator.gt, spark.GreaterThanOrEqual: operator.ge,
    spark.LessThan: operator.lt, spark.LessThanOrEqual: operator.le,
    spark.In: lambda a, b: a in b,
    spark.IsNull: lambda a, b: False, spark.IsNotNull: lambda a, b: True,
}  # fmt: skip
MOMENT = datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
VALUES: dict[str, Sequence[Any]] = {
    "id": range(-1, 62),
    "topic": ("T", "T2", "'", "none"),
    "sender": ("A", "a", "O'Neil", "back\\slash", "ü", " A", "A "),
    "published_at": [MOMENT + timedelta(microseconds=number) for number in range(-4, 5)],
}
LEFT = (
    spark.EqualTo(("body",), "x"), spark.EqualTo(("id", "part"), 1),
    spark.EqualTo(("sender",), None), spark.EqualTo(("sender",), "NUL \0"),
    spark.EqualTo(("sender",), "\ud800"), spark.In(("topic",), ("T", None)),
    spark.LessThan(("sender",), "b"), spark.StringStartsWith(("topic",), "T"),
    spark.EqualTo(("id",), 2**63), spark.EqualTo(("id",), True),
    spark.EqualTo(("published_at",), "2030-01-01"),
    spark.EqualTo(("published_at",), datetime(1, 1, 1, tzinfo=UTC)),
    spark.Not(spark.IsNull(("id",))),
)  # fmt: skip
SELECT = """
    SELECT array_agg(id ORDER BY id) FROM (SELECT * FROM json_to_recordset(%s) AS r
        (id bigint, topic text, sender text, published_at timestamptz)) AS t
"""


def test_unusable_options_are_reported():
    for options, told in REFUSED:
        with pytest.raises(OptionRefused, match=re.escape(told)) as refused:
            SourceOptions.of(options)
        assert "s3cret" not in str(refused.value)


def test_options_have_defaults_and_any_case():
    options = SourceOptions.of({"TOPIC": "A, B*,A", "FailOnDataLoss": "FALSE"})
    assert (options.topics, options.queue, options.client) == (("A", "B*"), None, "pipeline")
    assert (options.starting, options.max_rows, options.timeout) == ("earliest", 100_000, 86_400)
    assert (options.fail_on_data_loss, options.partitions) == (False, 2)
    starts = ("Latest", "17", "2030-01-01T00:00:00Z", "2030-01-01T02:00+02:00")
    found = [SourceOptions.of({"topic": "A", "startingOffsets": text}).starting for text in starts]
    assert found == ["latest", 17, *[datetime(2030, 1, 1, tzinfo=UTC)] * 2]


def test_the_dsn_is_of_option_variable_or_file(monkeypatch, tmp_path: Path):
    file, other = tmp_path / "dsn", tmp_path / "other"
    file.write_text("dbname=of_the_file\n")
    other.write_text("dbname=of_the_option")
    monkeypatch.setenv("PSQLMESSAGES_DSN_FILE", str(file))
    monkeypatch.delenv("PSQLMESSAGES_DSN", raising=False)
    found = [dsn()]
    monkeypatch.setenv("PSQLMESSAGES_DSN", "dbname=of_the_variable")
    found += [dsn({}), dsn({"DSNFILE": str(other)})]
    # A file is read again at each call.
    other.write_text("dbname=moved")
    found.append(dsn({"DSNFILE": str(other)}))
    assert found == [f"dbname={name}" for name in (
        "of_the_file", "of_the_variable", "of_the_option", "moved"
    )]  # fmt: skip
    monkeypatch.setenv("PSQLMESSAGES_DSN_EAST_2", "dbname=east")
    assert dsn(namespace="east-2") == "dbname=east"
    with pytest.raises(NoValidDsn, match="set PSQLMESSAGES_DSN_WEST, or PSQLMESSAGES_DSN_WEST_F"):
        dsn(namespace="west")


def test_a_malformed_address_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("PSQLMESSAGES_DSN", "password=s3cret nonsense")
    with pytest.raises(NoValidDsn) as refused:
        dsn()
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None
    address = add_defaults("host=a connect_timeout=3 client_encoding=LATIN1")
    assert "connect_timeout=3" in address
    assert "client_encoding=UTF8" in address


def test_any_text_survives_as_a_literal(world: World):
    texts = ["", "'", "''; DROP TABLE x; --", "\\", "a\\'b", "\\\\''\\n", "$$", "%s", "日本\t\n☃😀"]
    world.owner.connection.execute("SET escape_string_warning = off")
    for setting in ("on", "off"):
        world.owner.connection.execute(f"SET standard_conforming_strings = {setting}")
        select = psycopg.sql.SQL(f"SELECT ARRAY[{', '.join(map(literals.text, texts))}]")
        assert world.owner.connection.execute(select).fetchone() == (texts,)
    for text in ("a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"NUL|surrogates"):
            literals.text(text)


def judged(filter_: Any, row: dict[str, Any]) -> bool:
    if isinstance(filter_, spark.Not):
        return not judged(filter_.child, row)
    return JUDGED[type(filter_)](row[filter_.attribute[0]], getattr(filter_, "value", None))


def any_filter(chance: random.Random) -> spark.Filter:
    name, kind = chance.choice([*VALUES]), chance.choice([*JUDGED])
    if kind in (spark.IsNull, spark.IsNotNull):
        made = kind((name,))
    elif kind is spark.In:
        made = kind((name,), tuple(chance.choices(VALUES[name], k=chance.randint(1, 3))))
    else:
        made = kind((name,), chance.choice(VALUES[name]))
    return spark.Not(made) if chance.random() < 0.3 else made


def test_a_pushed_condition_equals_the_filter(world: World):
    chance, pushed = random.Random(1), 0  # noqa: S311
    drawn = ({name: chance.choice(some) for name, some in VALUES.items()} for _ in range(60))
    rows = [row | {"id": number} for number, row in enumerate(drawn)]
    document = json.dumps(rows, default=str)
    for _ in range(500):
        filter_ = any_filter(chance)
        made = to_condition(filter_, columns.TOPIC_SCHEMA)
        if made is None:
            continue
        pushed += 1
        found = world.owner.query(f"{SELECT} WHERE {made.sql}", document) or []
        wanted = [row["id"] for row in rows if judged(filter_, row)]
        assert found == wanted, filter_
        left = matching_topics(VALUES["topic"], [made])
        low, high = limit_ids(-1, 60, [made])
        within = [r["id"] for r in rows if r["topic"] in left and low < r["id"] <= high]
        assert set(wanted) <= set(within), filter_
        assert wanted == within or not made.is_exact, filter_
    assert pushed > 200


def test_filters_that_postgresql_may_evaluate_differently_are_left_to_spark():
    assert [each for each in LEFT if to_condition(each, columns.TOPIC_SCHEMA) is not None] == []
    other_types = StructType().add("id", StringType()).add("topic", IntegerType())
    for name, value in (("id", "5"), ("topic", 5), ("sender", "x")):
        assert to_condition(spark.EqualTo((name,), value), other_types) is None
    reader = FilteredTopicBatchReader(SourceOptions.of({"topic": "T"}), columns.TOPIC_SCHEMA)
    filters = [
        spark.EqualTo(("topic",), "T"), spark.EqualTo(("body",), "x"), spark.GreaterThan(("id",), 5)
    ]  # fmt: skip
    assert list(reader.pushFilters(filters)) == [filters[1]]
