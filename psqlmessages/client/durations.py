"""Durations of the public functions: a timedelta, or a number of seconds."""

from __future__ import annotations

import math
from datetime import timedelta

Duration = timedelta | float


def as_timedelta(value: Duration, name: str) -> timedelta:
    """Convert a duration to a timedelta; infinity becomes ``timedelta.max``.

    Raise TypeError for other types, and ValueError for NaN; ``name`` is the argument's name.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name} must be a timedelta or a number of seconds, not {type(value).__name__}:"
            f" {value!r:.100}"
        )
    if math.isnan(value):
        raise ValueError(f"{name} must be a timedelta or a number of seconds, not NaN")
    try:
        return timedelta(seconds=value)
    except OverflowError:
        return timedelta.max if value > 0 else timedelta.min


def seconds_of(value: Duration, name: str) -> float:
    """Convert a duration to seconds; see :func:`as_timedelta`."""
    return as_timedelta(value, name).total_seconds()
