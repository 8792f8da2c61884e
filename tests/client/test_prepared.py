"""Hot calls as prepared statements of libpq: values and errors are those of psycopg's cursors."""

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg import errors, pq

from psqlmessages.client.connection import Connection
from tests.conftest import TestedServer

ECHO = "SELECT to_json(ARRAY[%s, %s])"
LATE = "INSERT INTO late VALUES (%s) RETURNING x"
REFUSING_AT_COMMIT = """
    CREATE TEMPORARY TABLE late (x text);
    CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN RAISE EXCEPTION $$at the commit$$; END';
    CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse()
"""


@pytest.fixture
def connection(server: TestedServer) -> Iterator[Connection]:
    with Connection.connect(server.url(), autocommit=True) as connection:
        yield connection


def execute_prepared_many(connection: Connection, sql: str, *rows: tuple[Any, ...]) -> list[Any]:
    """As an AsyncNode asks, on a connection that is none's but its own."""
    statements = [(sql, row) for row in rows]
    return connection.wait(connection._statements.execute_many(connection.pgconn, statements))


def test_errors_are_those_of_psycopg_and_the_connection_goes_on(connection: Connection):
    for _ in range(2):
        with pytest.raises(errors.InvalidTextRepresentation, match="junk"):
            connection.execute_prepared("SELECT %s::int::text", ("junk",))
    with pytest.raises(errors.UndefinedFunction):
        connection.execute_prepared("SELECT is_none(%s)", ("x",))
    assert connection.execute_prepared("SELECT %s::int::text", ("7",)) == "7"
    # One of many that fails fails all.
    connection.execute("CREATE TEMPORARY TABLE numbers (number int)")
    inserting = "INSERT INTO numbers VALUES (%s::int) RETURNING to_json(number)"
    with pytest.raises(errors.InvalidTextRepresentation, match="junk"):
        execute_prepared_many(connection, inserting, ("1",), ("junk",), ("2",))
    with pytest.raises(errors.UndefinedFunction):
        execute_prepared_many(connection, "SELECT is_none(%s)", ("x",), ("y",))
    assert connection.execute("SELECT count(*) FROM numbers").fetchone() == (0,)
    assert execute_prepared_many(connection, inserting, ("1",), ("2",)) == [1, 2]


def test_what_fails_at_the_commit_is_no_success(connection: Connection):
    connection.execute(REFUSING_AT_COMMIT)
    for ask, rows in (
        (Connection.execute_prepared, [("lost",)]),
        (execute_prepared_many, [("lost",), ("too",)]),
    ):
        with pytest.raises(errors.RaiseException, match="at the commit"):
            ask(connection, LATE, *rows)
    assert connection.execute("SELECT count(*) FROM late").fetchone() == (0,)
    assert connection.info.transaction_status == pq.TransactionStatus.IDLE


def test_lost_statements_are_no_error_and_are_prepared_anew(connection: Connection):
    for _ in range(2):
        assert connection.execute_prepared(ECHO, ("a", "b")) == ["a", "b"]
        connection.execute("DEALLOCATE ALL")
        assert execute_prepared_many(connection, ECHO, ("a", "b"), ("c", "d")) == [
            ["a", "b"],
            ["c", "d"],
        ]
        connection.execute("DEALLOCATE ALL")
    for _ in range(3):
        connection.execute_prepared(ECHO, ("a", "b"))
    found = "SELECT count(*) FROM pg_prepared_statements WHERE name ^@ 'psqlmessages'"
    assert connection.execute(found).fetchone() == (1,)
