"""The source's options, addresses and offsets: what is refused, and how that is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from psqlmessages.pipeline import leases, literals, ranges
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.errors import DsnMissing, OptionRefused
from psqlmessages.pipeline.options import SourceOptions
from psqlmessages.pipeline.ranges import Range, Weighed
from tests.sql.conftest import World

SECRET = "postgresql://user1:s3cret@127.0.0.1/there"


def test_options_have_defaults_and_any_case() -> None:
    options = SourceOptions.of({"TOPIC": "A, B*,A", "FailOnDataLoss": "FALSE"})
    assert (options.topics, options.queue, options.client) == (("A", "B*"), None, "pipeline")
    assert (options.starting, options.max_rows, options.timeout) == ("earliest", 100_000, 86_400)
    assert (options.fail_on_data_loss, options.partitions) == (False, 2)


def test_an_unknown_option_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(OptionRefused) as refused:
        SourceOptions.of({"topic": "A", "endingOffsets": "latest", "url": SECRET})
    assert str(refused.value) == (
        "unknown option endingoffsets, url; known are client, dsnFile, failOnDataLoss,"
        " maxRowsPerTrigger, partitions, queue, startingOffsets, timeout, topic"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either the option topic or the option queue"),
        ({"topic": "A", "queue": "B"}, "either the option topic or the option queue"),
        ({"topic": "A,,B"}, "a name is empty"),
        ({"topic": "A", "partitions": "0"}, "partitions '0' is no number from 1 to"),
        ({"topic": "A", "maxRowsPerTrigger": "many"}, "maxRowsPerTrigger 'many' is no number"),
        ({"topic": "A", "timeout": "-5"}, "timeout '-5' is no number"),
        ({"topic": "A", "failOnDataLoss": "no"}, "failOnDataLoss 'no' is neither true nor false"),
        ({"topic": "A", "startingOffsets": "first"}, "neither earliest, latest, an id nor a time"),
        ({"topic": "A", "startingOffsets": "2030-01-01"}, "needs a time zone"),
        ({"queue": "A", "startingOffsets": "latest"}, "startingOffsets is for topics"),
    ],
)
def test_a_value_that_cannot_be_used_is_told(options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionRefused, match=said):
        SourceOptions.of(options)


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ("Latest", "latest"),
        ("17", 17),
        ("2030-01-01T00:00:00Z", datetime(2030, 1, 1, tzinfo=UTC)),
        ("2030-01-01T02:00+02:00", datetime(2030, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_start_is_a_word_an_id_or_a_time(value: str, start: object) -> None:
    assert SourceOptions.of({"topic": "A", "startingOffsets": value}).starting == start


def test_the_address_is_that_of_the_option_then_the_variable_then_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, other = tmp_path / "dsn", tmp_path / "other"
    file.write_text("dbname=of_the_file\n")
    other.write_text("dbname=of_the_option")
    monkeypatch.setenv("PSQLMESSAGES_DSN_FILE", str(file))
    monkeypatch.delenv("PSQLMESSAGES_DSN", raising=False)
    found = [dsn()]
    monkeypatch.setenv("PSQLMESSAGES_DSN", "dbname=of_the_variable")
    found += [dsn({}), dsn({"DSNFILE": str(other)})]
    assert found == ["dbname=of_the_file", "dbname=of_the_variable", "dbname=of_the_option"]


def test_another_namespace_has_a_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSQLMESSAGES_DSN_EAST_2", "dbname=east")
    assert dsn(namespace="east-2") == "dbname=east"
    with pytest.raises(DsnMissing, match="set PSQLMESSAGES_DSN_WEST, or PSQLMESSAGES_DSN_WEST_F"):
        dsn(namespace="west")


def test_a_malformed_address_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PSQLMESSAGES_DSN", "password=s3cret nonsense")
    with pytest.raises(DsnMissing) as refused:
        dsn()
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_what_an_address_says_is_not_replaced() -> None:
    address = connectable("host=a connect_timeout=3 client_encoding=LATIN1")
    assert "connect_timeout=3" in address
    assert "client_encoding=UTF8" in address


@pytest.mark.parametrize("setting", ["on", "off"])
def test_any_text_survives_as_a_literal(world: World, setting: str) -> None:
    texts = ["", "'", "''; DROP TABLE x; --", "\\", "a\\'b", "\\\\''\\n", "$$", "%s", "日本\t\n☃😀"]
    world.owner.connection.execute("SET escape_string_warning = off")
    world.owner.connection.execute(f"SET standard_conforming_strings = {setting}")
    try:
        select = psycopg.sql.SQL(f"SELECT ARRAY[{', '.join(map(literals.text, texts))}]")
    finally:
        found = world.owner.connection.execute(select).fetchone()
    assert found == (texts,)


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_what_postgresql_cannot_hold_is_no_literal(text: str) -> None:
    with pytest.raises(ValueError, match=r"NUL|surrogates"):
        literals.text(text)


@pytest.mark.parametrize("seed", range(50))
def test_ranges_are_shared_out_without_a_gap_or_a_double(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    wholes, low = [], 0
    for number in range(chance.randint(1, 6)):
        high = low + chance.choice([0, 1, 2, 7, 1000])
        weight = chance.choice([0, 1, 5, 300])
        wholes.append(Weighed(Range(f"T{number % 2}", low, high, True), weight))
        low = high + chance.choice([0, 3])
    parts = chance.randint(1, 5)
    shared = ranges.shared_out(wholes, parts)
    ids = [(r.topic, id_) for part in shared for r in part for id_ in range(r.low, r.high)]
    wanted = [(w.range.topic, id_) for w in wholes for id_ in range(w.range.low, w.range.high)]
    assert ids == wanted
    assert len(shared) <= parts
    assert all(r.is_checked for part in shared for r in part)


def test_a_wide_range_is_cut_into_equal_parts() -> None:
    shared = ranges.shared_out([Weighed(Range("T", 0, 900), 900)], 3)
    assert [[(r.low, r.high) for r in part] for part in shared] == [
        [(0, 300)], [(300, 600)], [(600, 900)]
    ]  # fmt: skip


def test_leases_come_back_from_an_offset_as_they_were() -> None:
    given = [f"{id_}.{uuid4()}" for id_ in (1, 2**62, 17)]
    text = leases.packed(given)
    assert leases.unpacked(text) == given
    assert len(text) == 32 * 3


def test_an_address_is_found_anew_at_each_call(
    monkeypatch: pytest.MonkeyPatch, dsn_file: Callable[[str], str]
) -> None:
    path = dsn_file("user1")
    before = dsn({"dsnFile": path})
    Path(path).write_text("dbname=moved")
    assert before != dsn({"dsnFile": path}) == "dbname=moved"
