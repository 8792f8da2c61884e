"""Bodies over the limit of NOTIFY: kept once, fetched by whom they are for, and removed."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import product

import pytest

from tests.sql.conftest import Pair, Program, World, parse

pytestmark = pytest.mark.versions
LONG = "x" * 20_000
COUNT = "SELECT count(*) FROM psqlmessages_body"
PROLONG = "UPDATE psqlmessages_body SET expires_at = expires_at + %s"


@pytest.fixture
def payload(pair: Pair) -> str:
    """The payload of a long message of SENDER to T."""
    sender, listener = pair
    sender.ok("topic_send", "T", LONG)
    return listener.payloads(1)[0]


def missing(payload: str) -> tuple[dict[str, str], None]:
    """The answer to a key that does not exist, or that must seem so."""
    return {"Err": "13", "Errstr": f"Message {parse(payload)['Dkey']} not exists"}, None


def test_the_line_of_get_data_is_the_header_received_without_its_key(pair: Pair):
    sender, listener = pair
    for enc in None, "json":
        sender.ok("topic_send", "T", LONG, "TOKEN", enc)
        [payload] = listener.payloads()
        header = json.loads(payload)
        line, body = listener.data(payload)
        assert re.fullmatch(r"1000\.[0-9a-z.]+", header.pop("Dkey"))
        assert line == {"Err": "0", **header}
        assert (header["Size"], body) == (20_000, LONG)
        assert listener.query("SELECT messages.get_data(%s)", payload).startswith('{"Err":"0",')
        # It comes from what is kept, and not from the caller; and once more if asked for again.
        forged = {"Dkey": parse(payload)["Dkey"], "From": "FORGED", "Size": 1}
        assert listener.data(json.dumps(forged) + "\nforged") == (line, body)


def test_a_body_is_kept_once_however_many_receive_it(world: World, pair: Pair):
    world.rules("user2 MORE* Topic T R 10", "user3 EYE Topic T O 10")
    receivers = [world.node("user2", f"MORE{number}", listen="T") for number in range(3)]
    receivers += [pair[1], world.node("user3", "EYE", observe="T")]
    pair[0].ok("topic_send", "T", LONG)
    payloads = [receiver.payloads()[-1] for receiver in receivers]
    assert len(set(payloads)) == 1
    assert world.owner.query(COUNT) == 1
    assert [receiver.data(payloads[0])[1] for receiver in receivers] == [LONG] * 5


def test_only_listeners_and_observers_find_a_body(world: World, pair: Pair, payload: str):
    world.rules(
        "user3 WRITER Topic T W 10", "user3 MAYSEE Topic T O 10", "user3 ELSE Topic U RW 10",
        "user2 SAMEROLE Topic U R 10", "user3 EYE Topic T* O 10", "hostile EYE2 Topic * O 10",
        "user1 SENDER Topic U W 10",
    )  # fmt: skip
    eye = world.node("user3", "EYE", observe="T*")
    idents = {"WRITER": "user3", "MAYSEE": "user3", "ELSE": "user3", "SAMEROLE": "user2"}
    others = [world.node(role, ident) for ident, role in idents.items()]
    others += [world.node("hostile", "EYE2", observe="U TT*"), pair[0]]
    assert [node.data(payload) for node in others] == [missing(payload)] * 6
    assert eye.data(payload)[1] == LONG
    eye.ok("topic_unobserve", "T*")
    assert eye.data(payload) == missing(payload)
    # Nor does another node of the session, or one that has lost its rule.
    world.rules("user2 BESIDE Topic U R 10")
    listener = pair[1]
    listener.ok("init", "BESIDE")
    refused = listener.data(payload)
    listener.ok("use", "LISTENER")
    assert refused == missing(payload)
    assert listener.data(payload)[1] == LONG
    world.execute("DELETE FROM messages.auth WHERE ident = 'LISTENER' AND dest = 'T'")
    assert listener.data(payload) == missing(payload)


def test_the_body_of_an_rpc_is_for_the_node_asked_only(world: World, pair: Pair):
    sender, listener = pair
    world.rules("user2 BESIDE Topic T R 10")
    sender.ok("rpc", "LISTENER", "TOKEN", LONG)
    payload = listener.payloads()[-1]
    beside = world.node("user2", "BESIDE", listen="T")
    assert listener.data(payload)[1] == LONG
    assert [beside.data(payload), sender.data(payload)] == [missing(payload)] * 2


SLOT = re.compile(r"\.(\d+)")
ALTERED = {
    "another id": lambda key: key[:-1] + ("0" if key[-1] != "0" else "1"),
    "a new slot": lambda key: SLOT.sub(lambda slot: f".{(int(slot[1]) + 1) % 21}", key, count=1),
    "a slot that is none": lambda key: SLOT.sub(".21", key, count=1),
    "a slot beyond all numbers": lambda key: SLOT.sub("." + "9" * 20, key, count=1),
    "upper case": lambda key: key[:-32] + "A" * 32,
    "cut": lambda key: key[:-1],
    "longer": lambda key: key + "0",
    "SQL": lambda key: key.replace(".", "_0 WHERE true; --", 1),
    "a newline": lambda key: key + "\n",
}


def test_an_altered_key_finds_nothing(pair: Pair, payload: str):
    key = parse(payload)["Dkey"]
    for name, alter in ALTERED.items():
        line, body = pair[1].data(json.dumps({"Dkey": alter(key)}))
        assert (line["Err"], body) == ("13", None), name


def test_an_expired_body_differs_from_an_unknown_one_even_when_removed(world: World):
    world.rules("user1 QUICK Topic Q RW 1")
    quick = world.node("user1", "QUICK", listen="Q", notify="Q")
    quick.ok("topic_send", "Q", LONG)
    payload = quick.payloads()[-1]
    world.execute(PROLONG, [timedelta(hours=1)])
    assert quick.data(payload)[1] == LONG
    world.execute(PROLONG, [-timedelta(hours=1)])
    quick.query("SELECT pg_sleep(1.01)")
    key = parse(payload)["Dkey"]
    # No alteration of its key revives it.
    timeout, slot, expiry, chance = key.split(".")
    keys = [f"9{timeout}.{slot}.{expiry}.{chance}", f"{timeout}.{slot}.9{expiry}.{chance}"]
    answers = [quick.data(json.dumps({"Dkey": key})) for key in keys]
    assert [(line["Err"] in ("12", "13"), body) for line, body in answers] == [(True, None)] * 2
    expired = ({"Err": "12", "Errstr": f"Message {key} expired"}, None)
    assert quick.data(payload) == expired
    world.execute("TRUNCATE psqlmessages_body")
    assert quick.data(payload) == expired


# Any session may say so of itself; get_data then asks nothing but its own statement.
FETCH = """
    SELECT CASE WHEN set_config(
        'messages.housekeeping_at', to_hex(date_part('epoch', clock_timestamp())::bigint), false
    ) <> '' THEN messages.get_data(%s) END
