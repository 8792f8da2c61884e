"""Crashes: a session that ended without deinit leaves no ghost and never blocks its own return."""

from collections.abc import Callable

import pytest

from tests.sql.conftest import Program, World

CLASS = 1886612839
GONE = [
    "topic_unlisten NODE2 MYTOPIC",
    "topic_none_listen MYTOPIC",
    "topic_unnotify NODE2 MYTOPIC",
    "topic_none_notify MYTOPIC",
    "crash NODE2",
]
PIDS = [
    "UPDATE psqlmessages_session SET pid = %s WHERE channel = %s",
    "UPDATE psqlmessages_membership SET pid = %s WHERE channel = %s",
]


@pytest.fixture
def nodes(spec_world: World) -> dict[str, Program]:
    """The nodes of the documentation's example and a stranger; NODE2 listens and sends."""
    spec_world.rules("hostile STRANGER Topic OTHER RW 10")
    roles = {"NODE1": "user1", "NODE2": "user2", "NODE3": "user3", "STRANGER": "hostile"}
    nodes = {ident: spec_world.node(role, ident) for ident, role in roles.items()}
    nodes["NODE2"].ok("topic_listen", "MYTOPIC")
    nodes["NODE2"].ok("topic_notify", "MYTOPIC")
    for program in nodes.values():
        program.payloads()
    return nodes


def unlock(program: Program) -> None:
    """End a session's liveness, and nothing else."""
    program.query("SELECT pg_advisory_unlock_all()")


def discard(program: Program) -> None:
    """Do what poolers do between two clients."""
    program.connection.execute("DISCARD ALL")


def session_of(world: World, ident: str) -> int:
    """Id of the session on which a node is registered."""
    return world.owner.query("SELECT session_id FROM psqlmessages_client WHERE ident = %s", ident)


def test_a_crash_is_told_once_to_each_authorised_node_and_to_no_stranger(
    world: World, nodes: dict[str, Program]
) -> None:
    world.kill(nodes["NODE2"])
    for ident in "NODE1", "NODE3", "STRANGER", "NODE1":
        nodes[ident].ok("evaluate")
    heard = {ident: nodes[ident].events() for ident in ("NODE1", "NODE3", "STRANGER")}
    assert heard == {"NODE1": GONE, "NODE3": GONE, "STRANGER": []}


def test_a_gateway_tells_of_a_crash_of_one_node_and_its_others_live_on(
    world: World, nodes: dict[str, Program]
) -> None:
    world.rules("user2 GATE.* Topic MYTOPIC R 10")
    nodes["NODE2"].ok("init", "GATE.1")
    assert nodes["NODE2"].call("crash", "NODE2") == {"Err": "0"}
    assert nodes["NODE1"].events()[-5:] == GONE
    assert nodes["NODE2"].call("topic_listen", "MYTOPIC") == {"Err": "0"}


def test_a_crash_of_another_sessions_node_does_nothing(nodes: dict[str, Program]) -> None:
    assert nodes["STRANGER"].call("crash", "NODE2") == {"Err": "0", "Already": 1}
    assert nodes["NODE1"].events() == []


def test_evaluate_counts_the_events_of_a_crash(world: World, nodes: dict[str, Program]) -> None:
    world.kill(nodes["NODE2"])
    counted = [nodes["NODE1"].ok("evaluate")["Events"] for _ in range(2)]
    assert counted == [len(GONE), 0]


def test_a_dead_node_is_no_ghost_in_topic_status_even_before_evaluation(
    world: World, nodes: dict[str, Program]
) -> None:
    world.kill(nodes["NODE2"])
    with nodes["NODE1"].connection.transaction(force_rollback=True):
        status = nodes["NODE1"].ok("topic_status", "MYTOPIC")
    assert (status["Notifiers"], status["Listeners"]) == ([], [])
    assert session_of(world, "NODE2"), "it was evaluated already: the test shows nothing"


