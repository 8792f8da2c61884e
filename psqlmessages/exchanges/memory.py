"""Memory: what was decided by header values, which come again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

from psqlmessages.exchanges.looks import Look

MAX_NAMES: Final = 4
MAX_KEPT: Final = 256
MAX_CHARACTERS: Final = 100

Key = tuple[str, ...]
T = TypeVar("T")


class Memory(Generic[T]):
    """Answers by the values of the only headers that were looked at.

    The same values give the same answer; only texts are kept, since 1, 1.0 and true are one key.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._kept: dict[Key, T] = {}

    @classmethod
    def of(cls, look: Mapping[str, Look]) -> Memory[T] | None:
        """Make one for a look; None where it sees more than a few headers whole."""
        msg = look.get("msg")
        if look.keys() != {"msg"} or msg is None or msg.keys() != {"headers"}:
            return None
        headers = msg["headers"]
        if (
            not headers
            or len(headers) > MAX_NAMES
            or any(headers[name] is not None for name in headers)
        ):
            return None
        return cls(tuple(headers))

    def key(self, headers: Mapping[str, Any]) -> Key | None:
        """Return what to look an answer up by; None where it is not kept."""
        values = []
        for name in self.names:
            value = headers.get(name)
            if type(value) is not str or len(value) > MAX_CHARACTERS:
                return None
            values.append(value)
        return tuple(values)

    def answer(self, key: Key) -> T | None:
        """Return what was said before."""
        return self._kept.get(key)

    def keep(self, key: Key, answer: T) -> None:
        """Keep an answer; all are dropped where they become too many."""
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[key] = answer