"""


def fetched(program: Program, payload: str) -> tuple[str, bool]:
    """Call get_data; the number it answers, and whether a body follows."""
    line, newline, _ = program.query(FETCH, payload).partition("\n")
    return json.loads(line)["Err"], bool(newline)


def test_one_statement_fetches_for_listeners_only(world: World, pair: Pair, payload: str):
    nodes = ("user3 THIRD", "user2 BESIDE", "user2 HEIR")
    world.rules(*(f"{node} Topic OTHER R 5" for node in nodes))
    third, heir = world.node("user3", "THIRD", listen="OTHER"), world.node("user2", "HEIR")
    assert [fetched(node, payload) for node in (pair[0], third)] == [("13", False)] * 2
    assert fetched(pair[1], payload) == ("0", True)
    node = pair[1].query("SELECT current_setting('messages.node')")
    channel = pair[1].query("SELECT current_setting('messages.channel')")
    pair[1].ok("init", "BESIDE")
    assert fetched(pair[1], payload) == ("13", False)
    # Nor does the heir of the pid of its dead session, who knows its node.
    world.kill(pair[1])
    for table in "session", "membership":
        update = f"UPDATE psqlmessages_{table} SET pid = %s WHERE channel = %s"
        world.execute(update, [heir.pid, channel])
    heir.query("SELECT set_config('messages.node', %s, false)", node)
    assert fetched(heir, payload) == ("50", False)


def test_each_table_of_bodies_is_read_by_the_same_statement(world: World):
    prosrc = "SELECT prosrc FROM pg_proc WHERE oid = to_regproc('messages._select_body')"
    source = world.owner.query(prosrc)
    _, *parts = re.split(r"WHEN ([0-9]+) THEN", source.partition("ELSE NULL")[0])
    statements = {
        int(slot): re.sub(rf"(_body_|b\.slot = ){slot}\b", r"\1N", statement).strip()
        for slot, statement in zip(parts[::2], parts[1::2], strict=True)
    }
    assert list(statements) == list(range(21))
    assert len(set(statements.values())) == 1


# Long enough for no period to end during a test: bodies kept for 10^5 to 10^6 seconds.
CLASS = 5
PUT = """
    INSERT INTO psqlmessages_body (slot, id, topic_id, expires_at, header, body) SELECT
        messages._body_slot(%s, %s), gen_random_uuid(), t.id, now() + %s::interval, '"Id":1', 'kept'
    FROM (VALUES (1)) AS one LEFT JOIN psqlmessages_topic AS t ON t.name = 'T'
    RETURNING format('{"Dkey":"9.%%s.9999999999999.%%s"}', slot, replace(id::text, '-', ''))
