"""Topics over HTTP: their status, and sending."""

from tests.rest.callers import Caller
from tests.sql.conftest import World


def test_a_message_reaches_listeners(worker: Caller, rest: World):
    rest.rules("user2 LISTENER Topic ROOM R 60")
    listener = rest.node("user2", "LISTENER", listen="ROOM")
    listener.payloads()
    sent = worker.call("POST", "topics/ROOM", b'{"a": 1}', {"Content-Type": "application/json"})
    assert (sent.status, sent.json) == (200, {"heard": True})
    (header,) = listener.headers(1)
    assert (header["From"], header["Body"], header["Enc"]) == ("worker", '{"a": 1}', "json")
    told = worker.call("GET", "topics/ROOM").json
    assert told == {"topic": "ROOM", "notifiers": [], "listeners": ["LISTENER"]}
    listener.ok("topic_unlisten", "ROOM")
    assert worker.call("POST", "topics/ROOM", b"x").json == {"heard": False}


def test_calls_without_a_rule_are_refused(worker: Caller, rest: World):
    rest.rules("user2 LISTENER Topic SECRET R 60")
    rest.node("user2", "LISTENER").ok("topic_listen", "SECRET")
    for method, body in (("GET", None), ("POST", b"x")):
        assert worker.call(method, "topics/SECRET", body).status == 403
        assert worker.call(method, "topics/NOWHERE", body).status == 404
        assert worker.call(method, "topics/a%00", body).status == 400
    bad = worker.call("POST", "topics/ROOM", b"{", {"Content-Type": "application/json"})
    assert bad.status == 400
