"""An older client against newer functions: what it does not know does no harm and is passed on."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice

import pytest
from psycopg import sql

from psqlmessages import AsyncNode, Message, MessagesError, Node
from tests.conftest import TestedServer
from tests.reliability.counts import counted
from tests.sql.conftest import World
from tests.sql.public import FUNCTIONS

SOON = timedelta(seconds=20)
RULES = (
    "user1 ONE Topic T RW 60", "user2 TWO Topic T RW 60", "user2 TWO Rpc ONE W 60",
    "user1 ONE Topic NEWS RW 3600", "user2 TWO Topic NEWS R 3600", "user2 TWO Queue Q RW 60",
)  # fmt: skip
JSON_FUNCTIONS = """
    SELECT p.oid::regprocedure::text, p.proname, pg_get_function_arguments(p.oid),
           ARRAY(SELECT '$' || n FROM generate_series(1, p.pronargs) AS n)
    FROM pg_proc AS p
    WHERE p.pronamespace = 'messages'::regnamespace AND p.proname = ANY (%s)
      AND p.prorettype = 'json'::regtype AND NOT p.proretset AND p.provariadic = 0
"""
# Says more than today's in each answer, takes one parameter more, and knows one more error.
NEWER = """
    ALTER FUNCTION {signature} SET SCHEMA older;
    CREATE FUNCTION messages.{name}({arguments}newer text DEFAULT NULL) RETURNS json
    LANGUAGE sql AS $newer$
        SELECT CASE WHEN {first}::text = 'NEWER' THEN '{{"Err": 999, "Errstr": "newer"}}'::json
               ELSE (older.{name}({values})::jsonb || '{{"Newer": {{"a": [1]}}}}')::json END
    $newer$;
    GRANT EXECUTE ON FUNCTION messages.{name} TO PUBLIC
"""


@pytest.fixture
def newer(own: TestedServer, own_world: World) -> Iterator[World]:
    """A server whose public functions are of a later version, for a while."""
    own_world.rules(*RULES)
    connection = own_world.superuser().connection
    connection.execute(
        f"CREATE SCHEMA older AUTHORIZATION {own.server.owner}; SET ROLE {own.server.owner};"
        " GRANT USAGE ON SCHEMA older TO PUBLIC"
    )
    functions = connection.execute(JSON_FUNCTIONS, [FUNCTIONS]).fetchall()
    for signature, name, arguments, values in functions:
        connection.execute(
            sql.SQL(NEWER).format(
                signature=sql.SQL(signature),
                name=sql.Identifier(name),
                arguments=sql.SQL(f"{arguments}, " if arguments else ""),
                first=sql.SQL(values[0] if values else "''"),
                values=sql.SQL(", ".join(values)),
            )
        )
    yield own_world
    for signature, name, _, _ in functions:
        older = signature.replace("messages.", "older.", 1)
        connection.execute(
            f"DROP FUNCTION messages.{name}; ALTER FUNCTION {older} SET SCHEMA messages"
        )
    connection.execute("DROP SCHEMA older; RESET ROLE")


def tell(world: World, ident: str, header: dict[str, object], body: str = "") -> None:
    """Send a notification of a later version to a node."""
    world.owner.connection.execute(
        "SELECT pg_notify(s.channel, %s) FROM psqlmessages_client AS c"
        " JOIN psqlmessages_session AS s ON s.id = c.session_id WHERE c.ident = %s",
        [json.dumps(header, separators=(",", ":")) + "\n" + body, ident],
    )


def topic_message(node: Node) -> Message:
    """The next message to the topic."""
    return next(m for m in node.messages(timeout=SOON) if m.type == "Topic")


async def by_async_node(world: World) -> None:
    """An AsyncNode asks and is told, alone and many at once."""
    async with AsyncNode("TWO", world.server.url("user2")) as two:
        answers = await asyncio.gather(*(two.call("ONE", n, timeout=SOON) for n in range(20)))
        assert answers == [[n] for n in range(20)]
        await two.topic_notify("T")
        await asyncio.gather(*(two.topic_send("T", n) for n in range(20)))
        with pytest.raises(MessagesError):
            await two.topic_send("NEWER", "x")


def test_a_client_that_is_older_than_the_functions_works_as_before(newer: World) -> None:
    url1, url2 = newer.server.url("user1"), newer.server.url("user2")
    with Node("ONE", url1) as one:
        one.topic_listen("T")
        with Node("TWO", url2) as two:
            two.topic_notify("T")
            for number in range(20):
                two.topic_send("T", {"number": number})
            assert [topic_message(one).body["number"] for _ in range(20)] == list(range(20))
            with pytest.raises(MessagesError, match="newer"):
                two.topic_send("NEWER", "x")
            tell(newer, "ONE", {"Type": "Newer", "From": "TWO", "Newer": 1})
            tell(newer, "ONE", {"Type": "Event", "Evt": "newer", "Ident": "TWO", "Newer": [1]})
            two.topic_send("T", "x" * 20_000)
            assert topic_message(one).body == "x" * 20_000
            assert one.topic_status("T").listeners == ("ONE",)

            one.publish_many("NEWS", range(2))
            news = two.subscribe("NEWS")
            one.publish_many("NEWS", range(2, 5))
            assert [message.body for message in islice(news, 3)] == [2, 3, 4]

            two.push_many("Q", range(3))
            assert two.pop("Q")[0].body == 0
            (kept,) = two.reserve("Q", 1, SOON)
            two.commit(kept)
            assert [element.body for element in two.pop("Q", 5)] == [2]
        one.on_rpc(lambda message: [message.body])
        with ThreadPoolExecutor() as pool:
            running = pool.submit(one.run)
            asyncio.run(by_async_node(newer))
            one.stop()
            running.result(SOON.total_seconds())
        counted("an upgrade", "an older client against newer functions", calls=97, failed=0)
