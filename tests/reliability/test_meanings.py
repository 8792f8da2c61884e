"""What a name or a pattern means is the same in SQL and in Python."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psqlmessages.client.handlers import matches
from psqlmessages.models.names import NAME_CHARACTERS, patterns
from psqlmessages.relay.auth import matches_any
from tests.reliability.counts import report, size
from tests.sql.conftest import World

FAULT = "hostile names"
few = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
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


def test_a_pattern_means_the_same_names_everywhere(world: World):
    examples = 0

    @settings(few, max_examples=size(60, 500))
    @given(names=st.lists(NAMES, min_size=1, max_size=5), rules=st.lists(PATTERNS, max_size=5))
    def check(names: list[str], rules: list[str]) -> None:
        nonlocal examples
        examples += 1
        ask = "SELECT json_agg(messages._patterns(n)) FROM unnest(%s::text[]) AS v (n)"
        for name, of_sql in zip(names, world.owner.query(ask, names), strict=True):
            assert sorted(of_sql) == sorted(patterns(name))
            for rule in rules:
                means = matches(rule, name)
                assert (rule in of_sql) == matches_any(name, [rule]) == means, (rule, name)

    check()
    report(FAULT, "a pattern matches the same names in SQL and Python", examples=examples)
    # Of a longer one the patterns would take gigabytes, were they not few.
    name = "x" * 2_000
    assert len(patterns(name)) == NAME_CHARACTERS + 2
    assert sorted(patterns(name)) == sorted(
        world.owner.query("SELECT messages._patterns(%s)", name)
    )


def test_a_pattern_shows_the_same_names_in_every_view(world: World):
    watcher, examples = world.watcher, 0

    @settings(few, max_examples=size(10, 100))
    @given(
        names=st.lists(NAMES, min_size=1, max_size=5, unique=True),
        rules=st.lists(PATTERNS, max_size=3, unique=True),
    )
    def check(names: list[str], rules: list[str]) -> None:
        nonlocal examples
        examples += 1
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
        assert [set(seen) for seen in row] == [meant, meant & set(names)]

    check()
    report(FAULT, "a pattern shows the same names in every view", examples=examples)
