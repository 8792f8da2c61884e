"""Looks: which parts of a message an expression sees, so that only these are converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from psqlmessages.exchanges.bounds import NAMES
from psqlmessages.exchanges.errors import SelectorError
from psqlmessages.exchanges.syntax import Tree

FIELDS: Final = ("body", "headers", "id", "tries", "hops", "queue", "ns")

# Per key what is looked at below it; None: all of it; {}: only whether it is there.
Look: TypeAlias = "dict[str, Look] | None"
_Path = tuple[str, ...]


def look_of(tree: Tree) -> dict[str, Look]:
    """Return what an expression sees, below msg, state and now.

    Raise SelectorError for a field that no message has.
    """
    look: dict[str, Look] = {}
    for path, is_tested in _paths(tree):
        if path[0] == "msg" and len(path) > 1 and path[1] not in FIELDS:
            raise SelectorError(f"msg has no {path[1]}: it has {', '.join(FIELDS)}")
        _add(look, path, is_tested=is_tested)
    return look


def union(looks: Iterable[Mapping[str, Look]]) -> dict[str, Look]:
    """Return a look that sees what any of them sees."""
    together: dict[str, Look] = {}
    for look in looks:
        for key, below in look.items():
            known = together.get(key, {})
            together[key] = None if known is None or below is None else union((known, below))
    return together


def needs_body(look: Mapping[str, Look]) -> bool:
    """Tell whether a look sees the body or a part of it."""
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


def _paths(tree: Tree) -> Iterator[tuple[_Path, bool]]:
    path = _path(tree)
    if path is not None:
        yield path, tree.kind == "has"
        return
    for part in tree.parts:
        yield from _paths(part)


def _path(tree: Tree) -> _Path | None:
    """Return the keys that lead to a part from msg, state or now; None: it is computed."""
    if tree.kind == "name":
        return (tree.value,) if tree.value in NAMES else None
    is_index = tree.kind == "call" and tree.value == "_[_]"
    key = tree.parts[1].literal if is_index else tree.value
    if key is None or not (is_index or tree.kind in {"select", "has"}):
        return None
    above = _path(tree.parts[0])
    return None if above is None else (*above, key)