def test_a_dead_node_is_no_ghost_in_the_view_topics_even_before_evaluation(
    world: World, nodes: dict[str, Program]
) -> None:
    world.kill(nodes["NODE2"])
    look = "SELECT notifiers || listeners FROM messages.topics WHERE topic = 'MYTOPIC'"
    assert nodes["NODE1"].query(look) == []


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("topic_auth", ("MYTOPIC",)),
        ("topic_status", ("MYTOPIC",)),
        ("topic_notify", ("MYTOPIC",)),
        ("topic_unnotify", ("MYTOPIC",)),
        ("deinit", ("NOBODY",)),
        ("init", ("NODE1",)),
    ],
)
def test_a_call_that_is_no_send_evaluates_each_time(
    world: World, nodes: dict[str, Program], function: str, arguments: tuple[str, ...]
) -> None:
    nodes["NODE1"].ok("evaluate")
    world.kill(nodes["NODE2"])
    nodes["NODE1"].ok(function, *arguments)
    assert "crash NODE2" in nodes["NODE3"].events()


def test_a_send_evaluates_once_a_second_has_passed(world: World, nodes: dict[str, Program]) -> None:
    world.rules("user1 NODE1 Rpc NODE3 W 5")
    world.kill(nodes["NODE2"])
    nodes["NODE1"].query("SELECT pg_sleep(1)")
    nodes["NODE1"].ok("rpc", "NODE3", "TOKEN", "work")
    assert nodes["NODE1"].events() == GONE


@pytest.mark.parametrize("role", ["user2", "user1"])
def test_a_killed_node_can_return_at_once_by_its_own_or_another_role(
    world: World, nodes: dict[str, Program], role: str
) -> None:
    world.rules("user1 NODE2 Topic MYTOPIC R 10")
    world.kill(nodes["NODE2"])
    assert "Already" not in world.node(role, "NODE2").ok("use", "NODE2")
    assert nodes["NODE1"].events() == [*GONE, "connect NODE2"]


def test_a_node_that_returned_neither_listens_nor_sends(
    world: World, nodes: dict[str, Program]
) -> None:
    world.kill(nodes["NODE2"])
    returned = world.node("user2", "NODE2")
    assert returned.error("topic_send", "MYTOPIC", "x")[0] == 21
    assert "Already" not in returned.ok("topic_listen", "MYTOPIC")


def test_all_nodes_of_a_killed_session_crash(world: World, nodes: dict[str, Program]) -> None:
    world.rules("user2 NODE4 Topic MYTOPIC R 10")
    nodes["NODE2"].ok("init", "NODE4")
    nodes["NODE1"].payloads()
    world.kill(nodes["NODE2"])
    nodes["NODE1"].ok("evaluate")
    assert nodes["NODE1"].events() == [*GONE, "crash NODE4"]


def test_each_node_of_a_killed_session_is_told_of_to_those_of_its_own_rules(world: World) -> None:
    world.rules(
        "user1 RED1 Topic RED R 10", "user1 RED2 Topic RED R 10", "user1 SKY Topic BLUE R 10",
        "user1 THREE Topic RED R 10", "user1 ZERO Rpc ASKED W 10",
        "user2 OFRED Topic RED R 10", "user2 OFBLUE Topic BLUE R 10", "user2 ASKED Rpc NOBODY W 10",
    )  # fmt: skip
    others = {ident: world.node("user2", ident) for ident in ("OFRED", "OFBLUE", "ASKED")}
    many = world.gateway("user1", "RED1", "RED2", "SKY", "THREE", "ZERO")
    for other in others.values():
        other.payloads()
    world.kill(many)
    others["OFRED"].ok("evaluate")
    assert {ident: other.events() for ident, other in others.items()} == {
        "OFRED": ["crash RED1", "crash RED2", "crash THREE"],
        "OFBLUE": ["crash SKY"],
        "ASKED": ["crash ZERO"],
    }


def test_each_topic_of_a_killed_session_is_told_of_to_those_of_its_own_rules(world: World) -> None:
    world.rules(
        "user1 ONE Topic RED R 10", "user1 TWO Topic RED R 10", "user1 TWO Topic BLUE R 10",
        "user2 OFRED Topic RED R 10", "user2 OFBLUE Topic BLUE R 10",
    )  # fmt: skip
    others = {ident: world.node("user2", ident) for ident in ("OFRED", "OFBLUE")}
    many = world.gateway("user1", "ONE", "TWO")
    for ident, topic in ("ONE", "RED"), ("TWO", "RED"), ("TWO", "BLUE"):
        many.ok("use", ident)
        many.ok("topic_listen", topic)
    for other in others.values():
        other.payloads()
    world.kill(many)
    others["OFRED"].ok("evaluate")
    assert {ident: other.events() for ident, other in others.items()} == {
        "OFRED": [
            "topic_unlisten ONE RED", "crash ONE",
            "topic_unlisten TWO RED", "topic_none_listen RED", "crash TWO",
        ],
        "OFBLUE": ["topic_unlisten TWO BLUE", "topic_none_listen BLUE", "crash TWO"],
    }  # fmt: skip


