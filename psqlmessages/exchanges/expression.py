"""Expression tree, and the message fields that an expression reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from psqlmessages.exchanges.model import SelectorError

MAX_DEPTH: Final = 100
NAMES: Final = frozenset({"msg", "state", "now"})

Kind = Literal["constant", "name", "select", "has", "call", "list", "map"]


@dataclass(frozen=True, slots=True)
class ExpressionTree:
    """A part of an expression.

    ``value`` is the constant, the name, the field (select, has) or the function (call). ``parts``
    are the operands. Those of a map alternate between keys and values.
    """

    kind: Kind
    value: Any
    parts: tuple[ExpressionTree, ...] = ()

    def __iter__(self) -> Iterator[ExpressionTree]:
        """Yield this part and all parts below it."""
        yield self
        for part in self.parts:
            yield from part

    @property
    def literal(self) -> str | None:
        """The text of a string constant; None for any other part."""
        return self.value if self.kind == "constant" and isinstance(self.value, str) else None


def read(serialized: bytes) -> ExpressionTree:
    """Parse the output of ``Expression.serialize``, a google.protobuf.Any with a CheckedExpr.

    Raise SelectorError if it contains a loop or a protobuf object, or is nested too deeply.
    """
    packed = _last(_fields(serialized), 2)
    return _expression(_last(_fields(packed), 4), MAX_DEPTH)


def _expression(data: bytes, depth: int) -> ExpressionTree:
    if depth == 0:
        raise SelectorError(f"the expression is nested deeper than {MAX_DEPTH} levels")
    for number, value in _fields(data):
        if number in _READERS:
            return _READERS[number](value, depth - 1)
    raise SelectorError("the expression has an unsupported part")


def _constant(data: bytes, _: int) -> ExpressionTree:
    for number, value in _fields(data):
        if number in _CONSTANTS:
            return ExpressionTree("constant", _CONSTANTS[number](value))
    raise SelectorError("the expression has an unsupported constant")


def _name(data: bytes, _: int) -> ExpressionTree:
    return ExpressionTree("name", _last(_fields(data), 1).decode())


def _select(data: bytes, depth: int) -> ExpressionTree:
    fields = _fields(data)
    is_tested = any(number == 3 and value for number, value in fields)
    operand = _expression(_last(fields, 1), depth)
    return ExpressionTree("has" if is_tested else "select", _last(fields, 2).decode(), (operand,))


def _call(data: bytes, depth: int) -> ExpressionTree:
    fields = _fields(data)
    operands = [value for number, value in fields if number == 1]
    operands += [value for number, value in fields if number == 3]
    function = _last(fields, 2).decode()
    return ExpressionTree(
        "call", function, tuple(_expression(operand, depth) for operand in operands)
    )


def _list(data: bytes, depth: int) -> ExpressionTree:
    elements = [value for number, value in _fields(data) if number == 1]
    return ExpressionTree("list", None, tuple(_expression(element, depth) for element in elements))


def _map(data: bytes, depth: int) -> ExpressionTree:
    parts = []
    for number, entry in _fields(data):
        if number == 1:
            raise SelectorError(
                "an expression can create only maps, lists and values, no other objects"
            )
        fields = _fields(entry)
        parts += [_expression(_last(fields, 3), depth), _expression(_last(fields, 4), depth)]
    return ExpressionTree("map", None, tuple(parts))


def _loop(_: bytes, __: int) -> ExpressionTree:
    raise SelectorError(
        "an expression must not loop: map, filter, all, exists, … are not supported"
    )


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_CONSTANTS: Final[dict[int, Callable[[Any], Any]]] = {
    1: lambda _: None,
    2: bool,
    3: _signed,
    4: int,
    5: lambda data: struct.unpack("<d", data)[0],
    6: bytes.decode,
    7: bytes,
}

_READERS: Final = {3: _constant, 4: _name, 5: _select, 6: _call, 7: _list, 8: _map, 9: _loop}


def _last(fields: list[tuple[int, Any]], wanted: int) -> Any:
    """Return the last value of a field; empty if the field is missing."""
    return next((value for number, value in reversed(fields) if number == wanted), b"")


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """Split a protobuf message into pairs of field number and value (int or bytes)."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                found.append((key >> 3, value))
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case _:
                raise SelectorError("the CEL package uses an unknown serialization format")
        found.append((key >> 3, data[at : at + size]))
        at += size
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


# Looks: the parts of a message that an expression reads. Only these are converted.

FIELDS: Final = ("body", "headers", "id", "tries", "hops", "queue", "ns")

# For each key, the keys read below it. None: everything; {}: only whether it exists.
Look: TypeAlias = "dict[str, Look] | None"
_Path = tuple[str, ...]


def look_of(tree: ExpressionTree) -> dict[str, Look]:
    """Return the parts of msg, state and now that an expression reads.

    Raise SelectorError if messages have no such field.
    """
    look: dict[str, Look] = {}
    for path, is_tested in _paths(tree):
        if path[0] == "msg" and len(path) > 1 and path[1] not in FIELDS:
            raise SelectorError(f"msg has no field {path[1]}; its fields are {', '.join(FIELDS)}")
        _add(look, path, is_tested=is_tested)
    return look


def union(looks: Iterable[Mapping[str, Look]]) -> dict[str, Look]:
    """Merge looks: the result includes everything that any of them includes."""
    together: dict[str, Look] = {}
    for look in looks:
        for key, below in look.items():
            known = together.get(key, {})
            together[key] = None if known is None or below is None else union((known, below))
    return together


def needs_body(look: Mapping[str, Look]) -> bool:
    """Tell whether a look includes the body or a part of it."""
    msg = look.get("msg", {})
    return msg is None or "body" in msg


def _add(look: dict[str, Look], path: _Path, *, is_tested: bool) -> None:
    at = look
    for key in path[:-1]:
        below = at.setdefault(key, {})
        if below is None:
            return
        at = below
    if is_tested:
        at.setdefault(path[-1], {})
    else:
        at[path[-1]] = None


def _paths(tree: ExpressionTree) -> Iterator[tuple[_Path, bool]]:
    path = _path(tree)
    if path is not None:
        yield path, tree.kind == "has"
        return
    for part in tree.parts:
        yield from _paths(part)


def _path(tree: ExpressionTree) -> _Path | None:
    """Return the keys that lead from msg, state or now to a part; None if it is computed."""
    if tree.kind == "name":
        return (tree.value,) if tree.value in NAMES else None
    is_index = tree.kind == "call" and tree.value == "_[_]"
    key = tree.parts[1].literal if is_index else tree.value
    if key is None or not (is_index or tree.kind in {"select", "has"}):
        return None
    above = _path(tree.parts[0])
    return None if above is None else (*above, key)
