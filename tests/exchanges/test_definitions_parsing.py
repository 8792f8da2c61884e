"""Parsing of definitions: YAML and JSON are read strictly, and what is written is read again."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.graph import parsing

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
documents = st.fixed_dictionaries({"exchanges": st.dictionaries(texts, values, max_size=4)})


def fault(text: bytes | str) -> str:
    with pytest.raises(parsing.MalformedText) as raised:
        parsing.parsed(text)
    return str(raised.value)


@given(documents)
def test_yaml_that_is_written_is_read_again(document: object) -> None:
    assert parsing.parsed(parsing.as_yaml(document).encode()) == document


@given(documents)
def test_json_that_is_written_is_read_again(document: object) -> None:
    assert parsing.parsed(parsing.as_json(document).encode()) == document


def test_what_is_there_twice_is_written_twice() -> None:
    same = {"src": {"queue": "a"}}
    document = {"exchanges": {"x": same, "y": same}}
    assert parsing.parsed(parsing.as_yaml(document)) == document


@pytest.mark.parametrize(
    "word",
    ["no", "yes", "on", "off", "y", "012", "0x10", "1_000", "1:30", "1.5", ".inf", "=", "<<",
     "2026-11-21", "1e3", "99999999999999999999999999"],
)  # fmt: skip
def test_a_plain_word_is_text(word: str) -> None:
    assert parsing.parsed(f"queue: {word}") == {"queue": word}


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("FALSE", False), ("~", None), ("", None), ("-12", -12), ("'12'", "12")],
)
def test_nothing_but_numbers_booleans_and_null_is_no_text(word: str, value: object) -> None:
    assert parsing.parsed(f"key: {word}") == {"key": value}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &x [1]\nb: *x", "line 2, column 4: aliases (*name) are not read: write it out"),
        ("a: !!python/object/apply:os.system [ls]", "line 1, column 4: tags (!name) are not read"),
        ("a: !!int '1'", "line 1, column 4: tags (!name) are not read"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' is there twice"),
        ("a:\n  'x': 1\n  x: 2", "line 3, column 3: the key 'x' is there twice"),
        ("? [a]\n: 1", "line 1, column 3: a key is a word"),
        ("a: [1", "line 1, column 6: expected ',' or ']', but got '<stream end>'"),
        ("\ta: 1", "line 1, column 1: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        ("[" * 50_000, "line 1, column 21: it is nested too deeply"),
        ("- " * 50_000, "line 1, column 41: it is nested too deeply"),
        ("a: \ud800", "position 3: '\\ud800' is no character of YAML"),
        ("a: \0", "position 3: '\\x00' is no character of YAML"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused_with_its_place(text: str, told: str) -> None:
    assert fault(text) == f"It is no YAML that can be read: {told}."


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "a": 2}', "It is no JSON: an object has the field 'a' twice."),
        ('{"a": NaN}', "It is no JSON: NaN is no number of JSON."),
        (' {"a"', "It is no JSON: Expecting ':' delimiter: line 1 column 6 (char 5)."),
        ('{"a":' * 100_000, "It is no JSON: it is nested too deeply."),
        (b'{"a": "\xff"}', "It is not UTF-8 text: byte 7 does not fit."),
        ("a" * (2**20 + 1), "It has 1,048,577 bytes; 1,048,576 are the most."),
    ],
)
def test_json_and_bytes_are_read_as_strictly(text: bytes | str, told: str) -> None:
    assert fault(text) == told


def test_what_begins_with_a_brace_is_json_even_behind_a_byte_order_mark() -> None:
    assert parsing.parsed(b'\xef\xbb\xbf \n{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_without_the_package_for_yaml_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "psqlmessages.graph.yaml_text", raising=False)
    monkeypatch.delattr("psqlmessages.graph.yaml_text", raising=False)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert parsing.parsed('{"a": 1}') == {"a": 1}
    with pytest.raises(parsing.YAMLMissing, match=r"pip install 'psqlmessages\[exchanges\]'"):
        parsing.parsed("a: 1")
