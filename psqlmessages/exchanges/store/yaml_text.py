"""Strict reader and writer for the JSON subset of YAML. Needs PyYAML.

Tags and aliases are rejected. Every plain word is text, except null, true, false and whole
numbers.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, NoReturn

import yaml

_DEEPEST = 20
_FAR_WIDTH = 10_000
_PLAIN = {
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": ("true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": ("[-+]?(?:0|[1-9][0-9]{0,17})", list("-+0123456789")),
}


class YAMLError(ValueError):
    """An error in a YAML text and its position, in one line."""


def read(text: str) -> Any:
    """Read one document; raise YAMLError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader with fewer features
    except yaml.MarkedYAMLError as error:
        raise YAMLError(_yaml_error_text(error)) from error
    except yaml.reader.ReaderError as error:
        where, what = error.position, chr(error.character)
        raise YAMLError(f"position {where:,}: {what!r} is not a valid YAML character") from error


def write(document: Any) -> str:
    """Write YAML that ``read`` accepts; a value without nested lists and maps takes one line."""
    written: str = yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=_FAR_WIDTH,
    )
    return written


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values in full: aliases are not read."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # In other quotes, U+0085 would be read as a space.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


class _Loader(yaml.SafeLoader):
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
        if self._depth > _DEEPEST:
            _refuse("it is nested too deeply", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _refuse("a key must be a plain value", key)
            if (text_key := self.construct_object(key)) in seen:
                _refuse(f"the key {text_key!r:.100} occurs twice", key)
            seen.add(text_key)
        return super().construct_mapping(node, deep)


for _kind, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first
    )


def _refuse(problem: str, where: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


def _yaml_error_text(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return str(error.problem)
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
