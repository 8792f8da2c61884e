"""The list of promises is complete, and names tests that are there."""

from tests.promises import faults, promises


def test_each_promise_stands_in_the_docs_and_has_a_test() -> None:
    assert len(promises()) > 400
    assert faults() == []
