"""Definition files: conversion between YAML or JSON text and plain values. Pure."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from psqlmessages.wire import MalformedText, document_text, strict_json

MAX_BYTES = 1024 * 1024


class YAMLMissing(ValueError):
    """The package that reads and writes YAML is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "YAML needs a package that is not installed: pip install 'psqlmessages[exchanges]'."
            " JSON does not need it."
        )


def parsed(text: bytes | str) -> Any:
    """Parse text that begins with ``{`` as JSON, and any other as YAML; raise MalformedText."""
    decoded = document_text(text, MAX_BYTES)
    return strict_json(decoded) if decoded.lstrip().startswith("{") else _yaml(decoded)


def as_json(document: Any) -> str:
    """Write JSON for people to read."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def as_yaml(document: Any) -> str:
    """Write YAML for people to read; raise YAMLMissing."""
    written: str = _yaml_text().write(document)
    return written


def _yaml(text: str) -> Any:
    yaml_text = _yaml_text()
    try:
        return yaml_text.read(text)
    except yaml_text.YAMLError as error:
        raise MalformedText(f"it is not YAML: {error}") from error


def _yaml_text() -> ModuleType:
    try:
        from psqlmessages.exchanges.store import yaml_text
    except ModuleNotFoundError as error:
        raise YAMLMissing from error
    return yaml_text
