"""Which mutants there are, and which test kills each."""

import re
from collections import Counter
from functools import cached_property
from pathlib import Path

import psycopg

from tests.mutation.mutants import Mutant, mutants

TESTS = Path(__file__).parents[1]
FOLDERS = "sql", "streams", "queues", "exchanges", "reliability"
SOURCES = """
    SELECT p.proname, pg_get_functiondef(p.oid) FROM pg_proc AS p
    WHERE p.pronamespace = 'messages'::regnamespace
    ORDER BY length(p.prosrc)  -- of functions with the same name, the longest one is used
"""
# Mutants that no rule makes: a weaker secret, the rights of another, a lock less.
# What a MAC is computed of, and a part of it that is left out.
WITHOUT = "convert_to(regexp_replace(content, {}), 'UTF8')"
PARTS = ("'^[0-9]+', ''", "' node [^ ]+', ''", r"'[0-9]+( [^ ]+)$', '\1'", "'[^ ]+$', ''")
BY_HAND = (
    ("_permissions", "bool_or(a.mode = 'O')", "true"),
    ("_patterns", "least(length(v_prefix), 100)", "length(v_prefix)"),
    ("_has_any_rule", "RETURN EXISTS (", "RETURN true OR EXISTS ("),
    ("_open_session", "gen_random_uuid()::text", "md5(random()::text)"),
    ("init", "right(ident, 1) <> '*' AND", ""),
    ("_remove_channel", "array_remove(t.channels, _remove_channel.channel)", "t.channels"),
    ("get_data", "(1?[0-9]|20)", "([0-9]+)"),
    ("get_data", "OR NOT EXISTS (", "OR false AND NOT EXISTS ("),
    ("_reply_token_mac", "asker || ' ' || answerer", "left(asker::text, 0) || answerer"),
    ("_reply_token_mac", "' ' || answerer || ' '", "left(answerer, 0) || ' '"),
    ("_reply_token_mac", "|| timeout ||", "|| left(timeout, 0) ||"),
    ("_reply_token_mac", "timeout || ' ' || token", "timeout || ' ' || left(token, 0)"),
    *(("_hmac", "convert_to(content, 'UTF8')", WITHOUT.format(part)) for part in PARTS),
    ("_hmac", "'hex'), 32)", "'hex'), 2) || repeat('0', 30)"),
    ("_hmac", "outer_pad || ", ""),
    ("_hmac", "inner_pad || ", ""),
    ("_make_secret", "v_key bytea := sha256(", "v_key bytea := sha256('x'); v_b bytea := sha256("),
    ("_make_secret", "0 .. 31 LOOP", "0 .. 7 LOOP"),
    (
        "rpc",
        "messages._permissions(session_user, p.own_ident, 'Rpc', node) AS r",
        "(SELECT true AS can_write, 5 AS timeout) AS r",
    ),
    ("rpc", "messages._permissions(session_user, ", "messages._permissions('user2', "),
    ("rpc", "'Rpc', node)", "'Topic', node)"),
    ("_publishers", "WHERE messages._publishing_proof", "WHERE true OR messages._publishing_proof"),
    ("_begin_publishing", "WHILE NOT (", "WHILE false AND NOT ("),
    ("_commits_immediately", "strpos(context, E'\\n') = 0", "true"),
    ("_commits_immediately", "(v_query IS NULL", "(true"),
    ("read_stream", "messages._watermark(v_topic))", "9223372036854775807)"),
    ("_lock_elements", "            FOR UPDATE\n", "            FOR UPDATE SKIP LOCKED\n"),
)


class Killers:
    """The file killers.txt: a test and a mutant in each line."""

    path = Path(__file__).with_name("killers.txt")

    def __init__(self) -> None:
        lines = (line.partition(" | ") for line in self.path.read_text().splitlines())
        self.by_mutant = {mutant: test for test, _, mutant in lines}

    def add(self, mutant: str, test: str) -> None:
        self.by_mutant[mutant] = test
        lines = sorted(f"{test} | {mutant}\n" for mutant, test in self.by_mutant.items())
        self.path.write_text("".join(lines))


class Catalogue:
    """The functions of an installed database, and what can be taken out of them."""

    def __init__(self, owner: psycopg.Connection) -> None:
        self._sources: dict[str, str] = dict(owner.execute(SOURCES).fetchall())

    def mutants(self, beginning: str = "") -> dict[str, Mutant]:
        found = [mutant for each in self._sources.items() for mutant in mutants(*each)]
        for function, old, new in BY_HAND:
            source = self._sources[function]
            start = source.index(old)
            found.append(Mutant(function, source, start, start + len(old), new))
        return {each.name: each for each in found if each.name.startswith(beginning)}

    def files_for(self, function: str) -> list[Path]:
        """Test files that call it, directly or not; first those that call it most and directly."""
        weights: dict[str, float] = {}
        callers, weight = {function}, 1.0
        while callers:
            weights |= dict.fromkeys(callers, weight)
            weight /= 10
            called = re.compile(rf"messages\.({'|'.join(callers)})\(")
            callers = {name for name, source in self._sources.items() if called.search(source)}
            callers -= set(weights)
        public = {name for name in weights if not name.startswith("_")} or set(self._files_with)
        score = {
            file: sum(words[n] * weights.get(n, 1) / self._files_with[n] for n in public)
            for file, words in self._words.items()
        }
        return sorted((file for file in score if score[file]), key=lambda file: -score[file])

    @cached_property
    def _words(self) -> dict[Path, Counter[str]]:
        return {
            file: Counter(re.findall(r"\w+", file.read_text()))
            for folder in FOLDERS
            for file in (TESTS / folder).rglob("test_*.py")
        }

    @cached_property
    def _files_with(self) -> dict[str, int]:
        names = [name for name in self._sources if not name.startswith("_")]
        return {name: sum(name in words for words in self._words.values()) or 1 for name in names}
