"""Crashes: a session that ended without deinit leaves no ghost and never blocks its own return."""

import pytest

from tests.sql.conftest import Program, World

Nodes = dict[str, Program]
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
def nodes(spec_world: World) -> Nodes:
    """The nodes of the documentation's example and a stranger; NODE2 listens and sends."""
    spec_world.rules("hostile STRANGER Topic OTHER RW 10")
    roles = {"NODE1": "user1", "NODE2": "user2", "NODE3": "user3", "STRANGER": "hostile"}
    nodes = {ident: spec_world.node(role, ident) for ident, role in roles.items()}
    nodes["NODE2"].ok("topic_listen", "MYTOPIC")
    nodes["NODE2"].ok("topic_notify", "MYTOPIC")
    for program in nodes.values():
        program.payloads()
    return nodes


def session_of(world: World, ident: str) -> int:
    """Id of the session on which a node is registered."""
    return world.owner.query("SELECT session_id FROM psqlmessages_client WHERE ident = %s", ident)


def test_a_crash_is_told_once_to_each_authorised_node_and_to_no_stranger(
    world: World, nodes: Nodes
) -> None:
    world.rules("user2 NODE4 Topic MYTOPIC R 10")
    nodes["NODE2"].ok("init", "NODE4")
    for ident in nodes:
        nodes[ident].payloads()
    world.kill(nodes["NODE2"])
    counts = [nodes[i].ok("evaluate")["Events"] for i in ("NODE1", "NODE3", "STRANGER", "NODE1")]
    assert counts == [len(GONE) + 1, 0, 0, 0]
    heard = {ident: nodes[ident].events() for ident in ("NODE1", "NODE3", "STRANGER")}
    gone = [*GONE, "crash NODE4"]
    assert heard == {"NODE1": gone, "NODE3": gone, "STRANGER": []}


def test_a_gateway_tells_of_a_crash_of_one_node_of_its_own(world: World, nodes: Nodes) -> None:
    world.rules("user2 GATE.* Topic MYTOPIC R 10")
    assert nodes["STRANGER"].call("crash", "NODE2") == {"Err": "0", "Already": 1}
    assert nodes["NODE1"].events() == []
    nodes["NODE2"].ok("init", "GATE.1")
    assert nodes["NODE2"].call("crash", "NODE2") == {"Err": "0"}
    assert nodes["NODE1"].events()[-5:] == GONE
    assert nodes["NODE2"].call("topic_listen", "MYTOPIC") == {"Err": "0"}


def test_a_dead_node_is_no_ghost_in_status_and_view_even_before_evaluation(
    world: World, nodes: Nodes
) -> None:
    world.kill(nodes["NODE2"])
    with nodes["NODE1"].connection.transaction(force_rollback=True):
        status = nodes["NODE1"].ok("topic_status", "MYTOPIC")
    assert (status["Notifiers"], status["Listeners"]) == ([], [])
    look = "SELECT notifiers || listeners FROM messages.topics WHERE topic = 'MYTOPIC'"
    assert nodes["NODE1"].query(look) == []
    assert session_of(world, "NODE2"), "it was evaluated already: the test shows nothing"


@pytest.mark.parametrize("role", ["user2", "user1"])
def test_a_killed_node_can_return_at_once_by_its_own_or_another_role(
    world: World, nodes: Nodes, role: str
) -> None:
    world.rules("user1 NODE2 Topic MYTOPIC RW 10")
    world.kill(nodes["NODE2"])
    returned = world.node(role, "NODE2")
    assert nodes["NODE1"].events() == [*GONE, "connect NODE2"]
    assert returned.error("topic_send", "MYTOPIC", "x")[0] == 21, "it neither sends nor listens"
    assert "Already" not in returned.ok("topic_listen", "MYTOPIC")


def test_each_node_and_topic_of_a_killed_session_is_told_of_to_those_of_its_own_rules(
    world: World,
) -> None:
    world.rules(
        "user1 ONE Topic RED R 10", "user1 TWO Topic RED R 10", "user1 TWO Topic BLUE R 10",
        "user1 SKY Topic BLUE R 10", "user1 ZERO Rpc ASKED W 10",
        "user2 OFRED Topic RED R 10", "user2 OFBLUE Topic BLUE R 10", "user2 ASKED Rpc NOBODY W 10",
    )  # fmt: skip
    others = {ident: world.node("user2", ident) for ident in ("OFRED", "OFBLUE", "ASKED")}
    many = world.gateway("user1", "ONE", "TWO", "SKY", "ZERO")
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
        "OFBLUE": [
            "crash SKY", "topic_unlisten TWO BLUE", "topic_none_listen BLUE", "crash TWO",
        ],
        "ASKED": ["crash ZERO"],
    }  # fmt: skip


@pytest.mark.parametrize("end", ["DISCARD ALL", "SELECT pg_advisory_unlock_all()"])
def test_discarding_or_unlocking_all_is_a_crash_and_init_makes_a_node_that_stays(
    nodes: Nodes, end: str
) -> None:
    node = nodes["NODE2"]
    node.execute(end)
    node.ok("init", "NODE2")
    for kind in "listen", "notify":
        node.ok(f"topic_{kind}", "MYTOPIC")
    nodes["NODE1"].ok("evaluate")
    nodes["NODE1"].ok("topic_notify", "MYTOPIC")
    nodes["NODE1"].ok("topic_send", "MYTOPIC", "x")
    assert node.bodies() == ["x"]
    nodes["NODE1"].ok("topic_unnotify", "MYTOPIC")
    nodes["NODE1"].payloads()
    node.execute(end)
    nodes["NODE1"].ok("evaluate")
    assert nodes["NODE1"].events() == GONE
    assert node.error("topic_listen", "MYTOPIC")[0] == 50


