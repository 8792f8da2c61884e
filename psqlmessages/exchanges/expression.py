"""Expression tree, and the message fields that an expression reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from psqlmessages.exchanges.model import SelectorError

MAX_DEPTH: Final = 100
VARIABLES: Final = frozenset({"msg", "state", "now"})

Kind = Literal["constant", "name", "select", "has", "call", "list", "map"]


@dataclass(frozen=True, slots=True)
class ExpressionTree:
    """An expression or a part of one.

    ``value`` is the constant, the name, the field (select, has) or the function (call). ``parts``
    are the operands or elements. The parts of a map alternate between keys and values.
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


# The field numbers below are those of cel/expr/checked.proto and cel/expr/syntax.proto.


def parse_expression(serialized: bytes) -> ExpressionTree:
    """Parse the output of ``Expression.serialize``, a google.protobuf.Any with a CheckedExpr.

    Raise SelectorError for a loop, a protobuf object, deep nesting or an unknown part.
    """
    checked_expression = _value(_fields(serialized), 2)
    return _expression(_value(_fields(checked_expression), 4), MAX_DEPTH)


def _expression(data: bytes, depth: int) -> ExpressionTree:
    if depth == 0:
        raise SelectorError(f"the expression is nested deeper than {MAX_DEPTH} levels")
    for number, value in _fields(data):
        if number in _PARSERS:
            return _PARSERS[number](value, depth - 1)
    raise SelectorError("the expression has an unsupported part")


def _constant(data: bytes, _: int) -> ExpressionTree:
    for number, value in _fields(data):
        if number in _CONSTANTS:
            return ExpressionTree("constant", _CONSTANTS[number](value))
    raise SelectorError("the expression has an unsupported constant")


def _name(data: bytes, _: int) -> ExpressionTree:
    return ExpressionTree("name", _value(_fields(data), 1).decode())


def _select(data: bytes, depth: int) -> ExpressionTree:
    fields = _fields(data)
    is_presence_test = any(number == 3 and value for number, value in fields)
    kind: Kind = "has" if is_presence_test else "select"
    parts = (_expression(_value(fields, 1), depth),)
    return ExpressionTree(kind, _value(fields, 2).decode(), parts)


def _call(data: bytes, depth: int) -> ExpressionTree:
    fields = _fields(data)
    # For a method call, field 1 is the object.
    operands = [value for number in (1, 3) for each, value in fields if each == number]
    parts = tuple(_expression(operand, depth) for operand in operands)
    return ExpressionTree("call", _value(fields, 2).decode(), parts)


def _list(data: bytes, depth: int) -> ExpressionTree:
    elements = [value for number, value in _fields(data) if number == 1]
    return ExpressionTree("list", None, tuple(_expression(element, depth) for element in elements))


def _map(data: bytes, depth: int) -> ExpressionTree:
    parts = []
    for number, entry in _fields(data):
        if number == 1:
            raise SelectorError(
                "an expression can create maps, lists and values, but no protobuf objects"
            )
        fields = _fields(entry)
        parts += [_expression(_value(fields, number), depth) for number in (3, 4)]
    return ExpressionTree("map", None, tuple(parts))


def _loop(_: bytes, __: int) -> ExpressionTree:
    raise SelectorError(
        "an expression must not loop: map, filter, all, exists, … are not supported"
    )


_CONSTANTS: Final[dict[int, Callable[[Any], Any]]] = {
    1: lambda _: None,
    2: bool,
    3: lambda number: number - (1 << 64) if number >> 63 else number,
    4: int,
    5: lambda data: struct.unpack("<d", data)[0],
    6: bytes.decode,
    7: bytes,
}

_PARSERS: Final = {3: _constant, 4: _name, 5: _select, 6: _call, 7: _list, 8: _map, 9: _loop}


def _value(fields: list[tuple[int, Any]], number: int) -> Any:
    """Return the value of the last field with this number; empty bytes if there is none."""
    return next((value for each, value in reversed(fields) if each == number), b"")


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """Split a protobuf message into pairs of field number and value (int or bytes)."""
    fields: list[tuple[int, Any]] = []
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        match key & 7:
            case 0:
                value, position = _varint(data, position)
                fields.append((key >> 3, value))
                continue
            case 1:
                size = 8
            case 2:
                size, position = _varint(data, position)
            case 5:
                size = 4
            case _:
                raise SelectorError("the CEL package uses an unknown serialization format")
        fields.append((key >> 3, data[position : position + size]))
        position += size
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Read an integer of variable length; return it, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


# The fields of a message that an expression reads. Only these fields are converted.

FIELDS: Final = ("body", "headers", "id", "tries", "hops", "queue", "ns")

# The keys that an expression reads. The value of a key is the tree of the keys below it, or None if
# the expression reads the whole value, or {} if it only tests whether the key exists.
FieldTree: TypeAlias = "dict[str, FieldTree] | None"
# A name (msg, state or now), and the keys that lead from it to a value.
_Path = tuple[str, ...]


def find_fields(expression: ExpressionTree) -> dict[str, FieldTree]:
    """Return the fields that an expression reads; raise SelectorError if msg has no such field."""
    tree: dict[str, FieldTree] = {}
    for path, is_presence_test in _paths(expression):
        if path[0] == "msg" and len(path) > 1 and path[1] not in FIELDS:
            raise SelectorError(f"msg has no field {path[1]}; its fields are {', '.join(FIELDS)}")
        _add_path(tree, path, is_presence_test=is_presence_test)
    return tree


def merge_fields(
    tree: Mapping[str, FieldTree], other: Mapping[str, FieldTree]
) -> dict[str, FieldTree]:
    """Return the union of two trees."""
    merged = dict(tree)
    for key, new in other.items():
        known = merged.get(key, {})
        merged[key] = None if known is None or new is None else merge_fields(known, new)
    return merged


def _add_path(tree: dict[str, FieldTree], path: _Path, *, is_presence_test: bool) -> None:
    for key in path[:-1]:
        subtree = tree.setdefault(key, {})
        if subtree is None:
            return
        tree = subtree
    if is_presence_test:
        tree.setdefault(path[-1], {})
    else:
        tree[path[-1]] = None


def _paths(expression: ExpressionTree) -> Iterator[tuple[_Path, bool]]:
    """Yield each path that an expression reads, and whether it only tests if the path exists."""
    path = _path(expression)
    if path is not None:
        yield path, expression.kind == "has"
        return
    for part in expression.parts:
        yield from _paths(part)


def _path(expression: ExpressionTree) -> _Path | None:
    """Return the path of an expression such as ``msg.headers["a"]``; None for other expressions."""
    key: str | None = None
    match expression.kind, expression.value:
        case "name", name:
            return (name,) if name in VARIABLES else None
        case "select" | "has", field:
            key = field
        case "call", "_[_]":
            key = expression.parts[1].literal
    if key is None or (parent := _path(expression.parts[0])) is None:
        return None
    return (*parent, key)
