"""Cost bounds of an expression, so that no element makes its evaluation slow.

An evaluation cannot be interrupted, but expressions have no loops. So the maximum cost is known at
compile time: it is a polynomial in the size of the fields that the expression reads. Sizes are in
units: one per character (four if the text is not ASCII), and VALUE_UNITS per JSON value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from psqlmessages.exchanges.expression import VARIABLES, ExpressionTree
from psqlmessages.exchanges.model import SelectorError

# Patterns. The time to match a regular expression grows with the number of RE2's instructions.

MAX_PROGRAM_SIZE: Final = 10_000

# Number of instructions, rounded up. Measured: 1,200 for \pL, up to 9 for a range outside ASCII.
_ANY: Final = 12
_CLASS: Final = 15
_CLASS_ITEM: Final = 12
_UNICODE_PROPERTY: Final = 1300
_FOLD_FACTOR: Final = 8  # for a pattern that ignores case

_TOKEN: Final = re.compile(
    r"""(?P<property>\\[pP](?:\{[^}]*\}|.))
    |   (?P<quote>\\Q)
    |   (?P<escape>\\(?:x\{[^}]*\}|.))
    |   (?P<class>\[\^?\]?(?:\[:\^?[a-z]*:\]|\\.|[^\]\\])*\])
    |   (?P<times>\{(?P<min>\d+)(?:,(?P<max>\d*))?\})
    |   (?P<flags>\(\?[a-zA-Z-]*\))
    |   (?P<open>\((?:\?(?:P?<\w*>|[a-zA-Z-]*:))?)
    |   (?P<close>\))
    |   (?P<repeat>[*+?])
    |   (?P<any>\.)
    |   (?P<character>.)""",
    re.VERBOSE | re.DOTALL,
)


def program_size(pattern: str) -> int:
    r"""Return an upper bound for the number of instructions that RE2 needs for a pattern.

    The result is meaningless if RE2 rejects the pattern. Raise SelectorError if the bound exceeds
    MAX_PROGRAM_SIZE, or if the pattern contains \Q.
    """
    fold_factor = _FOLD_FACTOR if re.search(r"\(\?[a-zA-Z]*i", pattern) else 1
    # For each open group: the size of the last atom, which may be repeated, and the total size of
    # the atoms before it. 8 is for the instructions that every program has.
    last_sizes, sizes = [0], [8]
    for token in _TOKEN.finditer(pattern):
        match token.lastgroup:
            case "quote":
                raise SelectorError(r"a pattern must not quote with \Q: escape each character")
            case "flags":
                sizes[-1] += 2
            case "open":
                sizes.append(2)
                last_sizes.append(0)
            case "close" if len(last_sizes) > 1:
                group_size = sizes.pop() + last_sizes.pop()
                sizes[-1] += last_sizes[-1]
                last_sizes[-1] = group_size
            case "repeat":
                last_sizes[-1] += 2
            case "times":
                times = max(int(token["min"]) + 1, int(token["max"] or 0), 1)
                last_sizes[-1] = (last_sizes[-1] + 2) * times
            case _:
                sizes[-1] += last_sizes[-1]
                last_sizes[-1] = _atom_size(token, fold_factor)
        if sum(sizes) + sum(last_sizes) > MAX_PROGRAM_SIZE:
            raise SelectorError("a pattern is too large: use fewer repetitions or classes")
    return sum(sizes) + sum(last_sizes)


def _atom_size(token: re.Match[str], fold_factor: int) -> int:
    if token.lastgroup == "property":
        return _UNICODE_PROPERTY
    if token.lastgroup == "any":
        return _ANY
    if token.lastgroup == "class":
        return _class_size(token[0], fold_factor)
    if token.lastgroup == "escape":
        return _CLASS * fold_factor
    return len(token[0].encode()) * fold_factor


def _class_size(text: str, fold_factor: int) -> int:
    inner = text[1:-1]
    if inner.isascii() and not inner.startswith("^") and not set("\\:") & set(inner):
        return (2 + 2 * len(inner)) * fold_factor
    properties = len(re.findall(r"\\[pP]", inner))
    characters = sum(2 if character.isascii() else _CLASS_ITEM for character in inner)
    return _CLASS + characters * fold_factor + _UNICODE_PROPERTY * properties


# Cost of an expression.

VALUE_UNITS: Final = 128
# Limits for the units that an expression may read. With less than MIN_UNITS, an expression could
# read only tiny elements.
MAX_UNITS: Final = 4 * 1024 * 1024
MIN_UNITS: Final = 1024
MAX_NANOSECONDS: Final = 50_000_000

# Nanoseconds, measured on a slow core and rounded up. _CALL is per call, _RETURN per unit of the
# result, _COMPILE_PER_INSTRUCTION per instruction of a pattern. The others are per unit of input:
# _SEARCH_PER_CHARACTER also per character to search for, _MATCH_PER_INSTRUCTION also per
# instruction of the pattern.
_CONVERT: Final = 6.0
_SCAN: Final = 2.0
_READ_DURATION: Final = 12.0
_SEARCH_PER_CHARACTER: Final = 0.03
_MATCH_PER_INSTRUCTION: Final = 6.0
_COMPILE_PER_INSTRUCTION: Final = 800.0
_RETURN: Final = 20.0
_CALL: Final = 1000.0

TYPES: Final = frozenset(
    {"bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"}
    | {"google.protobuf.Timestamp", "google.protobuf.Duration"}
)
_ZONE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}|[+-]?\d\d:\d\d")
_DATE_FUNCTIONS: Final = (
    "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear", "getFullYear", "getMonth",
    "getHours", "getMilliseconds", "getMinutes", "getSeconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearBound:
    """An upper bound that is linear in the number of units: ``per_unit * units + fixed``."""

    per_unit: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: LinearBound) -> LinearBound:
        return LinearBound(self.per_unit + other.per_unit, self.fixed + other.fixed)

    def __mul__(self, factor: float) -> LinearBound:
        return LinearBound(self.per_unit * factor, self.fixed * factor)


# The size of a value without text, for example of a number.
VALUE_SIZE: Final = LinearBound(fixed=VALUE_UNITS)


def find_max_units(tree: ExpressionTree) -> int:
    """Return how many units an expression may read, at most MAX_UNITS.

    Raise SelectorError if this is less than MIN_UNITS, or if the expression uses a name, function,
    pattern or time zone that is not allowed.
    """
    estimator = _CostEstimator()
    result_size = estimator.add_cost(tree)
    # The conversion of the message to CEL values, and of the result to Python.
    estimator.time += LinearBound(_CONVERT) + result_size * _RETURN
    max_units = min(estimator.max_units(), MAX_UNITS)
    if max_units < MIN_UNITS:
        raise SelectorError(
            "the expression is too expensive: use fewer searches, matches and concatenations"
        )
    return int(max_units)


class _CostEstimator:
    """Sums the maximum time of an expression, in nanoseconds. This also bounds its memory."""

    def __init__(self) -> None:
        self.time = LinearBound()
        self.time_per_unit_squared = 0.0

    def max_units(self) -> float:
        """Return how many units can be read within MAX_NANOSECONDS."""
        remaining = MAX_NANOSECONDS - self.time.fixed
        if remaining <= 0:
            return 0
        units = remaining / self.time.per_unit
        if self.time_per_unit_squared:
            # Allow each part, linear and quadratic, half of the time. This is simpler than solving
            # the equation, and the result is never too high.
            units = min(units / 2, (remaining / 2 / self.time_per_unit_squared) ** 0.5)
        return units

    def add_cost(self, tree: ExpressionTree) -> LinearBound:
        """Add the cost of a part and all parts below it; return the maximum size of its value."""
        self.time += LinearBound(fixed=_CALL)
        sizes = [self.add_cost(part) for part in tree.parts]
        match tree.kind:
            case "constant":
                size = len(tree.value) if isinstance(tree.value, str | bytes) else 0
                return LinearBound(fixed=VALUE_UNITS + 4 * size)
            case "name" if tree.value in VARIABLES:
                return LinearBound(per_unit=1, fixed=VALUE_UNITS)
            case "name" if tree.value not in TYPES:
                raise SelectorError(
                    f"unknown name {tree.value}: an expression can use msg, state and now"
                )
            case "name" | "has":
                return VALUE_SIZE
            case "select":
                return sizes[0]
            case "list" | "map":
                return sum(sizes, VALUE_SIZE)
        if tree.value not in _FUNCTIONS:
            raise SelectorError(f"the function {tree.value} is not supported")
        return _FUNCTIONS[tree.value](self, tree, sizes)

    # Costs of CEL's functions. Each method adds the time that one call takes in addition to _CALL,
    # and returns the maximum size of the result. ``sizes`` are the maximum sizes of the operands.

    def scan(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        """Read the operands once; the result is small."""
        self.time += sum(sizes, LinearBound()) * _SCAN
        return VALUE_SIZE

    def calculate(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        """Logic and arithmetic: they take no time in addition to _CALL."""
        return VALUE_SIZE

    def branch(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        return sizes[1] + sizes[2]

    def index(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        self.time += sizes[1] * _SCAN
        return sizes[0]

    def copy(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        size = sum(sizes, VALUE_SIZE)
        self.time += size * _SCAN
        return size

    def read_duration(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        self.time += sizes[0] * _READ_DURATION
        return VALUE_SIZE

    def read_date(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        # CEL opens the file that a time zone names, so accept only literals with a safe syntax.
        if len(tree.parts) > 1 and not _ZONE.fullmatch(tree.parts[1].literal or ""):
            raise SelectorError(
                f'{tree.value} needs a literal time zone, for example "Europe/Rome" or "+02:00"'
            )
        return VALUE_SIZE

    def search(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        text, part = sizes
        self.time += (text + part) * _SCAN
        self.time += text * (part.fixed * _SEARCH_PER_CHARACTER)
        self.time_per_unit_squared += text.per_unit * part.per_unit * _SEARCH_PER_CHARACTER
        return VALUE_SIZE

    def match(self, tree: ExpressionTree, sizes: list[LinearBound]) -> LinearBound:
        pattern = tree.parts[1].literal
        if pattern is None:
            raise SelectorError("matches needs a literal pattern")
        size = program_size(pattern)
        self.time += sizes[0] * (size * _MATCH_PER_INSTRUCTION)
        self.time += LinearBound(fixed=size * _COMPILE_PER_INSTRUCTION)
        return VALUE_SIZE


_FunctionCost = Callable[[_CostEstimator, ExpressionTree, list[LinearBound]], LinearBound]

_FUNCTIONS: Final[dict[str, _FunctionCost]] = {
    **dict.fromkeys(
        ("_&&_", "_||_", "!_", "-_", "_-_", "_*_", "_/_", "_%_"), _CostEstimator.calculate
    ),
    **dict.fromkeys(("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_"), _CostEstimator.scan),
    **dict.fromkeys(("@in", "_in_", "startsWith", "endsWith", "size", "type"), _CostEstimator.scan),
    **dict.fromkeys(("bool", "double", "int", "timestamp", "uint"), _CostEstimator.scan),
    **dict.fromkeys(("_+_", "bytes", "dyn", "string"), _CostEstimator.copy),
    **dict.fromkeys(_DATE_FUNCTIONS, _CostEstimator.read_date),
    "_?_:_": _CostEstimator.branch,
    "_[_]": _CostEstimator.index,
    "contains": _CostEstimator.search,
    "duration": _CostEstimator.read_duration,
    "matches": _CostEstimator.match,
}
