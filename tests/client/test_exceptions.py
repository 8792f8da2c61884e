"""The exceptions: a class per number, the tree of the docstring, the texts."""

import inspect
import re

import psycopg
import pytest
from psycopg import errors

import psqlmessages
from psqlmessages import exceptions
from psqlmessages.client.calls import checked, error_of
from psqlmessages.exceptions import (
    CallTimeout,
    ConnectionLost,
    MessagesError,
    NotInstalled,
    TopicNotExistent,
    error_for,
    registry,
)
from tests.conftest import TestedServer

CLASSES = {
    name: member
    for name, member in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(member, MessagesError)
}


def test_every_number_of_the_database_has_a_class(server: TestedServer) -> None:
    with psycopg.connect(server.url("user1")) as connection:
        rows = connection.execute("SELECT number FROM messages.errors").fetchall()
    assert set(registry) == {number for (number,) in rows}


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for line in inspect.getdoc(exceptions).splitlines():
        found = re.match(r"^ *([│├└─ ]*)([A-Z]\w+Error|[A-Z]\w+)(?: +(\d+))?(?: |$)", line)
        if found is None or found[2] not in CLASSES:
            continue
        depth = len(found[1]) // 4
        parents[depth:] = [found[2]]
        drawn[found[2]] = parents[depth - 1] if depth else ""
        assert CLASSES[found[2]].number == (int(found[3]) if found[3] else None)
    assert drawn == {
        name: next((base.__name__ for base in found.__bases__ if base.__name__ in CLASSES), "")
        for name, found in CLASSES.items()
    }


def test_every_class_says_what_it_is() -> None:
    assert all(member.__doc__ for member in CLASSES.values())


def test_a_class_is_found_by_number_and_an_unknown_number_is_kept() -> None:
    error = error_for(9, "Topic X is not existent")
    assert type(error) is TopicNotExistent
    assert str(error) == "9: Topic X is not existent"
    unknown = error_for(98, "of a newer server")
    assert type(unknown) is MessagesError
    assert unknown.number == 98


def test_an_error_with_a_hint_shows_it() -> None:
    assert "call topic_notify first" in str(error_for(21, "A cannot send"))


def test_a_timeout_and_a_lost_connection_are_also_what_python_calls_so() -> None:
    assert issubclass(CallTimeout, TimeoutError)
    assert issubclass(ConnectionLost, ConnectionError)


@pytest.mark.parametrize("answer", [None, "", {}, [], {"Errstr": "x"}])
def test_an_answer_that_is_none_of_ours_is_an_error(answer: object) -> None:
    with pytest.raises(MessagesError, match="not an answer"):
        checked(answer)


def test_what_psycopg_raises_becomes_an_error_of_ours_where_it_is_about_messages() -> None:
    missing = error_of(
        errors.InvalidSchemaName('schema "messages" does not exist'), is_broken=False
    )
    assert isinstance(missing, NotInstalled)
    assert isinstance(error_of(psycopg.OperationalError("gone"), is_broken=True), ConnectionLost)
    other = errors.LockNotAvailable("lock")
    assert error_of(other, is_broken=False) is other


def test_the_public_names_are_sorted_and_hold_every_error() -> None:
    assert list(psqlmessages.__all__) == sorted(psqlmessages.__all__)
    assert set(CLASSES) <= set(psqlmessages.__all__)
