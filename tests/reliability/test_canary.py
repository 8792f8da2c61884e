"""A hostile role calls everything with anything, and nothing of others comes to it or goes."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.reliability.counts import counted, size
from tests.reliability.treasure import STAGED, Overheard, Treasure, treasure_of
from tests.sql.conftest import World
from tests.sql.test_random_calls import Fuzzer

FAULT = "a hostile role"
# Names of its own, for which it has rules, and in which it may succeed.
OWN = {"topic": ["H1", "H2", "H*"], "topics": ["H1", "H2", "H*"], "stagings": [str(UUID(int=1))]}
OWN |= {name: ["HQ1", "HQ2"] for name in ("queue", "source", "queues")}
OWN_NODES = ["H1", "H2"]
RULES = [
    f"hostile {node} {rule}"
    for node in OWN_NODES
    for rule in (
        "Topic H* RW 3000", "Topic H1* O 3000", "Queue HQ1 RW 3000", "Queue HQ2 RW 3000",
        "Rpc H1 W 3000", "Rpc H2 W 3000",
    )
]  # fmt: skip


class Burglar(Fuzzer):
    """A fuzzer that has its own names, and stolen things."""

    def __init__(self, world: World, treasure: Treasure, seed: int) -> None:
        super().__init__(world, "hostile", seed)
        self._treasure = treasure
        self._own_dice = random.Random(seed)  # noqa: S311

    def argument(self, name: str, kind: str) -> Any:
        draw = self._own_dice.random()
        if kind == "text" and draw < 0.5:
            return self._own_dice.choice(OWN.get(name, OWN_NODES))
        if kind == "text" and draw < 0.6:
            return self._own_dice.choice(self._treasure.stolen)
        if kind == "bigint" and draw < 0.5:
            numbers = [int(text) for text in self._treasure.stolen if text.isdecimal()]
            return self._own_dice.choice(numbers)
        return super().argument(name, kind)


@pytest.fixture
def treasure(world: World) -> Iterator[Treasure]:
    with treasure_of(world, *RULES) as treasure:
        yield treasure


@pytest.mark.timeout(500)
def test_no_call_brings_anything_of_others_or_changes_it(
    treasure: Treasure, tmp_path: Path
) -> None:
    reached: Counter[str] = Counter()
    calls = messages = 0
    found: list[str] = []
    for seed in range(5):
        burglar = Burglar(treasure.world, treasure, seed)
        # Under the names that others used.
        with burglar.program.connection.cursor().copy(STAGED) as copy:
            for number in (1, 2, 11, 12):
                copy.write_row((UUID(int=number), 0, ["mine"], None, None, None))
        with Overheard(burglar.program.connection, tmp_path / "trace") as heard:
            for number in range(1, size(800, 10_000) + 1):
                burglar.step()
                if number % 500 == 0:
                    heard.look(treasure.secrets())
        reached += burglar.reached
        calls += number
        messages += heard.messages
        found += heard.found
        burglar.program.close()
        functions = len(burglar.functions)
        # Which functions a call gets through to is chance: where too few were, more calls follow.
        if seed + 1 >= size(1, 5) and len(reached) > functions * 0.8:
            break
    counted(
        FAULT, "random calls to every public function", calls=calls, functions=functions,
        calls_of_each=calls // functions, functions_that_did_something=len(reached),
        answers_looked_through=messages, things_of_others_seen=len(found),
    )  # fmt: skip
    assert found == []
    assert treasure.rows() == treasure.before
    assert len(reached) > functions * 0.8, sorted(reached)