@pytest.mark.parametrize("ends", [discard, unlock])
def test_discard_all_and_unlocking_all_are_a_crash(
    world: World, nodes: dict[str, Program], ends: Callable[[Program], None]
) -> None:
    ends(nodes["NODE2"])
    nodes["NODE1"].ok("evaluate")
    assert nodes["NODE1"].events() == GONE
    assert nodes["NODE2"].error("topic_listen", "MYTOPIC")[0] == 50


@pytest.mark.parametrize("ends", [discard, unlock])
def test_init_after_discard_all_or_unlocking_all_makes_a_node_that_stays(
    world: World, nodes: dict[str, Program], ends: Callable[[Program], None]
) -> None:
    ends(nodes["NODE2"])
    nodes["NODE2"].ok("init", "NODE2")
    nodes["NODE2"].ok("topic_listen", "MYTOPIC")
    nodes["NODE1"].ok("evaluate")
    nodes["NODE1"].ok("topic_notify", "MYTOPIC")
    nodes["NODE1"].ok("topic_send", "MYTOPIC", "x")
    assert nodes["NODE2"].headers()[-1]["Type"] == "Topic"


def test_reset_all_is_no_crash_and_init_says_already(
    world: World, nodes: dict[str, Program]
) -> None:
    node = nodes["NODE2"]
    node.connection.execute("RESET ALL")
    assert node.error("topic_notify", "MYTOPIC")[0] == 50
    assert node.ok("init", "NODE2")["Already"] == 1
    assert node.ok("topic_notify", "MYTOPIC")["Already"] == 1
    nodes["NODE1"].ok("evaluate")
    assert nodes["NODE1"].events() == []


def test_deinit_and_init_on_one_connection_work_again_and_again(
    world: World, nodes: dict[str, Program]
) -> None:
    node = nodes["NODE2"]
    channels = set()
    for _ in range(5):
        node.ok("deinit", "NODE2")
        channels.add(node.ok("init", "NODE2")["Channel"])
    locks = world.owner.query(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", node.pid
    )
    listening = node.query("SELECT array_agg(c) FROM pg_listening_channels() AS c")
    assert (len(channels), locks, len(listening)) == (5, 1, 1)


def test_a_rolled_back_init_leaves_nothing_and_init_again_listens(
    world: World, nodes: dict[str, Program]
) -> None:
    node = world.program("user2")
    nodes["NODE2"].ok("deinit", "NODE2")
    with node.connection.transaction(force_rollback=True):
        node.ok("init", "NODE2")
    assert node.error("topic_status", "MYTOPIC")[0] == 50
    assert "Already" not in node.ok("init", "NODE2")
    node.ok("topic_listen", "MYTOPIC")
    nodes["NODE1"].ok("deinit", "NODE1")
    assert node.events() == ["disconnect NODE1"]


def test_a_rolled_back_deinit_leaves_a_live_node(world: World, nodes: dict[str, Program]) -> None:
    with nodes["NODE2"].connection.transaction(force_rollback=True):
        nodes["NODE2"].ok("deinit", "NODE2")
    nodes["NODE1"].ok("evaluate")
    nodes["NODE3"].ok("deinit", "NODE3")
    assert nodes["NODE1"].events() == ["disconnect NODE3"]
    assert nodes["NODE2"].events() == ["disconnect NODE3"]


@pytest.mark.parametrize("act", ["UNLISTEN *", "a rolled back init"])
def test_init_with_already_listens_again(world: World, nodes: dict[str, Program], act: str) -> None:
    node = nodes["NODE2"]
    if act == "UNLISTEN *":
        node.connection.execute("UNLISTEN *")
    else:
        with node.connection.transaction(force_rollback=True):
            node.ok("deinit", "NODE2")
            node.ok("init", "NODE2")
    assert node.ok("init", "NODE2")["Already"] == 1
    nodes["NODE1"].ok("deinit", "NODE1")
    assert node.events() == ["disconnect NODE1"]


