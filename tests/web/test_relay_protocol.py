"""The frames of a node's WebSocket: what is read, and what is refused in which words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psqlmessages.relay.protocol import OPERATIONS, Request, UnreadableFrame, answer, parse_frame

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
REFS = st.none() | NAMES.filter(lambda text: len(text) <= 100) | st.integers(-(10**99), 10**99)


def refused(text: str) -> UnreadableFrame:
    with pytest.raises(UnreadableFrame) as error:
        parse_frame(text)
    assert error.value.number == 57
    return error.value


def test_a_request_is_read() -> None:
    assert parse_frame('{"op":"topic_send","topic":"T","body":"hi","ref":7}') == Request(
        "topic_send", 7, {"topic": "T", "body": "hi", "token": None, "enc": None}
    )
    # Arguments have the order of the SQL function.
    request = parse_frame('{"op":"rpc","enc":"json","body":"1","node":"N","token":"t"}')
    assert list(request.arguments.values()) == ["N", "t", "1", "json"]
    assert parse_frame('{"op":"init","ident":"a"}').arguments["events"] is True
    assert parse_frame('{"op":"init","ident":"a","events":false}').arguments["events"] is False


WRONG = {
    "": "it is not JSON: Expecting value: line 1 column 1 (char 0)",
    '{"op"': "it is not JSON: Expecting ':' delimiter: line 1 column 6 (char 5)",
    "[]": "an array is not a JSON object",
    "null": "null is not a JSON object",
    "{}": "unknown op null",
    '{"op":"fly"}': 'unknown op "fly"',
    '{"op":["init"]}': "unknown op an array",
    '{"op":"get_data","message":"x"}': 'unknown op "get_data"',
    '{"op":"deinit","ident":"a"}': 'deinit has no field "ident"',
    '{"op":"init"}': "the field ident is missing",
    '{"op":"init","ident":7}': "ident is 7, not text",
    '{"op":"init","ident":null}': "ident is null, not text",
    '{"op":"init","ident":"a","events":1}': "events is 1, not true or false",
    '{"op":"init","ident":"a","ident":"b"}': 'it has the field "ident" twice',
    '{"op":"init","ident":"a\\u0000"}': "ident has a NUL character at position 1",
    '{"op":"init","ident":"a\\ud800"}': "ident has a lone surrogate at position 1",
    '{"op":"deinit","ref":NaN}': "NaN is not JSON",
    '{"op":"deinit","ref":-Infinity}': "-Infinity is not JSON",
    '{"op":"deinit","ref":1e999}': "ref is longer than 100 characters",
    '{"op":"deinit","ref":true}': "ref is true, neither text nor a number",
    '{"op":"deinit","ref":"\\ud800"}': "ref has a lone surrogate at position 0",
    f'{{"op":"deinit","ref":"{"x" * 101}"}}': "ref is longer than 100 characters",
    f'{{"op":"deinit","ref":{"9" * 101}}}': "ref is longer than 100 characters",
    "[" * 100_000: "it is nested too deep",
}


def test_the_error_of_a_malformed_frame_says_what_is_wrong() -> None:
    found = {text: refused(text).text for text in WRONG}
    assert found == {text: f"malformed frame: {reason}" for text, reason in WRONG.items()}
    assert "it is not JSON" in refused(f'{{"op":"deinit","ref":{"9" * 10_000}}}').text
    assert refused('{"ref":"r1","op":"fly"}').ref == "r1"
    assert refused('{"ref":2,"op":"init"}').ref == 2
    assert len(refused(json.dumps({"op": "x" * 1_000_000})).text) < 200
    refused('{"op":"\\ud800"}').text.encode()


def test_an_answer_begins_with_its_ref_and_does_not_tell_the_channel() -> None:
    assert answer("a", {"Err": "0"}) == '{"ref":"a","Err":"0"}'
    assert answer(None, {"Err": "0"}) == '{"Err":"0"}'
    assert answer(0, {"Err": "0", "Channel": "secret"}) == '{"ref":0,"Err":"0"}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
OBJECTS = st.dictionaries(
    st.sampled_from(["op", "ref", "ident", "topic", "body", "token", "enc", "events", "x"]),
    JSON | st.sampled_from(sorted(OPERATIONS)),
).map(json.dumps)


@given(st.text() | OBJECTS)
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        request = parse_frame(text)
    except UnreadableFrame as error:
        json.loads(answer(error.ref, {"Err": "57", "Errstr": error.text}).encode())
    else:
        assert set(request.arguments) == set(OPERATIONS[request.op])


@given(op=st.sampled_from(sorted(OPERATIONS)), ref=REFS, data=st.data())
def test_every_request_that_follows_the_table_is_read(
    op: str, ref: str | int | None, data: st.DataObject
) -> None:
    fields = {
        name: data.draw(NAMES if field.type is str else st.booleans())
        for name, field in OPERATIONS[op].items()
    }
    sent = {"op": op, **fields} | ({"ref": ref} if ref is not None else {})
    assert parse_frame(json.dumps(sent)) == Request(op, ref, fields)
    assert json.loads(answer(ref, {"Err": "0"})).get("ref") == ref