"""


def put(world: World, turn: int, interval: str) -> str:
    """Keep a body in the table of a turn, expiring after that time; a payload to fetch it with."""
    return world.owner.query(PUT, CLASS, turn, interval)


def test_an_open_reader_delays_removal_and_blocks_no_call(world: World, pair: Pair):
    sender, listener = pair
    listener.execute("BEGIN")
    # Without a reader, the next housekeeping of any session empties this table.
    payload = put(world, 1, "1 hour")
    first = listener.data(payload)
    # Programs without a node delay nothing.
    for nobody in world.program("hostile"), world.program("user1"):
        nobody.execute("BEGIN")
        assert nobody.data(payload)[0]["Err"] == "50"
        assert fetched(nobody, payload) == ("50", False)
    sender.execute("SET statement_timeout = '30s'")
    sender.ok("evaluate")
    meanwhile = world.owner.query(COUNT)
    again = listener.data(payload)
    listener.execute("COMMIT")
    sender.ok("evaluate")
    assert first == again == ({"Err": "0", "Id": 1}, "kept")
    assert (meanwhile, world.owner.query(COUNT)) == (1, 0)


def test_removal_waits_for_no_sender_and_hides_nothing_before_its_commit(world: World, pair: Pair):
    sender, listener = pair
    listener.execute("SET statement_timeout = '30s'")
    put(world, 1, "-1 hour")
    with sender.connection.transaction():
        sender.ok("topic_send", "T", LONG)
        listener.ok("evaluate")
        assert world.owner.query(COUNT) == 0
    assert listener.data(listener.payloads()[-1])[1] == LONG
    put(world, 1, "-1 hour")
    payload = put(world, 1, "1 hour")
    with sender.connection.transaction():
        sender.ok("evaluate")
        assert listener.data(payload)[1] == "kept"


@pytest.fixture
def clock(world: World) -> Iterator[Program]:
    """The owner in a transaction whose functions take the time from the setting test.clock."""
    owner = world.owner
    owner.execute("BEGIN")
    for name in ("_body_slot", "_store_body"):
        source = owner.query("SELECT pg_get_functiondef(%s::regproc)", f"messages.{name}")
        assert "clock_timestamp()" in source
        test_clock = "current_setting('test.clock')::timestamptz"
        owner.execute(source.replace("clock_timestamp()", test_clock))
    yield owner
    owner.execute("ROLLBACK")


def at(clock: Program, moment: float) -> None:
    clock.query("SELECT set_config('test.clock', to_timestamp(%s::numeric)::text, true)", moment)


PERIODS = [10, 100, 1000, 10_000, 100_000, 1_000_000]
TIMEOUTS = [period + more for period in PERIODS for more in (0, 1)]


def test_nothing_unexpired_is_ever_removed_and_all_that_expired_is(clock: Program):
    wrong = []
    for timeout, part in product([1, 9, *TIMEOUTS, 2**31 - 1], [0, 0.5, 0.999999]):
        period = next((period for period in PERIODS if timeout <= period), 2**31 - 1)
        kept_at = period * (10**10 // period + 1 + part)
        at(clock, kept_at)
        clock.query("SELECT messages._store_body(%s, '', 'body', NULL, NULL)", timeout)
        counts = []
        for age in (0, timeout / 3, timeout / 2, timeout * 0.999, 3 * period):
            at(clock, kept_at + age)
            clock.query("SELECT messages._truncate_expired_bodies()")
            counts.append(clock.query(COUNT))
        for step in range(3):
            at(clock, kept_at + (3 + step) * period)
            clock.query("SELECT messages._truncate_expired_bodies()")
        if counts[:4] != [1] * 4 or clock.query(COUNT):
            wrong.append((timeout, part))
            clock.execute("TRUNCATE psqlmessages_body")
    assert not wrong
