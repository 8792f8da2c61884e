"""Plans of exchanges: how many elements a loop takes at a time."""

import pytest

from psqlmessages.exchanges import Graphed, Place, Target
from psqlmessages.graph.plans import Plan


@pytest.mark.parametrize(
    ("parallel", "wsize", "targets", "batch"),
    [
        (1, 4096, 16, 4096),
        (1, 4096, 20, 3276),
        (1, 4096, 1000, 65),
        (4, 100, 1000, 25),
        (16, 10, 1, 1),
        (1, 100, 0, 100),
    ],
)
def test_a_batch_fits_the_window_and_one_call(
    parallel: int, wsize: int, targets: int, batch: int
) -> None:
    destinations = tuple(Target(Place("default", str(number))) for number in range(targets))
    graphed = Graphed("x", Place("default", "a"), destinations, parallel, wsize)
    assert Plan.of(graphed).batch == batch
