"""The secret of the reply tokens: nobody without it makes one."""

import hmac
import re
from pathlib import Path

from tests.sql.conftest import Pair, World

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
NEW_SECRET = re.compile(r"## A new secret.*?-- as owner\n(.*?)```", re.DOTALL)


def secret(world: World) -> tuple[bytes, bytes]:
    """The key of the tokens, as each of its two pads holds it."""
    row = world.execute("SELECT inner_pad, outer_pad FROM messages._secret").fetchone()
    assert row is not None
    inner, outer = (bytes(pad) for pad in row)
    return bytes(b ^ 0x36 for b in inner), bytes(b ^ 0x5C for b in outer)


def token_of(pair: Pair, function: str, *arguments: str) -> str:
    """SENDER asks; the token that LISTENER received."""
    sender, listener = pair
    sender.ok(function, *arguments)
    return str(listener.headers()[-1]["Token"])


def test_a_token_is_the_hmac_of_the_secret(world: World, pair: Pair) -> None:
    key, same = secret(world)
    assert (same, len(key)) == (key, 64)
    asker = world.owner.query("SELECT id FROM psqlmessages_client WHERE ident = 'SENDER'")
    topic = world.owner.query("SELECT id FROM psqlmessages_topic WHERE name = 'T'")
    asked = {
        token_of(pair, "rpc", "LISTENER", "TOKEN", "x"): ("", 'node "LISTENER"'),
        token_of(pair, "topic_send", "T", "x", "TOKEN"): (f"{topic}.", f"topic {topic}"),
    }
    for token, (head, answerer) in asked.items():
        text = f"{asker} {answerer} 1000 TOKEN"
        mac = hmac.new(key, text.encode(), "sha256").hexdigest()
        assert token == f"{head}{mac[:32]} 1000 TOKEN"


def test_a_secret_is_256_random_bits(world: World) -> None:
    keys = []
    for _ in range(16):
        with world.owner.connection.transaction(force_rollback=True):
            world.execute("DELETE FROM messages._secret")
            world.owner.query("SELECT messages._make_secret()::text")
            keys.append(secret(world)[0])
    # A byte that two of sixteen keys share is no wonder, one that most share is.
    assert all(len(set(values)) > 8 for values in list(zip(*keys, strict=True))[:32])


def test_an_encoding_that_there_is_not_is_no_answer(pair: Pair) -> None:
    sender, listener = pair
    token = token_of(pair, "rpc", "LISTENER", "TOKEN", "x")
    for enc in ("gzip", 'b64","From":"OTHER', "JSON"):
        assert listener.error("return", "SENDER", token, "x", enc)[0] == 55
    assert sender.headers() == []


def test_a_new_secret_drawn_as_documented_refuses_what_was_on_the_way_and_loses_nothing(
    world: World, pair: Pair
) -> None:
    former = token_of(pair, "rpc", "LISTENER", "TOKEN", "x")
    found = NEW_SECRET.search(OPERATIONS.read_text())
    assert found is not None
    for statement in found[1].splitlines():
        world.execute(statement)
        token = token_of(pair, "rpc", "LISTENER", "TOKEN", "x")
    assert pair[1].error("return", "SENDER", former, "y")[0] == 20
    pair[1].ok("return", "SENDER", token, "y")