@pytest.fixture
def heir(world: World, nodes: dict[str, Program]) -> Program:
    """A backend of another role that has the pid of dead NODE2, and knows its channel."""
    channel, node = (
        nodes["NODE2"].query(f"SELECT current_setting('messages.{name}')")
        for name in ("channel", "node")
    )
    world.kill(nodes["NODE2"])
    heir = world.program("hostile")
    for update in PIDS:
        world.owner.connection.execute(update, [heir.pid, channel])
    heir.query("SELECT set_config('messages.channel', %s, false)", channel)
    heir.query("SELECT set_config('messages.node', %s, false)", node)
    return heir


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("topic_send", ("MYTOPIC", "x")),
        ("topic_send_many", ("MYTOPIC", ["x"])),
        ("topic_listen", ("MYTOPIC",)),
        ("topic_unlisten", ("MYTOPIC",)),
        ("topic_status", ("MYTOPIC",)),
        ("rpc", ("NODE1", "T", "x")),
        ("return", ("NODE1", "T", "x")),
        ("get_data", ("{}",)),
        ("use", ("NODE2",)),
        ("audience", ('{"Evt":"crash","Ident":"NODE1"}',)),
    ],
)
def test_another_role_with_the_pid_of_a_dead_session_cannot_act_as_its_node(
    heir: Program, function: str, arguments: tuple[str, ...]
) -> None:
    assert heir.error(function, *arguments)[0] == 50


def test_a_reused_pid_does_not_keep_a_dead_session_alive(
    nodes: dict[str, Program], heir: Program
) -> None:
    heir.ok("evaluate")
    assert nodes["NODE1"].events() == GONE


def test_another_role_with_the_pid_of_a_dead_session_cannot_deregister_its_node(
    nodes: dict[str, Program], heir: Program
) -> None:
    assert heir.ok("deinit", "NODE2")["Already"] == 1
    assert nodes["NODE1"].events() == GONE


def test_the_same_role_with_a_reused_pid_needs_the_channel(
    world: World, nodes: dict[str, Program]
) -> None:
    channel = nodes["NODE2"].query("SELECT current_setting('messages.channel')")
    world.kill(nodes["NODE2"])
    heir = world.program("user2")
    for update in PIDS:
        world.owner.connection.execute(update, [heir.pid, channel])
    node = world.owner.query("SELECT id::text FROM psqlmessages_client WHERE ident = 'NODE2'")
    heir.query("SELECT set_config('messages.node', %s, false)", node)
    assert heir.error("topic_status", "MYTOPIC")[0] == 50
    assert heir.error("topic_send", "MYTOPIC", "x")[0] == 50
    assert heir.error("use", "NODE2")[0] == 50


@pytest.mark.parametrize("lock", ["pg_try_advisory_lock", "pg_try_advisory_lock_shared"])
def test_a_hostile_lock_neither_keeps_a_dead_session_alive_nor_blocks_its_return(
    world: World, nodes: dict[str, Program], lock: str
) -> None:
    session = session_of(world, "NODE2")
    world.kill(nodes["NODE2"])
    assert world.program("hostile").query(f"SELECT {lock}({CLASS}, {session})")
    nodes["NODE1"].ok("evaluate")
    world.node("user2", "NODE2")
    assert nodes["NODE1"].events() == [*GONE, "connect NODE2"]


def test_init_draws_another_id_where_a_hostile_lock_is_on_the_one_it_drew(
    world: World, nodes: dict[str, Program]
) -> None:
    nodes["NODE2"].ok("deinit", "NODE2")
    scout, node = world.program("user2"), world.program("user2")
    scout.query("SELECT setseed(0.5)")
    scout.ok("init", "NODE2")
    foreseen = session_of(world, "NODE2")
    scout.ok("deinit", "NODE2")
    world.kill(scout)
    assert world.program("hostile").query(f"SELECT pg_try_advisory_lock({CLASS}, {foreseen})")
    node.query("SELECT setseed(0.5)")
    node.ok("init", "NODE2")
    # A session without its lock would have been found dead at once.
    assert session_of(world, "NODE2") not in (foreseen, None)
