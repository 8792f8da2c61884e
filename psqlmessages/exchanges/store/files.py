"""Definition files: conversion between YAML or JSON text and plain values. No I/O.

YAML must not have tags, aliases, or keys that are lists or maps. Every unquoted value is text,
except null, true, false and whole numbers of up to 18 digits.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, NoReturn

from psqlmessages.wire import MalformedText, decode_document, parse_strict_json

try:
    import yaml
    from yaml import SafeDumper, SafeLoader
except ModuleNotFoundError:
    yaml, SafeDumper, SafeLoader = None, object, object

MAX_BYTES = 1024 * 1024
_MAX_DEPTH = 20
_TAG = "tag:yaml.org,2002:"


class YAMLMissing(ValueError):
    """The package that reads and writes YAML is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "YAML needs a package that is not installed: pip install 'psqlmessages[exchanges]'."
            " JSON does not need it."
        )


def parse(text: bytes | str) -> Any:
    """Parse JSON if the text begins with ``{``, else YAML; raise MalformedText or YAMLMissing."""
    decoded = decode_document(text, MAX_BYTES)
    if decoded.lstrip().startswith("{"):
        return parse_strict_json(decoded)
    if yaml is None:
        raise YAMLMissing
    try:
        return yaml.load(decoded, _Loader)
    except yaml.YAMLError as error:
        raise MalformedText(
            f"it is invalid or unsupported YAML: {_describe_error(error)}"
        ) from error


def _describe_error(error: Any) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        character = chr(error.character)
        return f"position {error.position:,}: {character!r} is not a valid YAML character"
    mark = error.problem_mark or error.context_mark
    position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{position}{error.problem}"


def write_json(document: Any) -> str:
    """Write JSON for people to read."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def write_yaml(document: Any) -> str:
    """Write YAML; each innermost map or list takes one line. Raise YAMLMissing."""
    if yaml is None:
        raise YAMLMissing
    return yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=10_000,
    )


class _Dumper(SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values in full, because `parse` refuses aliases."""
        return True

    def represent_str(self, text: str) -> Any:
        """Write a text; double quotes let YAML escape unprintable characters."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar(f"{_TAG}str", text, style=style)


class _Loader(SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            # A few lines of aliases can expand to gigabytes.
            _refuse("aliases (*name) are not supported: write the value out", event)
        if event.tag not in (None, "!"):
            _refuse("tags (!name) are not supported", event)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            _refuse("it is nested too deeply", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                _refuse("a key must not be a list or a map", key_node)
            if (key := self.construct_object(key_node)) in keys:
                _refuse(f"the key {key!r:.100} occurs twice", key_node)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _refuse(problem: str, node_or_event: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node_or_event.start_mark)


if yaml is not None:
    _Dumper.add_representer(str, _Dumper.represent_str)
    for _type, _pattern, _first_characters in (
        ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", "[-+]?(?:0|[1-9][0-9]{0,17})", list("-+0123456789")),
    ):
        _regex = re.compile(f"^(?:{_pattern})$")
        _Loader.add_implicit_resolver(f"{_TAG}{_type}", _regex, _first_characters)