def test_reset_all_is_no_crash_and_init_says_already(nodes: Nodes) -> None:
    node = nodes["NODE2"]
    node.execute("RESET ALL")
    assert node.error("topic_notify", "MYTOPIC")[0] == 50
    assert node.ok("init", "NODE2")["Already"] == 1
    assert node.ok("topic_notify", "MYTOPIC")["Already"] == 1
    nodes["NODE1"].ok("evaluate")
    assert nodes["NODE1"].events() == []


def test_deinit_and_init_on_one_connection_work_again_and_again(world: World, nodes: Nodes) -> None:
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


def test_what_is_rolled_back_leaves_the_node_as_it_was(world: World, nodes: Nodes) -> None:
    with nodes["NODE2"].connection.transaction(force_rollback=True):
        nodes["NODE2"].ok("deinit", "NODE2")
    nodes["NODE1"].ok("evaluate")
    nodes["NODE3"].ok("deinit", "NODE3")
    assert nodes["NODE1"].events() == nodes["NODE2"].events() == ["disconnect NODE3"]
    node = world.program("user3")
    with node.connection.transaction(force_rollback=True):
        node.ok("init", "NODE3")
    assert node.error("topic_status", "MYTOPIC")[0] == 50
    assert "Already" not in node.ok("init", "NODE3")
    node.ok("topic_listen", "MYTOPIC")
    nodes["NODE1"].ok("deinit", "NODE1")
    assert node.events() == ["disconnect NODE1"]


def test_init_with_already_listens_again(nodes: Nodes) -> None:
    node, other = nodes["NODE2"], nodes["NODE1"]
    node.execute("UNLISTEN *")
    assert node.ok("init", "NODE2")["Already"] == 1
    other.ok("deinit", "NODE1")
    assert node.events() == ["disconnect NODE1"]
    with node.connection.transaction(force_rollback=True):
        node.ok("deinit", "NODE2")
        node.ok("init", "NODE2")
    assert node.ok("init", "NODE2")["Already"] == 1
    other.ok("init", "NODE1")
    assert node.events() == ["connect NODE1"]


@pytest.fixture
def heir(world: World, nodes: Nodes) -> Program:
    """A backend of another role that has the pid of dead NODE2, and knows its channel."""
    channel, node = (
        nodes["NODE2"].query(f"SELECT current_setting('messages.{name}')")
        for name in ("channel", "node")
    )
    world.kill(nodes["NODE2"])
    heir = world.program("hostile")
    for update in PIDS:
        world.execute(update, [heir.pid, channel])
    heir.query("SELECT set_config('messages.channel', %s, false)", channel)
    heir.query("SELECT set_config('messages.node', %s, false)", node)
    return heir


def test_another_role_with_the_pid_of_a_dead_session_cannot_act_as_its_node(heir: Program) -> None:
    for function, *arguments in (
        ("topic_send", "MYTOPIC", "x"), ("topic_send_many", "MYTOPIC", ["x"]),
        ("topic_listen", "MYTOPIC"), ("topic_unlisten", "MYTOPIC"), ("topic_status", "MYTOPIC"),
        ("rpc", "NODE1", "T", "x"), ("return", "NODE1", "T", "x"), ("get_data", "{}"),
        ("use", "NODE2"), ("audience", '{"Evt":"crash","Ident":"NODE1"}'),
    ):  # fmt: skip
        # Not committed, a call does not find the dead session for the next one.
        with heir.connection.transaction(force_rollback=True):
            assert heir.error(function, *arguments)[0] == 50, function


@pytest.mark.parametrize("call", [("evaluate",), ("deinit", "NODE2")])
def test_a_reused_pid_neither_keeps_a_dead_session_alive_nor_deregisters_its_node(
    nodes: Nodes, heir: Program, call: tuple[str, ...]
) -> None:
    assert heir.ok(*call).get("Already") == (1 if call[0] == "deinit" else None)
    assert nodes["NODE1"].events() == GONE


def test_the_same_role_with_a_reused_pid_needs_the_channel(world: World, nodes: Nodes) -> None:
    channel = nodes["NODE2"].query("SELECT current_setting('messages.channel')")
    world.kill(nodes["NODE2"])
    heir = world.program("user2")
    for update in PIDS:
        world.execute(update, [heir.pid, channel])
    node = world.owner.query("SELECT id::text FROM psqlmessages_client WHERE ident = 'NODE2'")
    heir.query("SELECT set_config('messages.node', %s, false)", node)
    for call in (
        ("topic_status", "MYTOPIC"), ("topic_send", "MYTOPIC", "x"), ("rpc", "NODE1", "T", "x"),
        ("return", "NODE1", "T", "x"), ("use", "NODE2"),
    ):  # fmt: skip
        with heir.connection.transaction(force_rollback=True):
            assert heir.error(*call)[0] == 50, call


@pytest.mark.parametrize("lock", ["pg_try_advisory_lock", "pg_try_advisory_lock_shared"])
def test_a_hostile_lock_neither_keeps_a_dead_session_alive_nor_blocks_its_return(
    world: World, nodes: Nodes, lock: str
) -> None:
    session = session_of(world, "NODE2")
    world.kill(nodes["NODE2"])
    assert world.program("hostile").query(f"SELECT {lock}({CLASS}, {session})")
    nodes["NODE1"].ok("evaluate")
    world.node("user2", "NODE2")
    assert nodes["NODE1"].events() == [*GONE, "connect NODE2"]


def test_init_draws_another_id_where_a_hostile_lock_is_on_the_one_it_drew(
    world: World, nodes: Nodes
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
