"""Figures of exchanges and queues, from what was counted: quantiles, and numbers for people."""

import pytest

from psqlmessages.admin.exchange_figures import duration
from psqlmessages.graph.counted import BUCKET_SECONDS, Counted, Histogram, Row
from psqlmessages.graph.sizes import Sizes


def histogram(**counts: int) -> Histogram:
    """A histogram with elements in some buckets, as in b0=5: the first."""
    buckets = [0] * (len(BUCKET_SECONDS) + 1)
    for name, number in counts.items():
        buckets[int(name[1:])] = number
    return Histogram(sum(buckets), 0.0, buckets)


def test_without_elements_there_is_no_quantile() -> None:
    assert histogram().quantile(0.5) is None


@pytest.mark.parametrize(
    ("share", "seconds"), [(0.5, 0.002), (0.25, 0.0015), (0.75, 0.0035), (1, 0.005)]
)
def test_a_quantile_lies_within_its_bucket(share: float, seconds: float) -> None:
    assert histogram(b1=10, b2=10).quantile(share) == pytest.approx(seconds)


def test_what_took_longer_than_all_buckets_is_over_them() -> None:
    assert histogram(b0=1, b12=99).quantile(0.95) == float("inf")
    assert duration(float("inf")) == "over 5 s"


def test_rows_with_fewer_buckets_are_added_up_all_the_same() -> None:
    rows = [
        Row("ok", -1, 3, 1.0, [], 0.5),
        Row("ok", -1, 2, 1.0, [2], 0.5),
        Row("to", 1, 9, 0, [], 0),
    ]
    counted = Counted.of(rows)
    assert (counted.elements, counted.copies, counted.selector_seconds) == (5, {1: 9}, 1.0)
    assert counted.outcomes["ok"].buckets[0] == 2


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        (Sizes(1, 2, 3, 10), "6"),
        (Sizes(11, 0, 0, 10), "over 10"),
        (Sizes(11, 2, 0, 10), "over 12"),
        (Sizes(10, 10, 10, 10), "30"),
    ],
)
def test_numbers_that_were_limited_say_so(sizes: Sizes, total: str) -> None:
    assert sizes.shown("total") == total


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.0000005, "0 µs"), (0.0123, "12.3 ms"), (61.0, "61 s")]
)
def test_durations_are_readable(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
