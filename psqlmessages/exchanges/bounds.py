"""Bounds: how much an expression may look at, so that no message makes it slow or large.

Nothing stops an evaluation once it runs, and it has no loops: so what it costs at most is a
polynomial of the size of what it looks at, known when it is compiled. Sizes are in units: a
character is one (beyond ASCII four), a value of JSON VALUE_UNITS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from psqlmessages.exchanges.errors import SelectorError
from psqlmessages.exchanges.patterns import program_size
from psqlmessages.exchanges.syntax import Tree

VALUE_UNITS: Final = 128
MAX_UNITS: Final = 4 * 1024 * 1024
LEAST_UNITS: Final = 1024
MAX_NANOSECONDS: Final = 50_000_000

# Nanoseconds, measured on one slow core and rounded up.
_CONVERT: Final = 6.0
_SCAN: Final = 2.0
_READ_DURATION: Final = 12.0
_SEARCH_BY_CHARACTER: Final = 0.03
_MATCH_BY_INSTRUCTION: Final = 6.0
_COMPILE_INSTRUCTION: Final = 800.0
_RETURN: Final = 20.0
_CALL: Final = 1000.0

NAMES: Final = frozenset({"msg", "state", "now"})
TYPES: Final = frozenset(
    {"bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"}
    | {"google.protobuf.Timestamp", "google.protobuf.Duration"}
)
_ZONE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}|[+-]?\d\d:\d\d")
_CLOCKS: Final = (
    *("getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear", "getFullYear", "getMonth"),
    *("getHours", "getMilliseconds", "getMinutes", "getSeconds"),
)


@dataclass(frozen=True, slots=True)
class Linear:
    """A bound that grows with the units looked at: ``per_unit * units + fixed``."""

    per_unit: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: Linear) -> Linear:
        return Linear(self.per_unit + other.per_unit, self.fixed + other.fixed)

    def __mul__(self, factor: float) -> Linear:
        return Linear(self.per_unit * factor, self.fixed * factor)


SMALL: Final = Linear(fixed=VALUE_UNITS)


def units_allowed(tree: Tree) -> int:
    """Return how many units an expression may look at.

    Raise SelectorError where that is next to nothing, and for what no expression may use.
    """
    bill = _Bill()
    returned = bill.size_of(tree)
    bill.time += returned * _RETURN + Linear(_CONVERT)
    allowed = min(bill.units(), MAX_UNITS)
    if allowed < LEAST_UNITS:
        raise SelectorError(
            "the expression costs too much: search, match and concatenate less in one"
        )
    return int(allowed)


class _Bill:
    """Adds up what an expression costs at most, in nanoseconds.

    Whatever takes memory takes time to fill it, so that time bounds both.
    """

    def __init__(self) -> None:
        self.time = Linear()
        self.time_by_square = 0.0

    def units(self) -> float:
        """Return how many units can be looked at within the time there is."""
        left = MAX_NANOSECONDS - self.time.fixed
        if left <= 0:
            return 0
        units = left / self.time.per_unit
        if self.time_by_square:
            # Both halves within half of the time: no need for the root of the whole.
            units = min(units / 2, (left / 2 / self.time_by_square) ** 0.5)
        return units

    def size_of(self, tree: Tree) -> Linear:
        """Charge for a part and all below it; return how large its value may be."""
        self.time += Linear(fixed=_CALL)
        sizes = [self.size_of(part) for part in tree.parts]
        match tree.kind:
            case "constant":
                size = len(tree.value) if isinstance(tree.value, str | bytes) else 0
                return Linear(fixed=VALUE_UNITS + 4 * size)
            case "name":
                return _size_of_name(tree.value)
            case "has":
                return SMALL
            case "select":
                return sizes[0]
            case "list" | "map":
                return sum(sizes, SMALL)
        return self._size_of_call(tree, sizes)

    def _size_of_call(self, tree: Tree, sizes: list[Linear]) -> Linear:
        charge = _FUNCTIONS.get(tree.value)
        if charge is None:
            raise SelectorError(f"the function {tree.value} cannot be used here")
        return charge(self, tree, sizes)

    def scan(self, tree: Tree, sizes: list[Linear]) -> Linear:
        """Look through the operands once; answer something small."""
        self.time += sum(sizes, Linear()) * _SCAN
        return SMALL

    def decide(self, tree: Tree, sizes: list[Linear]) -> Linear:
        return SMALL

    def choose(self, tree: Tree, sizes: list[Linear]) -> Linear:
        return sizes[1] + sizes[2]

    def pick(self, tree: Tree, sizes: list[Linear]) -> Linear:
        self.time += sizes[1] * _SCAN
        return sizes[0]

    def copy(self, tree: Tree, sizes: list[Linear]) -> Linear:
        size = sum(sizes, SMALL)
        self.time += size * _SCAN
        return size

    def read_duration(self, tree: Tree, sizes: list[Linear]) -> Linear:
        self.time += sizes[0] * _READ_DURATION
        return SMALL

    def read_clock(self, tree: Tree, sizes: list[Linear]) -> Linear:
        # Another name would be that of a file to open.
        if len(tree.parts) > 1 and not _ZONE.fullmatch(tree.parts[1].literal or ""):
            raise SelectorError(
                f'{tree.value} takes a time zone as a literal: "Europe/Rome", "+02:00"'
            )
        return SMALL

    def search(self, tree: Tree, sizes: list[Linear]) -> Linear:
        text, wanted = sizes
        self.time += (text + wanted) * _SCAN
        self.time += text * (wanted.fixed * _SEARCH_BY_CHARACTER)
        self.time_by_square += text.per_unit * wanted.per_unit * _SEARCH_BY_CHARACTER
        return SMALL

    def match(self, tree: Tree, sizes: list[Linear]) -> Linear:
        pattern = tree.parts[1].literal
        if pattern is None:
            raise SelectorError("matches takes its pattern as a literal")
        size = program_size(pattern)
        self.time += sizes[0] * (size * _MATCH_BY_INSTRUCTION)
        self.time += Linear(fixed=size * _COMPILE_INSTRUCTION)
        return SMALL


def _size_of_name(name: str) -> Linear:
    if name in NAMES:
        return Linear(per_unit=1, fixed=VALUE_UNITS)
    if name in TYPES:
        return SMALL
    raise SelectorError(f"{name} is not known here: an expression sees msg, state and now")


_Charge = Callable[[_Bill, Tree, list[Linear]], Linear]

_FUNCTIONS: Final[dict[str, _Charge]] = {
    **dict.fromkeys(("_&&_", "_||_", "!_", "-_", "_-_", "_*_", "_/_", "_%_"), _Bill.decide),
    **dict.fromkeys(("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_"), _Bill.scan),
    **dict.fromkeys(("@in", "_in_", "startsWith", "endsWith", "size", "type"), _Bill.scan),
    **dict.fromkeys(("bool", "double", "int", "timestamp", "uint"), _Bill.scan),
    **dict.fromkeys(("_+_", "bytes", "dyn", "string"), _Bill.copy),
    **dict.fromkeys(_CLOCKS, _Bill.read_clock),
    "_?_:_": _Bill.choose,
    "_[_]": _Bill.pick,
    "contains": _Bill.search,
    "duration": _Bill.read_duration,
    "matches": _Bill.match,
}
