"""Crashes: a session that ended without deinit leaves no ghost, and never blocks its return."""

from collections.abc import Callable, Iterator

import pytest

from tests.sql.conftest import Program, World
from tests.sql.simultaneous import begins_with, in_background

Nodes = dict[str, Program]
CLASS = 1886612839
GONE = [
    "topic_unlisten NODE2 MYTOPIC", "topic_none_listen MYTOPIC", "topic_unnotify NODE2 MYTOPIC",
    "topic_none_notify MYTOPIC", "crash NODE2",
]  # fmt: skip


@pytest.fixture
def nodes(spec_world: World) -> Nodes:
    """The nodes of the documentation's example and a stranger; NODE2 listens and sends."""
    spec_world.rules("hostile STRANGER Topic OTHER RW 10")
    nodes = {
        "NODE1": spec_world.node("user1", "NODE1"),
        "NODE2": spec_world.node("user2", "NODE2", listen="MYTOPIC", notify="MYTOPIC"),
        "NODE3": spec_world.node("user3", "NODE3"),
        "STRANGER": spec_world.node("hostile", "STRANGER"),
    }
    spec_world.forget()
    return nodes


def session_of(world: World, ident: str) -> int:
    return world.owner.query("SELECT session_id FROM psqlmessages_client WHERE ident = %s", ident)


def test_a_crash_is_reported_once_to_authorised_nodes_only(world: World, nodes: Nodes):
    world.rules("user2 NODE4 Topic MYTOPIC R 10")
    nodes["NODE2"].ok("init", "NODE4")
    world.forget()
    world.kill(nodes.pop("NODE2"))
    # No ghost is in status and view even before an evaluation.
    one = nodes["NODE1"]
    with one.connection.transaction(force_rollback=True):
        status = one.ok("topic_status", "MYTOPIC")
    assert (status["Notifiers"], status["Listeners"]) == ([], [])
    look = "SELECT notifiers || listeners FROM messages.topics WHERE topic = 'MYTOPIC'"
    assert one.query(look) == []
    assert session_of(world, "NODE2"), "it was evaluated already: the test shows nothing"
    counts = [node.ok("evaluate")["Events"] for node in (*nodes.values(), one)]
    assert counts == [len(GONE) + 1, 0, 0, 0]
    gone = [*GONE, "crash NODE4"]
    heard = {ident: node.events() for ident, node in nodes.items()}
    assert heard == {"NODE1": gone, "NODE3": gone, "STRANGER": []}


def test_a_gateway_tells_of_a_crash_of_one_node_of_its_own(world: World, nodes: Nodes):
    world.rules("user2 GATE.* Topic MYTOPIC R 10")
    assert nodes["STRANGER"].call("crash", "NODE2") == {"Err": "0", "Already": 1}
    assert nodes["NODE1"].events() == []
    nodes["NODE2"].ok("init", "GATE.1")
    assert nodes["NODE2"].call("crash", "NODE2") == {"Err": "0"}
    assert nodes["NODE1"].events()[-5:] == GONE
    assert nodes["NODE2"].call("topic_listen", "MYTOPIC") == {"Err": "0"}


@pytest.mark.parametrize("role", ["user2", "user1"])
def test_a_killed_node_can_return_by_any_role(world: World, nodes: Nodes, role: str):
    world.rules("user1 NODE2 Topic MYTOPIC RW 10")
    world.kill(nodes["NODE2"])
    returned = world.node(role, "NODE2")
    assert nodes["NODE1"].events() == [*GONE, "connect NODE2"]
    assert returned.error("topic_send", "MYTOPIC", "x")[0] == 21, "it neither sends nor listens"
    assert "Already" not in returned.ok("topic_listen", "MYTOPIC")


@pytest.mark.parametrize("end", ["DISCARD ALL", "SELECT pg_advisory_unlock_all()"])
def test_discard_all_and_unlock_all_are_crashes_that_init_repairs(nodes: Nodes, end: str):
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


