"""Readers killed with -9 between fetch and commit: the same again, and effects once."""

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from project.postgres import Server
from tests.conftest import TestedServer
from tests.django.processes import environment, talking
from tests.reliability.counts import counted, size
from tests.reliability.mortal_reader import AT_ONCE, NAME, QUEUE, READER, TOPIC
from tests.reliability.work import EXPIRE
from tests.sql.conftest import World

FAULT = "a reader is killed between fetch and commit"
NAMES = {
    "stream": "a stream by SQL, effects in its transaction",
    "django": "a stream by read_stream, effects in its transaction",
    "pop": "a queue by pop, effects in its transaction",
    "consume": "a queue by Node.consume, effects of their own",
}
# As many steps as a transaction has, and then those of the next.
STEPS = {"stream": 4, "django": 3, "pop": 4, "consume": 2}
GONE = """
    SELECT NOT EXISTS (
        SELECT FROM pg_stat_activity WHERE application_name IN (%s, 'psqlmessages ' || %s)
    )
"""
HAS_EFFECT = "SELECT count(*) FROM psqlmessages_effects WHERE kind = %s AND body = %s"
EFFECTS = "SELECT body FROM psqlmessages_effects WHERE kind = %s"


class Readers:
    """The process that forks readers, and what each said before it died."""

    def __init__(self, server: TestedServer) -> None:
        module = ("-m", "tests.reliability.mortal_reader")
        self._process = talking(*module, server.url(), env=environment(server))

    def read(self, kind: str, steps: int) -> tuple[int, list[tuple[str, list[str]]]]:
        """Let one read, and die at a step; how it ended, and what it said."""
        self._process.stdin.write(f"{kind} {steps}\n")
        code, said = json.loads(self._process.stdout.readline())
        return code, [(what, bodies) for what, bodies in said]

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def readers(world: World) -> Iterator[Readers]:
    owner = world.owner.connection
    owner.execute("CREATE TABLE psqlmessages_effects (kind text, body text)")
    for kind, dest in (("Topic", TOPIC), ("Queue", QUEUE)):
        world.rule(Server.owner, READER, kind, dest, "RW", 60)
    started = Readers(world.server)
    yield started
    started.close()
    owner.execute("DROP TABLE psqlmessages_effects")


NIGHTLY = ("django", "pop")  # by other functions the same


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in NIGHTLY)) for kind in STEPS]
)
def test_killed_between_fetch_and_commit_the_same_comes_again(
    world: World, readers: Readers, kind: str
) -> None:
    kills = size(6, 50)
    bodies = [str(number) for number in range(kills * AT_ONCE + 10)]
    fill(world, kind, bodies)
    fetched: Counter[str] = Counter()
    uncommitted: list[str] = []
    for kill in range(kills + 1):
        is_last = kill == kills
        # Each dies one step later than the one before, in the first transaction or in the second.
        code, said = readers.read(kind, 0 if is_last else 1 + kill % (2 * STEPS[kind]))
        assert code == (0 if is_last else -9)
        # Once the backends of the dead are gone, what they had reserved may be taken.
        world.wait_for(GONE, NAME, READER)
        world.owner.connection.execute(EXPIRE)
        assert not uncommitted or said[0] == ("fetched", uncommitted)
        fetched.update(body for what, some in said if what == "fetched" for body in some)
        what, bodies_of_last = said[-1]
        done = bodies_of_last[:1] and world.owner.query(HAS_EFFECT, kind, bodies_of_last[0])
        # What a lease has held comes again behind what waits.
        is_next = what == "fetched" and kind != "consume" and not done
        uncommitted = bodies_of_last if is_next else []
    effects = Counter(body for (body,) in world.owner.connection.execute(EFFECTS, [kind]))
    counted(
        FAULT, NAMES[kind], kills=kills, messages=len(bodies),
        fetched_again=fetched.total() - len(fetched), lost=len(set(bodies) - effects.keys()),
        with_two_effects=sum(number > 1 for number in effects.values()),
    )  # fmt: skip
    assert effects.keys() == set(bodies)
    assert fetched.total() > len(bodies)
    # `consume` commits in groups: at each kill no more than a batch comes again.
    assert effects.total() - len(bodies) <= (kills * AT_ONCE if kind == "consume" else 0)


def fill(world: World, kind: str, bodies: list[str]) -> None:
    if kind in ("stream", "django"):
        world.owner.ok("publish", READER, TOPIC, "before anyone subscribes")
        world.owner.read(READER, TOPIC, 600)
        world.owner.ok("publish_many", READER, TOPIC, bodies)
    else:
        world.owner.ok("push_many", READER, QUEUE, bodies)
