"""Listeners of a topic, kept step by step, and nodes that end all at once with their session."""

from tests.sql.conftest import Program, World

RULES = [
    "user1 A* Topic T RW 5", "user1 A* Topic OTHER RW 5",
    "user2 B Topic T R 5", "user2 B Topic OTHER R 5",
]  # fmt: skip
LOOK = """
    SELECT listeners || (
        SELECT coalesce(string_agg(c, ' ' ORDER BY c), '') FROM unnest(channels) AS c
    )
    FROM psqlmessages_topic WHERE name = 'T'
"""


def listen(program: Program, *idents: str) -> None:
    """Have nodes of one session listen to topic T."""
    for ident in idents:
        program.ok("use", ident)
        program.ok("topic_listen", "T")


def assert_as_rebuilt(world: World) -> None:
    """What was kept step by step is what computing it anew gives."""
    kept = world.owner.query(LOOK)
    world.execute("SELECT messages._rebuild_topics(ARRAY(SELECT id FROM psqlmessages_topic))")
    assert world.owner.query(LOOK) == kept


def test_a_channel_stays_until_the_last_of_its_nodes_has_left(world: World) -> None:
    world.rules(*RULES)
    many, other = world.node("user1", "A1"), world.node("user2", "B")
    many.ok("init", "A2")
    listen(many, "A1", "A2")
    assert_as_rebuilt(world)
    listen(other, "B")
    assert_as_rebuilt(world)
    for ident in "A1", "A2":
        many.ok("use", ident)
        many.ok("topic_unlisten", "T")
        assert_as_rebuilt(world)
    other.ok("topic_unlisten", "T")
    assert_as_rebuilt(world)


def test_a_channel_stays_where_an_observer_needs_it(world: World) -> None:
    world.rules("user1 A1 Topic T R 5", "user1 EYE Topic T* O 5")
    many = world.node("user1", "A1")
    many.ok("init", "EYE")
    many.ok("topic_observe", "T*")
    listen(many, "A1")
    many.ok("topic_unlisten", "T")
    assert_as_rebuilt(world)


def test_a_channel_goes_whatever_else_its_node_does(world: World) -> None:
    for rule, act, name in (
        ("user1 A1 Topic U R 5", "topic_listen", "U"),
        ("user1 A* Topic T W 5", "topic_notify", "T"),
        ("user1 A1 Topic U* O 5", "topic_observe", "U*"),
    ):
        world.begin()
        world.rules("user1 A1 Topic T R 5", "user1 B Topic U R 5", "user2 EYE Topic T O 5", rule)
        world.node("user2", "EYE").ok("topic_observe", "T")
        node = world.node("user1", "A1")
        node.ok(act, name)
        node.ok("topic_listen", "T")
        node.ok("topic_unlisten", "T")
        assert_as_rebuilt(world)


def test_a_channel_goes_with_its_dead_session(world: World) -> None:
    world.rules(*RULES)
    many, other = world.gateway("user1", "A1", "A2"), world.node("user2", "B")
    listen(many, "A1", "A2")
    world.kill(many)
    other.ok("evaluate")
    assert_as_rebuilt(world)
