"""Calls of a gateway: each is made as a given node, or for many nodes in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from psqlmessages.client.calls import Call, Merging, check_names, raise_for_error, read_payload
from psqlmessages.client.registration import JOIN_BY_LEAVE, JOIN_CALLS
from psqlmessages.exceptions import MessagesError

Answer = dict[str, Any]

# messages.use selects the acting node. Then CASE calls the function, or returns the error of
# messages.use. OFFSET 0 prevents the planner from calling messages.use twice.
_CALL_AS: Final = (
    "SELECT CASE WHEN u.answer ->> 'Err' = '0' THEN messages.{0} ELSE u.answer{1} END"
    " FROM (SELECT messages.use(%s) AS answer OFFSET 0) AS u"
)
# One statement for the calls of many nodes. Each row calls messages.use, then the function.
_CALL_MANY_AS: Final = (
    "SELECT json_build_object('Err', '0', 'Answers', json_agg("
    "CASE WHEN u.answer ->> 'Err' = '0' THEN messages.{0}({1}) ELSE u.answer END))"
    " FROM (SELECT n.*, messages.use(n.ident) AS answer"
    " FROM unnest({2}, %b::text[]) AS n ({1}, ident) OFFSET 0) AS u"
)
# In the FROM clause, set_config takes effect before the function runs, and lasts until the commit.
_CALL_AS_WITH_TIMEOUT: Final = _CALL_AS + ", set_config('lock_timeout', %s, true)"
_REGISTER: Final = "SELECT messages.{0}(%s) FROM set_config('lock_timeout', %s, true)"
_REGISTER_MANY: Final = (
    "SELECT json_agg(messages.{0}(u.ident)) FROM"
    " (SELECT n.ident FROM unnest(%b::text[]) WITH ORDINALITY AS n (ident, place),"
    " set_config('lock_timeout', %s, true) ORDER BY n.place OFFSET 0) AS u"
)
# The answer for a node is null if messages.use fails; _read_answers replaces null by an error.
_JOIN_MANY: Final = (
    "SELECT json_agg(CASE WHEN messages.use(u.ident) ->> 'Err' = '0' THEN CASE u.function"
    " WHEN 'topic_listen' THEN messages.topic_listen(u.topic)"
    " WHEN 'topic_notify' THEN messages.topic_notify(u.topic)"
    " ELSE messages.topic_observe(u.topic) END END) FROM"
    " (SELECT n.* FROM unnest(%b::text[], %b::text[], %b::text[])"
    " WITH ORDINALITY AS n (ident, function, topic, place),"
    " set_config('lock_timeout', %s, true) ORDER BY n.place OFFSET 0) AS u"
)
_NOT_OUR_NODE: Final = {"Err": "53", "Errstr": "the ident is not a node of this session"}

# Functions by which a node joins or leaves a topic. Each waits if a session has locked the topic.
JOIN_OR_LEAVE: Final = (*JOIN_CALLS, *JOIN_BY_LEAVE)
# Functions whose calls may share a round trip, with their numbers of arguments.
_BATCHABLE: Final = {"topic_send": 4, "rpc": 4, "return": 4, "return_error": 3, "audience": 1}
# All functions that call_as accepts, with their numbers of arguments.
FUNCTIONS: Final = {
    **_BATCHABLE,
    **dict.fromkeys((*JOIN_OR_LEAVE, "topic_status", "topic_auth", "get_data"), 1),
}
# Functions whose only argument is the node.
NODE_FUNCTIONS: Final = ("init", "deinit", "crash", "use")


def _merging(function: str, count: int) -> Merging:
    columns = ", ".join(f"argument_{n}" for n in range(count))
    arrays = ", ".join(["%b::text[]"] * count)
    sql = _CALL_MANY_AS.format(function, columns, arrays)
    return Merging(sql, tuple(range(count + 1)), lambda answer, _: list(answer["Answers"]))


_MERGINGS: Final = {function: _merging(function, count) for function, count in _BATCHABLE.items()}


def call_as(ident: str, function: str, *arguments: str | None) -> Call[Answer]:
    """Create a call of a function as the node ``ident``, which becomes the acting node.

    Its result is the function's answer. For ``get_data``, this is the header of the message with
    the text of the body as ``Body``.
    """
    count = FUNCTIONS[function]
    if len(arguments) > count:
        raise TypeError(f"{function} takes at most {count} arguments, not {len(arguments)}")
    check_names(ident, *(argument for argument in arguments if argument is not None))
    # Pass null for missing arguments, so that all calls of a function have the same SQL.
    all_arguments = (*arguments, *[None] * (count - len(arguments)))
    call = f"{function}({', '.join(['%s'] * count)})"
    is_text = function == "get_data"
    return Call(
        _CALL_AS.format(call, "::text" if is_text else ""),
        (*all_arguments, ident),
        _read_data if is_text else raise_for_error,
        may_share_round_trip=function in _BATCHABLE,
        ident=ident,
        merging=_MERGINGS.get(function),
    )


def change_registration(ident: str, function: str, subject: str, seconds: float) -> Call[Answer]:
    """Create a call of a function of JOIN_OR_LEAVE or NODE_FUNCTIONS.

    It waits up to ``seconds`` per lock. ``subject`` is the topic, or ``ident`` without one.
    """
    if function in NODE_FUNCTIONS:
        sql, names = _REGISTER.format(function), check_names(ident)
    else:
        sql = _CALL_AS_WITH_TIMEOUT.format(f"{function}(%s)", "")
        names = check_names(subject, ident)
    return Call(
        sql,
        (*names, _lock_timeout(seconds)),
        raise_for_error,
        registration_change=("deinit" if function == "crash" else function, subject),
        ident=ident,
    )


def init_or_deinit_many(function: str, idents: Sequence[str], seconds: float) -> Call[list[Answer]]:
    """Create a call of init or deinit for each node, in one transaction; it returns all answers."""
    return Call(
        _REGISTER_MANY.format(function),
        (list(idents), _lock_timeout(seconds)),
        partial(_read_answers, len(idents)),
    )


def join_many(joins: Sequence[tuple[str, str, str]], seconds: float) -> Call[list[Answer]]:
    """Create a call that runs many joins, each (ident, function, topic); it returns all answers."""
    columns = tuple(list(column) for column in zip(*joins, strict=True))
    return Call(_JOIN_MANY, (*columns, _lock_timeout(seconds)), partial(_read_answers, len(joins)))


def _lock_timeout(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _read_answers(number: int, answers: Any) -> list[Answer]:
    if not isinstance(answers, list) or len(answers) != number:
        raise MessagesError(f"expected the answers of {number} calls, not {answers!r:.200}")
    return [answer or _NOT_OUR_NODE for answer in answers]


def _read_data(answer: Any) -> Answer:
    payload = read_payload(answer)
    return {**payload.header, "Body": payload.text}
