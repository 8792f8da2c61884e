"""Definition files: YAML or JSON text to plain values and back. Pure."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

MOST_BYTES = 1024 * 1024


class MalformedText(ValueError):
    """Text that is no YAML or no JSON: where, as a sentence."""


class YAMLMissing(ValueError):
    """The package that reads and writes YAML is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "YAML needs a package that is not installed: pip install 'psqlmessages[exchanges]'."
            " JSON needs none."
        )


def parsed(text: bytes | str) -> Any:
    """Read text that begins with ``{`` as JSON, and any other as YAML; raise MalformedText."""
    if len(text) > MOST_BYTES:
        raise MalformedText(f"It has {len(text):,} bytes; {MOST_BYTES:,} are the most.")
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise MalformedText(f"It is not UTF-8 text: byte {error.start:,} does not fit.") from error
    return json_value(decoded) if decoded.lstrip().startswith("{") else _yaml(decoded)


def json_value(text: str) -> Any:
    """Read JSON strictly: no field twice, no NaN; raise MalformedText."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError as error:
        raise MalformedText("It is no JSON: it is nested too deeply.") from error
    except ValueError as error:
        raise MalformedText(f"It is no JSON: {error}.") from error


def as_json(document: Any) -> str:
    """Write JSON for people to read."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def as_yaml(document: Any) -> str:
    """Write YAML for people to read; raise YAMLMissing."""
    written: str = _yaml_text().write(document)
    return written


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"an object has the field {name!r:.100} twice")
        found[name] = value
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _yaml(text: str) -> Any:
    yaml_text = _yaml_text()
    try:
        return yaml_text.read(text)
    except yaml_text.YAMLError as error:
        raise MalformedText(f"It is no YAML that can be read: {error}.") from error


def _yaml_text() -> ModuleType:
    try:
        from psqlmessages.exchanges.store import yaml_text
    except ModuleNotFoundError as error:
        raise YAMLMissing from error
    return yaml_text
