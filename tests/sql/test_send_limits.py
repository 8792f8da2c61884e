"""The limit of NOTIFY: what is sent whole and what is kept, to the byte; and any text at all."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sql.conftest import Pair, Program, parse

LIMIT = 7999
LONG_TOKEN = "ü" * 500


def transmission(
    pair: Pair, function: str, token: str | None, enc: str | None
) -> Callable[[str], str]:
    """A function that sends a body from SENDER to LISTENER, and answers the payload received."""
    sender, listener = pair
    before = {"topic_send_as": ["SENDER", "T"], "rpc": ["LISTENER", token]}.get(function, ["T"])
    after = [token, enc] if function.startswith("topic") else [enc]
    if function == "return":
        listener.ok("rpc", "SENDER", token, "question")
        before = ["LISTENER", sender.headers(1)[0]["Token"]]

    def transmit(body: str) -> str:
        if function == "topic_send_many":
            sender.ok(function, *before, [body, "another"], *after)
            return listener.payloads(2)[0]
        sender.ok(function, *before, body, *after)
        return listener.payloads(1)[0]

    return transmit


def is_kept(payload: str) -> bool:
    return "Dkey" in parse(payload)


def whole_length(listener: Program, payload: str) -> int:
    """The bytes of a payload, or those it would have had with its body in it."""
    if not is_kept(payload):
        return len(payload.encode())
    answer = listener.query("SELECT messages.get_data(%s)", payload)
    return len(answer.encode()) - len('"Err":"0",')


@pytest.mark.parametrize(
    "function", ["topic_send", "topic_send_many", "topic_send_as", "rpc", "return"]
)
def test_up_to_7999_bytes_are_sent_whole_and_one_more_is_kept(pair: Pair, function: str) -> None:
    for token, enc in (None, None), (None, "json"), ("TOKEN", "b64"), (LONG_TOKEN, None):
        if token is None and not function.startswith("topic"):
            continue
        transmit = transmission(pair, function, token, enc)
        room = LIMIT - len(transmit("x" * 1000).encode()) + 1000
        # Twice, because the header grows by a byte when its Id gets one more digit.
        sizes = [room + difference for difference in range(-4, 5)] * 2
        payloads = [transmit("ü" * (size // 2) + "x" * (size % 2)) for size in sizes]
        lengths = [whole_length(pair[1], payload) for payload in payloads]
        assert [is_kept(payload) for payload in payloads] == [length > LIMIT for length in lengths]
        assert {LIMIT, LIMIT + 1} <= set(lengths)


@given(body=st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_text_but_nul_arrives_as_it_is(pair: Pair, body: str) -> None:
    sender, listener = pair
    sender.ok("topic_send", "T", body)
    [header] = listener.headers(1)
    assert (header["Body"], header["Size"]) == (body, len(body.encode()))
