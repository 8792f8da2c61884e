"""Which mutants there are, and which test kills each."""

import re
from functools import cached_property
from pathlib import Path

import psycopg

from tests.mutation.by_hand import BY_HAND
from tests.mutation.mutants import Mutant, mutants

TESTS = Path(__file__).parents[1]
SOURCES = """
    SELECT p.proname, pg_get_functiondef(p.oid) FROM pg_proc AS p
    WHERE p.pronamespace = 'messages'::regnamespace
"""


class Killers:
    """The file killers.txt: a test and a mutant in each line."""

    path = Path(__file__).with_name("killers.txt")

    def __init__(self) -> None:
        lines = (line.partition(" | ") for line in self.path.read_text().splitlines())
        self.by_mutant = {mutant: test for test, _, mutant in lines}

    def add(self, mutant: str, test: str) -> None:
        """Note who killed a mutant."""
        self.by_mutant[mutant] = test
        lines = sorted(f"{test} | {mutant}\n" for mutant, test in self.by_mutant.items())
        self.path.write_text("".join(lines))


class Catalogue:
    """The functions of an installed database, and what can be taken out of them."""

    def __init__(self, owner: psycopg.Connection) -> None:
        self._sources: dict[str, str] = dict(owner.execute(SOURCES).fetchall())

    def mutants(self, beginning: str = "") -> dict[str, Mutant]:
        """All by name."""
        found = [
            mutant
            for function, source in self._sources.items()
            for mutant in mutants(function, source)
        ]
        for function, old, new in BY_HAND:
            source = self._sources[function]
            start = source.index(old)
            found.append(Mutant(function, source, start, start + len(old), new))
        return {each.name: each for each in found if each.name.startswith(beginning)}

    def files_for(self, function: str) -> list[Path]:
        """Test files that call it, directly or not; first those that call little else."""
        reached, grown = {function}, True
        while grown:
            callers = {
                name
                for name, source in self._sources.items()
                if any(re.search(rf"messages\.{each}\(", source) for each in reached)
            }
            grown = not callers <= reached
            reached |= callers
        public = {name for name in reached if not name.startswith("_")} or set(self._files_with)
        score = {
            file: sum(1 / self._files_with[name] for name in public & words)
            for file, words in self._words.items()
        }
        return sorted((file for file in score if score[file]), key=lambda file: -score[file])

    @cached_property
    def _words(self) -> dict[Path, set[str]]:
        return {
            file: set(re.findall(r"\w+", file.read_text())) for file in TESTS.rglob("test_*.py")
        }

    @cached_property
    def _files_with(self) -> dict[str, int]:
        names = [name for name in self._sources if not name.startswith("_")]
        return {name: sum(name in words for words in self._words.values()) or 1 for name in names}
