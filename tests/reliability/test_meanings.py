"""What a name, a pattern, a token or a header means is the same in SQL and in Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psqlmessages.client.handlers import matches
from psqlmessages.models.names import NAME_CHARACTERS, patterns
from psqlmessages.relay.identities import is_meant
from tests.reliability.counts import counted, size
from tests.sql.conftest import World

FAULT = "hostile names, tokens and headers"
few = settings(
    max_examples=size(25, 500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Beginnings of each other, and what looks alike, is longer in bytes, or means something in SQL.
LETTERS = "aaab*%_\\.'é漢🐘\u0301\n "
TEXT = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
PATTERNS = st.text(LETTERS, min_size=1, max_size=5) | st.text(TEXT, min_size=1, max_size=100)
NAMES = PATTERNS.map(lambda text: text.rstrip("*") or "a")
IN_ALL = """
    SELECT coalesce((SELECT array_agg(t.topic) FROM messages.topics AS t), '{}'),
           coalesce((SELECT array_agg(q.queue) FROM messages.queues AS q), '{}')
"""
LIKE = """
    SELECT coalesce(array_agg(t.name::text), '{}') FROM psqlmessages_topic AS t
    WHERE t.id IN (SELECT messages._topics_like(%s))
"""
OF_TOPICS = "INSERT INTO psqlmessages_topic (name) SELECT unnest(%s::text[])"
OF_QUEUES = (
    "INSERT INTO psqlmessages_queue (name, channel) SELECT n, md5(n) FROM unnest(%s::text[]) AS n"
)
OF_RULES = """
    INSERT INTO psqlmessages_auth (role, ident, type, dest, mode, timeout)
    SELECT 'hostile', 'N', t, p, 'RW', 5
    FROM unnest(%s::text[]) AS p CROSS JOIN (VALUES ('Topic'), ('Queue')) AS v (t)
"""
OF_REFERENCES = """
    SELECT messages._malformed_ref(%(refs)s::text[]), messages._plain_ids(%(refs)s::text[]),
           ARRAY(SELECT messages._leased_id(r) FROM unnest(%(refs)s::text[]) AS v (r))
"""
LEASES = st.sampled_from(["", ".", "\n", ",1", f".{UUID(int=1)}", f".{UUID(int=1)}\n"])
REFERENCE = r"[1-9][0-9]{0,17}(\.[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?"


class Tally:
    """How many examples a test made, told at its end."""

    def __init__(self) -> None:
        self.examples = 0


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    tally = Tally()
    yield tally
    what = request.node.name.removeprefix("test_").replace("_", " ")
    counted(FAULT, what, examples=tally.examples)


@pytest.fixture
def ask(world: World) -> Callable[..., Any]:
    """Ask the owner's connection for a value."""
    return world.owner.query


# Patterns


@settings(few, max_examples=size(60, 500))
@given(names=st.lists(NAMES, min_size=1, max_size=5), rules=st.lists(PATTERNS, max_size=5))
def test_a_pattern_means_the_same_names_everywhere(
    ask: Callable[..., Any], tally: Tally, names: list[str], rules: list[str]
) -> None:
    tally.examples += 1
    lists = ask("SELECT json_agg(messages._patterns(n)) FROM unnest(%s::text[]) AS v (n)", names)
    for name, of_sql in zip(names, lists, strict=True):
        assert sorted(of_sql) == sorted(patterns(name))
        for rule in rules:
            means = matches(rule, name)
            assert (rule in of_sql) == is_meant(name, [rule]) == means, (rule, name)


@settings(few, max_examples=size(10, 100))
@given(
    names=st.lists(NAMES, min_size=1, max_size=5, unique=True),
    rules=st.lists(PATTERNS, max_size=3, unique=True),
)
def test_a_pattern_shows_the_same_names_in_every_view(
    world: World, tally: Tally, names: list[str], rules: list[str]
) -> None:
    tally.examples += 1
    watcher = world.watcher
    with watcher.connection.transaction(force_rollback=True):
        watcher.connection.execute(OF_TOPICS, [names])
        watcher.connection.execute(OF_QUEUES, [names])
        watcher.connection.execute(OF_RULES, [rules])
        # A rule for a topic makes it.
        topics = {*names, *(rule for rule in rules if not rule.endswith("*"))}
        for rule in rules:
            like = watcher.query(LIKE, rule)
            assert sorted(like) == sorted(name for name in topics if matches(rule, name))
        watcher.connection.execute("SET LOCAL SESSION AUTHORIZATION hostile")
        row = watcher.connection.execute(IN_ALL).fetchone()
    meant = {name for name in topics if any(matches(rule, name) for rule in rules)}
    assert row is not None
    assert [set(seen) for seen in row] == [meant, meant & set(names)]


def test_the_patterns_of_a_giant_name_are_few(ask: Callable[..., Any]) -> None:
    # Of a longer one they would take gigabytes, were they not few.
    name = "x" * 2_000
    assert len(patterns(name)) == NAME_CHARACTERS + 2
    assert sorted(patterns(name)) == sorted(ask("SELECT messages._patterns(%s)", name))


