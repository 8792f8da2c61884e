"""The overloads with jsonb and interval, called as from psql."""

from psycopg.types.json import Jsonb

from tests.sql.conftest import World, parse


def test_bodies_and_headers_may_be_jsonb(world: World):
    world.rules("user1 A Topic T W 9", "user2 B Topic T R 9")
    world.rules("user1 A Rpc B W 9", "user2 B Rpc A W 9")
    sender, reader = world.node("user1", "A", notify="T"), world.node("user2", "B", listen="T")
    reader.payloads()
    body = {"name": "Zoë", "sizes": [1, 2.5, None]}
    sender.ok("topic_send", "T", Jsonb(body))
    sender.ok("topic_send_as", "A", "T", Jsonb(body), "a token")
    sender.ok("rpc", "B", "5", Jsonb(body))
    sender.ok("publish", "A", "T", Jsonb(body))
    told = [parse(payload) for payload in reader.payloads(3)]
    assert [(header["Type"], header["Enc"]) for header in told] == [
        ("Topic", "json"), ("Topic", "json"), ("Rpc", "json")
    ]  # fmt: skip
    reader.ok("return", "A", told[2]["Token"], Jsonb([1]))
    assert parse(sender.payloads()[-1])["Enc"] == "json"
    # A literal without a type stays text.
    sender.query("SELECT messages.topic_send('T', '[1]')")
    assert "Enc" not in parse(reader.payloads()[-1])


def test_delays_and_durations_may_be_intervals(world: World):
    world.rules("user1 W Queue Q RW 1")
    worker = world.program("user1")
    seconds = "round(extract(epoch FROM available_at - pushed_at)) FROM psqlmessages_element"
    worker.ok("push", "W", "Q", Jsonb({"a": 1}), Jsonb({"country": "it"}))
    is_it = "enc = 'json' AND headers ->> 'country' = 'it'"
    reserve = "SELECT lease FROM messages.reserve('W', 'Q', 1, interval '5 minutes')"
    lease = worker.query(f"{reserve} WHERE {is_it}")
    assert world.owner.query(f"SELECT {seconds}") == 300
    renewed = "SELECT tries FROM messages.renew('W', 'Q', interval '1 hour', %s)"
    assert worker.query(renewed, lease) == 0
    assert world.owner.query(f"SELECT {seconds}") == 3600
    assert worker.ok("rollback", "W", lease)["Done"] == [True]
    for arguments in (
        "'1'::jsonb, after => interval '1 day'", "'1'::jsonb, delay => 86400, key => 'k1'",
        "'x', interval '1 day'", "'x'::text, interval '1 day', headers => '{}', key => 'k2'",
        "'x', after => '1 day', tries => 1, enc => 'json'",
    ):  # fmt: skip
        worker.query(f"SELECT messages.push('W', 'Q', {arguments})")
    late = "SELECT count(*) FROM psqlmessages_element WHERE available_at > now() + interval '23 h'"
    assert world.owner.query(late) == 5
    for key in ("k1", "k2"):
        again = f"SELECT messages.push('W', 'Q', '2'::jsonb, key => '{key}')"
        assert worker.query(again)["Already"] == 1


def test_untyped_values_of_a_push_are_text_and_seconds(world: World):
    world.rules("user1 W Queue Q RW 1")
    worker = world.program("user1")
    values = ("json", '{"h":1}', None, "0", "0", "k")
    for count in range(len(values) + 1):
        for given in (values[:count], (None,) * count):
            placeholders = ", ".join(["%s"] * (3 + count))
            worker.query(f"SELECT messages.push({placeholders})", "W", "Q", "1", *given)
    for named in ("enc => NULL", "headers => '{}'", "delay => '0'", "delay => NULL, key => NULL"):
        worker.query(f"SELECT messages.push('W', 'Q', '1', {named})")
    encodings = [row.enc for row in worker.elements("pop", "W", "Q", 99)]
    # Without tries, which cannot be null, the call is refused.
    assert (encodings.count("json"), encodings.count(None)) == (6, 6 + 4)
