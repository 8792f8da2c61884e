"""Hot calls as prepared statements of libpq: values and errors are those of psycopg's cursors."""

from collections.abc import Iterator

import pytest
from psycopg import errors

from psqlmessages.client.connections import Connection
from psqlmessages.client.prepared import Statement
from tests.conftest import TestedServer

ECHO = "SELECT to_json(ARRAY[%s, %s])"
ECHO_MANY = "SELECT to_json(%b::text[])"


@pytest.fixture
def connection(server: TestedServer) -> Iterator[Connection]:
    with Connection.connect(server.url(), autocommit=True) as connection:
        yield connection


def test_placeholders_become_numbers() -> None:
    statement = Statement.of("SELECT f(%s, %b::text[], %s)", 3)
    assert statement.sql == b"SELECT f($1, $2::text[], $3)"
    assert [kind.name for kind in statement.formats] == ["TEXT", "BINARY", "TEXT"]


@pytest.mark.parametrize("text", ["", "plain", "ü€😀", 'quoted " and \\ and $1', "x" * 1_000_000])
def test_texts_and_nulls_arrive_as_they_are(connection: Connection, text: str) -> None:
    for _ in range(2):
        assert connection.ask(ECHO, (text, None)) == [text, None]
    assert connection.ask("SELECT %s", (text,)) == text
    assert connection.ask("SELECT %s::text", (None,)) is None


@pytest.mark.parametrize("texts", [[], [""], ["a", "ü€😀", "NULL", "{}", '"'], ["x" * 1000] * 5000])
def test_lists_arrive_as_they_are(connection: Connection, texts: list[str]) -> None:
    assert connection.ask(ECHO_MANY, (texts,)) == texts


def test_no_row_is_none(connection: Connection) -> None:
    assert connection.ask("SELECT %s WHERE false", ("x",)) is None


def test_errors_are_those_of_psycopg_and_leave_the_connection_usable(
    connection: Connection,
) -> None:
    for _ in range(2):
        with pytest.raises(errors.InvalidTextRepresentation, match="junk"):
            connection.ask("SELECT %s::int::text", ("junk",))
    with pytest.raises(errors.UndefinedFunction):
        connection.ask("SELECT is_none(%s)", ("x",))
    assert connection.ask("SELECT %s::int::text", ("7",)) == "7"


def test_a_statement_that_was_lost_is_no_error(connection: Connection) -> None:
    assert connection.ask(ECHO, ("a", "b")) == ["a", "b"]
    connection.execute("DEALLOCATE ALL")
    assert connection.ask(ECHO, ("a", "b")) == ["a", "b"]
