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


def test_what_fails_at_the_commit_is_no_success(connection: Connection) -> None:
    connection.execute("CREATE TEMPORARY TABLE late (x text)")
    connection.execute(
        "CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN RAISE EXCEPTION $$at the commit$$; END'"
    )
    connection.execute(
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse()"
    )
    with pytest.raises(errors.RaiseException, match="at the commit"):
        connection.ask("INSERT INTO late VALUES (%s) RETURNING x", ("lost",))


def test_who_cancels_is_obeyed_at_once(connection: Connection) -> None:
    connection.execute("CREATE TEMPORARY SEQUENCE tries")
    connection.execute("SET statement_timeout = '200ms'")
    with pytest.raises(errors.QueryCanceled):
        connection.ask("SELECT nextval('tries') || %s || pg_sleep(60)", ("x",))
    assert connection.execute("SELECT last_value FROM tries").fetchone() == (1,)


def test_statements_that_were_lost_are_prepared_anew(connection: Connection) -> None:
    connection.ask(ECHO, ("a", "b"))
    connection.execute("DEALLOCATE ALL")
    connection.ask(ECHO, ("a", "b"))
    connection.ask(ECHO, ("a", "b"))
    found = "SELECT count(*) FROM pg_prepared_statements WHERE name ^@ 'psqlmessages'"
    assert connection.execute(found).fetchone() == (1,)