def test_reset_all_is_no_crash_and_deinit_and_init_work_again_and_again(nodes: Nodes):
    node = nodes["NODE2"]
    node.execute("RESET ALL")
    assert node.error("topic_notify", "MYTOPIC")[0] == 50
    assert node.ok("init", "NODE2")["Already"] == 1
    assert node.ok("topic_notify", "MYTOPIC")["Already"] == 1
    nodes["NODE1"].ok("evaluate")
    assert nodes["NODE1"].events() == []
    channels = set()
    for _ in range(5):
        node.ok("deinit", "NODE2")
        channels.add(node.ok("init", "NODE2")["Channel"])
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    listening = node.query("SELECT count(*) FROM pg_listening_channels()")
    assert (len(channels), node.query(locks), listening) == (5, 1, 1)


def test_a_rollback_leaves_the_node_unchanged(world: World, nodes: Nodes):
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


def test_init_with_already_listens_again(nodes: Nodes):
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
def inherit(world: World, nodes: Nodes) -> Callable[..., Program]:
    """Kill NODE2: a backend of a role that has its pid, and settings of its session."""
    look = "SELECT current_setting('messages.{}')"
    had = {name: nodes["NODE2"].query(look.format(name)) for name in ("channel", "node")}
    world.kill(nodes["NODE2"])

    def inherit(role: str, *settings: str) -> Program:
        heir = world.program(role)
        for table in "session", "membership":
            update = f"UPDATE psqlmessages_{table} SET pid = %s WHERE channel = %s"
            world.execute(update, [heir.pid, had["channel"]])
        for name in settings:
            heir.query("SELECT set_config(%s, %s, false)", f"messages.{name}", had[name])
        return heir

    return inherit


@pytest.mark.parametrize(
    ("role", "settings"),
    # Another role, or no channel.
    [("hostile", ["channel", "node"]), ("user2", ["node"])],
)
def test_a_reused_pid_is_refused(inherit: Callable[..., Program], role: str, settings: list[str]):
    heir = inherit(role, *settings)
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
    nodes: Nodes, inherit: Callable[..., Program], call: tuple[str, ...]
):
    heir = inherit("hostile", "channel", "node")
    assert heir.ok(*call).get("Already") == (1 if call[0] == "deinit" else None)
    assert nodes["NODE1"].events() == GONE


@pytest.mark.parametrize("lock", ["pg_try_advisory_lock", "pg_try_advisory_lock_shared"])
def test_a_hostile_lock_keeps_no_dead_session_alive(world: World, nodes: Nodes, lock: str):
    session = session_of(world, "NODE2")
    world.kill(nodes["NODE2"])
    assert world.program("hostile").query(f"SELECT {lock}({CLASS}, {session})")
    nodes["NODE1"].ok("evaluate")
    world.node("user2", "NODE2")
    assert nodes["NODE1"].events() == [*GONE, "connect NODE2"]


def test_init_draws_another_id_if_a_hostile_lock_is_on_it(world: World, nodes: Nodes):
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


@pytest.fixture
def pause(world: World) -> Iterator[None]:
    """Let whoever tells of a crash wait until nobody holds advisory lock 77."""
    # Not by asking for the lock: evaluation does not wait so long for one.
    statement = """
        WHILE EXISTS (
            SELECT FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' AND l.objid = 77
        ) LOOP PERFORM pg_sleep(0.01); END LOOP;
    """
    with begins_with(world, "_event_audience_key", statement):
        yield


@pytest.mark.usefixtures("pause")
def test_a_node_that_loses_its_right_gets_no_further_crash_events(world: World):
    world.rules(
        "user1 D1 Topic T R 10", "user1 D2 Topic T R 10", "user2 STAYS Topic T R 10",
        "user3 LOSES Topic T R 10", "user3 LOSES Topic OTHER R 10",
    )  # fmt: skip
    stays, loses = world.node("user2", "STAYS"), world.node("user3", "LOSES")
    dead = world.node("user1", "D1", "D2")
    dead.each(["D1", "D2"], "topic_listen", "T")
    world.forget()
    world.owner.query("SELECT pg_advisory_lock(77)::text")
    world.kill(dead)
    with in_background(lambda: stays.ok("topic_status", "T")):
        sleeps = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s"
        world.wait_for(sleeps, stays.pid)
        world.execute("DELETE FROM messages.auth WHERE ident = 'LOSES' AND dest = 'T'")
        world.owner.query("SELECT pg_advisory_unlock(77)")
    gone = ["topic_unlisten D1 T", "crash D1", "topic_unlisten D2 T", "topic_none_listen T"]
    assert stays.events() == [*gone, "crash D2"]
    # This was told before.
    assert loses.events() == gone[:1]