# Tokens and keys


def split(token: str) -> tuple[int | None, str | None, str, str]:
    """Split a token as `_split_token` should: the topic's id, the MAC, the timeout, one's own."""
    crypt, _, rest = token.partition(" ")
    timeout, _, own = rest.partition(" ")
    found = re.fullmatch(r"(?:([0-9]{1,18})\.)?([0-9a-f]{32})", crypt)
    if found is None or not re.fullmatch("[0-9]{1,10}", timeout) or own == "":
        return None, None, timeout, own
    return int(found[1]) if found[1] else None, found[2], timeout, own


HEX = st.text("0123456789abcdefAg", min_size=31, max_size=33) | st.just("0" * 32)
DIGITS = st.text("0123456789٣x-", max_size=19)
CRYPTS = HEX | st.builds("{}.{}".format, DIGITS, HEX) | st.text(TEXT, max_size=40)
OWN = st.text(TEXT, max_size=20)


def is_text(value: object) -> bool:
    """Whether PostgreSQL can hold all texts of a JSON value."""
    if isinstance(value, str):
        return "\x00" not in value and not re.search("[\ud800-\udfff]", value)
    if isinstance(value, dict):
        return all(is_text(key) and is_text(each) for key, each in value.items())
    return not isinstance(value, list) or all(map(is_text, value))


ANY_TEXT = st.text(max_size=10) | st.text('ab\ud800\udc18\x00"\\/é🐘\n', max_size=6)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["Dkey", "dkey", "Dkey ", "Type", ""])
LINES = st.builds(json.dumps, st.dictionaries(FIELDS, ANY_TEXT | st.none(), max_size=4))
BROKEN = st.builds(lambda line, at, with_: line[:at] + with_ + line[at:], LINES,
                   st.integers(0, 30), st.text("{}[]\",:\\ux0 NaN", max_size=3))  # fmt: skip


def parsed(text: str) -> Any:
    """Read JSON as PostgreSQL does, which knows no NaN; None where it is none."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(text, parse_constant=refuse, parse_float=str)
    except ValueError:
        return None
    return value if is_text(value) else None


HEADERS = st.builds(json.dumps, ANY_JSON) | BROKEN | st.just("")
HOPS = st.text("0123456789-. ٣", max_size=12) | st.integers(-5, 10**12) | st.none()
REFERENCES = st.lists(
    st.builds("{}{}".format, st.text("0123456789", max_size=20), LEASES)
    | st.text("0123456789., abcdef-\n", max_size=50),
    max_size=4,
)
TOKENS = st.builds("{} {} {}".format, CRYPTS, DIGITS, OWN) | st.text(TEXT, max_size=60)


@few
@given(
    token=TOKENS, line=LINES | BROKEN, body=st.none() | st.text(TEXT, max_size=10),
    headers=HEADERS, hops=HOPS, references=REFERENCES,
)  # fmt: skip
def test_tokens_headers_and_references_mean_the_same_in_python(
    world: World,
    tally: Tally,
    token: str,
    line: str,
    body: str | None,
    headers: str,
    hops: str | int | None,
    references: list[str],
) -> None:
    tally.examples += 1
    execute, ask = world.owner.connection.execute, world.owner.query
    row = execute(
        "SELECT topic_id, mac, timeout, own FROM messages._split_token(%s)", [token]
    ).fetchone()
    assert row is not None
    expected = split(token)
    # Without a MAC nothing else of it is used.
    assert row[1:] == expected[1:]
    assert expected[1] is None or row[0] == expected[0]

    header = parsed(line.partition("\n")[0])
    key = header.get("Dkey") if isinstance(header, dict) else None
    found = ask("SELECT messages._dkey(%s)", line if body is None else f"{line}\n{body}")
    assert found == (key if key is None or isinstance(key, str) else json.dumps(key))

    value = parsed(headers) if headers else {}
    found = ask("SELECT messages._parsed_headers(%s)", headers)
    if isinstance(value, dict) and "e" not in headers.lower():
        assert found == value
    else:
        assert found is None or isinstance(value, dict)

    text = "" if hops is None else str(hops)
    number = min(int(text), 999_999_999) if re.fullmatch("[0-9]+", text) else 0
    found = ask("SELECT messages._hops(%s::jsonb)", json.dumps({"x-hop-count": hops}))
    assert found == number or (len(text) > 9 and found == 999_999_999)

    malformed = [each for each in references if not re.fullmatch(REFERENCE, each)]
    plain = all(re.fullmatch("[1-9][0-9]{0,17}", each) for each in references)
    begins = [re.fullmatch("[0-9]{1,18}", each.partition(".")[0]) for each in references]
    assert execute(OF_REFERENCES, {"refs": references}).fetchone() == (
        malformed[0] if malformed else None,
        [int(each) for each in references] if plain and references else None,
        [int(found[0]) if found else None for found in begins],
    )
