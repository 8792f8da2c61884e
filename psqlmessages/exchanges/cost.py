"""Cost bounds of an expression, so that no message makes it slow.

A running evaluation cannot be stopped, but expressions have no loops. The maximum cost is therefore
a polynomial in the size of the fields that it reads, known at compile time. Sizes are in units:
each character is one unit (four in a text that is not ASCII), and each JSON value adds VALUE_UNITS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from psqlmessages.exchanges.expression import NAMES, ExpressionTree
from psqlmessages.exchanges.model import SelectorError

# Patterns: an upper bound for the size of RE2's program for a regular expression.

MAX_PROGRAM: Final = 10_000

# RE2 instructions, measured: \pL takes 1,200, a non-ASCII range up to 9 in each direction.
_ANY: Final = 12
_CLASS: Final = 15
_CLASS_ITEM: Final = 12
_UNICODE_PROPERTY: Final = 1300
_FOLDED: Final = 8

_PIECE: Final = re.compile(
    r"""(?P<property>\\[pP](?:\{[^}]*\}|.))
    |   (?P<quote>\\Q)
    |   (?P<escape>\\(?:x\{[^}]*\}|.))
    |   (?P<class>\[\^?\]?(?:\[:\^?[a-z]*:\]|\\.|[^\]\\])*\])
    |   (?P<times>\{(?P<least>\d+)(?:,(?P<most>\d*))?\})
    |   (?P<flags>\(\?[a-zA-Z-]*\))
    |   (?P<open>\((?:\?(?:P?<\w*>|[a-zA-Z-]*:))?)
    |   (?P<close>\))
    |   (?P<repeat>[*+?])
    |   (?P<any>\.)
    |   (?P<character>.)""",
    re.VERBOSE | re.DOTALL,
)


def program_size(pattern: str) -> int:
    """Return an upper bound for the number of instructions that RE2 needs for a pattern.

    The number is arbitrary if RE2 rejects the pattern. Raise SelectorError above MAX_PROGRAM.
    """
    is_folded = re.search(r"\(\?[a-zA-Z]*i", pattern) is not None
    finished, lasts = [8], [0]  # per open group: finished size, size of the last atom
    for piece in _PIECE.finditer(pattern):
        match piece.lastgroup:
            case "quote":
                raise SelectorError(r"a pattern must not quote with \Q: escape each character")
            case "flags":
                finished[-1] += 2  # the atom before them may still be repeated
            case "open":
                finished.append(2)
                lasts.append(0)
            case "close" if len(lasts) > 1:
                group = finished.pop() + lasts.pop()
                finished[-1] += lasts[-1]
                lasts[-1] = group
            case "repeat":
                lasts[-1] += 2
            case "times":
                times = max(int(piece["least"]) + 1, int(piece["most"] or 0), 1)
                lasts[-1] = (lasts[-1] + 2) * times
            case _:
                finished[-1] += lasts[-1]
                lasts[-1] = _atom(piece, is_folded=is_folded)
        if sum(finished) + sum(lasts) > MAX_PROGRAM:
            raise SelectorError("a pattern is too large: use fewer repetitions or classes")
    return sum(finished) + sum(lasts)


def _atom(piece: re.Match[str], *, is_folded: bool) -> int:
    text = piece[0]
    folded = _FOLDED if is_folded else 1
    if piece.lastgroup == "property":
        return _UNICODE_PROPERTY
    if piece.lastgroup == "any":
        return _ANY
    if piece.lastgroup == "class":
        return _class(text, folded)
    if piece.lastgroup == "escape":
        return _CLASS * folded
    return len(text.encode()) * folded


def _class(text: str, folded: int) -> int:
    inner = text[1:-1]
    if inner.isascii() and not inner.startswith("^") and not set("\\:") & set(inner):
        return (2 + 2 * len(inner)) * folded
    properties = len(re.findall(r"\\[pP]", inner))
    characters = sum(2 if character.isascii() else _CLASS_ITEM for character in inner)
    return _CLASS + characters * folded + _UNICODE_PROPERTY * properties


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
class LinearBound:
    """An upper bound that is linear in the units read: ``per_unit * units + fixed``."""

    per_unit: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: LinearBound) -> LinearBound:
        return LinearBound(self.per_unit + other.per_unit, self.fixed + other.fixed)

    def __mul__(self, factor: float) -> LinearBound:
        return LinearBound(self.per_unit * factor, self.fixed * factor)


SMALL: Final = LinearBound(fixed=VALUE_UNITS)


def units_allowed(tree: ExpressionTree) -> int:
    """Return how many units an expression may read.

    Raise SelectorError if this is less than LEAST_UNITS, or if the expression uses a name or
    function that is not allowed.
    """
    bill = _CostEstimator()
    returned = bill.size_of(tree)
    bill.time += returned * _RETURN + LinearBound(_CONVERT)
    allowed = min(bill.units(), MAX_UNITS)
    if allowed < LEAST_UNITS:
        raise SelectorError(
            "the expression is too expensive: use fewer searches, matches and concatenations"
        )
    return int(allowed)


class _CostEstimator:
    """Sums the maximum cost of an expression, in nanoseconds.

    Filling memory takes time, so a bound on time also bounds memory.
    """

    def __init__(self) -> None:
        self.time = LinearBound()
        self.time_by_square = 0.0

    def units(self) -> float:
        """Return how many units can be read within MAX_NANOSECONDS."""
        left = MAX_NANOSECONDS - self.time.fixed
        if left <= 0:
            return 0
        units = left / self.time.per_unit
        if self.time_by_square:
            # Half of the time each for the linear and the quadratic part: no equation to solve.
            units = min(units / 2, (left / 2 / self.time_by_square) ** 0.5)
        return units

    def size_of(self, tree: ExpressionTree) -> LinearBound:
        """Add the cost of a part and all parts below it; return the maximum size of its value."""
        self.time += LinearBound(fixed=_CALL)
        sizes = [self.size_of(part) for part in tree.parts]
        match tree.kind:
            case "constant":
                size = len(tree.value) if isinstance(tree.value, str | bytes) else 0
                return LinearBound(fixed=VALUE_UNITS + 4 * size)
            case "name":
                return _size_of_name(tree.value)
            case "has":
                return SMALL
            case "select":
                return sizes[0]
            case "list" | "map":
                return sum(sizes, SMALL)
        charge = _FUNCTIONS.get(tree.value)
        if charge is None:
            raise SelectorError(f"the function {tree.value} is not supported")
        return charge(self, tree, sizes)

    def scan(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        """Charge for one scan of the operands; the result is small."""
        self.time += sum(sizes, LinearBound()) * _SCAN
        return SMALL

    def decide(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        return SMALL

    def choose(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        return sizes[1] + sizes[2]

    def pick(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        self.time += sizes[1] * _SCAN
        return sizes[0]

    def copy(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        size = sum(sizes, SMALL)
        self.time += size * _SCAN
        return size

    def read_duration(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        self.time += sizes[0] * _READ_DURATION
        return SMALL

    def read_clock(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        # The evaluation opens a file of this name: allow only names of time zones.
        if len(tree.parts) > 1 and not _ZONE.fullmatch(tree.parts[1].literal or ""):
            raise SelectorError(
                f'{tree.value} needs a literal time zone, for example "Europe/Rome" or "+02:00"'
            )
        return SMALL

    def search(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        text, wanted = sizes
        self.time += (text + wanted) * _SCAN
        self.time += text * (wanted.fixed * _SEARCH_BY_CHARACTER)
        self.time_by_square += text.per_unit * wanted.per_unit * _SEARCH_BY_CHARACTER
        return SMALL

    def match(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        pattern = tree.parts[1].literal
        if pattern is None:
            raise SelectorError("matches needs a literal pattern")
        size = program_size(pattern)
        self.time += sizes[0] * (size * _MATCH_BY_INSTRUCTION)
        self.time += LinearBound(fixed=size * _COMPILE_INSTRUCTION)
        return SMALL


def _size_of_name(name: str) -> LinearBound:
    if name in NAMES:
        return LinearBound(per_unit=1, fixed=VALUE_UNITS)
    if name in TYPES:
        return SMALL
    raise SelectorError(f"unknown name {name}: an expression can use msg, state and now")


_Charge = Callable[[_CostEstimator, ExpressionTree, list[LinearBound]], LinearBound]

_FUNCTIONS: Final[dict[str, _Charge]] = {
    **dict.fromkeys(
        ("_&&_", "_||_", "!_", "-_", "_-_", "_*_", "_/_", "_%_"), _CostEstimator.decide
    ),
    **dict.fromkeys(("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_"), _CostEstimator.scan),
    **dict.fromkeys(("@in", "_in_", "startsWith", "endsWith", "size", "type"), _CostEstimator.scan),
    **dict.fromkeys(("bool", "double", "int", "timestamp", "uint"), _CostEstimator.scan),
    **dict.fromkeys(("_+_", "bytes", "dyn", "string"), _CostEstimator.copy),
    **dict.fromkeys(_CLOCKS, _CostEstimator.read_clock),
    "_?_:_": _CostEstimator.choose,
    "_[_]": _CostEstimator.pick,
    "contains": _CostEstimator.search,
    "duration": _CostEstimator.read_duration,
    "matches": _CostEstimator.match,
}
