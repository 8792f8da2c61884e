"""What a name or a pattern means is the same in SQL and in Python."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psqlmessages.client.handlers import matches
from psqlmessages.models.names import NAME_CHARACTERS, patterns
from psqlmessages.relay.auth import matches_any
from tests.reliability.counts import report, size
from tests.sql.conftest import World

FAULT = "hostile names"
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
few = settings(deadline=None, suppress_health_check=SUPPRESSED)
# Prefixes of each other, letters that look alike or take several bytes, and syntax of SQL.
LETTERS = "aaab*%_\\.'é漢🐘\u0301\n "
TEXT = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
PATTERNS = st.text(LETTERS, min_size=1, max_size=5) | st.text(TEXT, min_size=1, max_size=100)
NAMES = PATTERNS.map(lambda text: text.rstrip("*") or "a")


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
    # The number of patterns of a long name is limited.
    name = "x" * 2_000
    assert len(patterns(name)) == NAME_CHARACTERS + 2
    of_sql = world.owner.query("SELECT messages._patterns(%s)", name)
    assert sorted(patterns(name)) == sorted(of_sql)
