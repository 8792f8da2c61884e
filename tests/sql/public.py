"""The public SQL functions, read from the grants and the comments of the database."""

import re
from dataclasses import dataclass

from psqlmessages.schema import SCRIPTS
from tests.sql.conftest import World

GRANTED = set(re.findall(r"messages\.(\w+)", (SCRIPTS / "99_grants.sql").read_text()))
VIEWS = {
    "errors", "topics", "stream_clients", "stream_topics", "stream_subscriptions", "queues",
    "stored", "queued",
}  # fmt: skip
# These check a role and a name by the rules, on any connection.
WITHOUT_SESSION = {
    "topic_send_as", "topic_status_as", "publish", "publish_many", "subscribe", "unsubscribe",
    "subscription", "stream_horizons", "subscribe_from", "read_stream", "peek",
    "publish_staged", "push_staged", "unstage", "renew", "configure_queue", "remove_queue",
    "remove_elements", "move_elements",
    "push", "push_many", "pop", "reserve", "commit", "rollback", "release", "remove", "pause",
    "resume", "drain", "sizes", "queue_listen", "take", "deliver",
}  # fmt: skip
# Any role may insert into it, and none may read it.
TABLES = {"staged"}
FUNCTIONS = sorted(GRANTED - VIEWS - TABLES)
READ = """
    SELECT proname, proargnames[:pronargs],
           ARRAY(SELECT format_type(t, NULL) FROM unnest(proargtypes) AS t),
           obj_description(oid, 'pg_proc')
    FROM pg_proc WHERE pronamespace = 'messages'::regnamespace AND proname = ANY (%s)
    -- An overload only calls the function with text and seconds.
    ORDER BY prolang = (SELECT oid FROM pg_language WHERE lanname = 'plpgsql')
"""


@dataclass(frozen=True)
class Function:
    """A public function: its parameters' names and types, and the errors its comment names."""

    name: str
    parameters: dict[str, str]
    errors: frozenset[str]


def public_functions(world: World) -> dict[str, Function]:
    functions = {}
    for name, names, types, comment in world.execute(READ, [FUNCTIONS]).fetchall():
        errors = frozenset(re.findall(r"\d+", comment.partition("Errors: ")[2]))
        functions[name] = Function(name, dict(zip(names or [], types, strict=True)), errors)
    return functions
