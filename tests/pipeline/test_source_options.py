"""The source's options, addresses and offsets: what is refused, and how that is told."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from psqlmessages.pipeline import literals
from psqlmessages.pipeline.dsn import connectable, dsn
from psqlmessages.pipeline.errors import DsnMissing, OptionRefused
from psqlmessages.pipeline.options import SourceOptions
from tests.sql.conftest import World

EITHER = "either the option topic or the option queue"
REFUSED: tuple[tuple[dict[str, str], str], ...] = (
    ({}, EITHER),
    ({"topic": "A", "queue": "B"}, EITHER),
    ({"topic": "A,,B"}, "a name is empty"),
    ({"topic": "A", "partitions": "0"}, "partitions '0' is no number from 1 to"),
    ({"topic": "A", "maxRowsPerTrigger": "many"}, "maxRowsPerTrigger 'many' is no number"),
    ({"topic": "A", "timeout": "-5"}, "timeout '-5' is no number"),
    ({"topic": "A", "failOnDataLoss": "no"}, "failOnDataLoss 'no' is neither true nor false"),
    ({"topic": "A", "startingOffsets": "first"}, "neither earliest, latest, an id nor a time"),
    ({"topic": "A", "startingOffsets": "2030-01-01"}, "needs a time zone"),
    ({"queue": "A", "startingOffsets": "latest"}, "startingOffsets is for topics"),
    # The values of unknown ones are not shown: they may hold a password.
    (
        {"topic": "A", "endingOffsets": "latest", "url": "postgresql://u:s3cret@127.0.0.1/there"},
        (
            "unknown option endingoffsets, url; known are client, dsnFile, failOnDataLoss,"
            " maxRowsPerTrigger, partitions, queue, startingOffsets, timeout, topic"
        ),
    ),
)


def refusal(options: dict[str, str]) -> str:
    with pytest.raises(OptionRefused) as refused:
        SourceOptions.of(options)
    return str(refused.value)


def test_options_that_cannot_be_used_are_told() -> None:
    found = [(refusal(options), told) for options, told in REFUSED]
    assert [pair for pair in found if pair[1] not in pair[0] or "s3cret" in pair[0]] == []


def test_options_have_defaults_and_any_case() -> None:
    options = SourceOptions.of({"TOPIC": "A, B*,A", "FailOnDataLoss": "FALSE"})
    assert (options.topics, options.queue, options.client) == (("A", "B*"), None, "pipeline")
    assert (options.starting, options.max_rows, options.timeout) == ("earliest", 100_000, 86_400)
    assert (options.fail_on_data_loss, options.partitions) == (False, 2)
    starts = ("Latest", "17", "2030-01-01T00:00:00Z", "2030-01-01T02:00+02:00")
    found = [SourceOptions.of({"topic": "A", "startingOffsets": text}).starting for text in starts]
    assert found == ["latest", 17, *[datetime(2030, 1, 1, tzinfo=UTC)] * 2]


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
    # A file is read anew at each call.
    other.write_text("dbname=moved")
    found.append(dsn({"DSNFILE": str(other)}))
    assert found == [f"dbname={name}" for name in (
        "of_the_file", "of_the_variable", "of_the_option", "moved"
    )]  # fmt: skip
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
    # What a sound one says is not replaced.
    address = connectable("host=a connect_timeout=3 client_encoding=LATIN1")
    assert "connect_timeout=3" in address
    assert "client_encoding=UTF8" in address


def test_any_text_survives_as_a_literal(world: World) -> None:
    texts = ["", "'", "''; DROP TABLE x; --", "\\", "a\\'b", "\\\\''\\n", "$$", "%s", "日本\t\n☃😀"]
    world.owner.connection.execute("SET escape_string_warning = off")
    for setting in ("on", "off"):
        world.owner.connection.execute(f"SET standard_conforming_strings = {setting}")
        select = psycopg.sql.SQL(f"SELECT ARRAY[{', '.join(map(literals.text, texts))}]")
        assert world.owner.connection.execute(select).fetchone() == (texts,)
    for text in ("a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"NUL|surrogates"):
            literals.text(text)
