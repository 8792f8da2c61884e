"""The list of mutations keeps up with the SQL: each can be made, and its test is there."""

import re
from pathlib import Path

import psycopg
import pytest

from tests.reliability.mutation import Mutation, MutationError
from tests.reliability.mutations import MUTATIONS
from tests.sql.conftest import World, world

__all__ = ["world"]
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_can_be_made(world: World, name: str) -> None:
    connection = world.owner.connection
    with connection.transaction(force_rollback=True), connection.cursor() as cursor:
        MUTATIONS[name].install(cursor)


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation("_node_id", "text that is not there", "", ""),
        Mutation("_node_id", "messages.node", "", ""),
        Mutation("_no_such_function", "x", "", ""),
    ],
)
def test_a_mutation_that_is_none_is_an_error(world: World, mutation: Mutation) -> None:
    with world.owner.connection.cursor() as cursor, pytest.raises(MutationError):
        mutation.install(cursor)


def test_what_is_no_sql_is_no_mutation(world: World) -> None:
    mutation = Mutation("_node_id", "SELECT CASE", "SELECT", "")
    with world.owner.connection.cursor() as cursor, pytest.raises(psycopg.errors.SyntaxError):
        mutation.install(cursor)


def test_each_mutation_names_a_test_that_is_there() -> None:
    for name, mutation in MUTATIONS.items():
        path, _, test = mutation.test.partition("::")
        source = (TESTS / path).read_text()
        assert re.search(rf"^def {test.partition('[')[0]}\(", source, re.MULTILINE) or not test, (
            name
        )
