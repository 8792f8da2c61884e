"""Calls of a gateway: each names the node that runs it, or runs for many nodes in one statement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from psqlmessages.client.calls import Call, check_names, raise_for_error, read_payload
from psqlmessages.client.registration import CALL_BUILDERS, UNDOES
from psqlmessages.exceptions import MessagesError
from psqlmessages.retry import MAX_WAIT_SECONDS

Answer = dict[str, Any]

# CASE calls the function after messages.use, and only if messages.use succeeded. OFFSET 0 makes
# messages.use run only once.
_CALL_AS: Final = (
    "SELECT CASE WHEN u.answer ->> 'Err' = '0' THEN messages.{0} ELSE u.answer{1} END"
    " FROM (SELECT messages.use(%s) AS answer OFFSET 0) AS u"
)
# In the FROM clause, set_config takes effect before the function runs, and lasts until the commit.
_CALL_AS_WITH_TIMEOUT: Final = _CALL_AS + ", set_config('lock_timeout', %s, true)"
_REGISTER: Final = "SELECT messages.{0}(%s) FROM set_config('lock_timeout', %s, true)"
_REGISTER_MANY: Final = (
    "SELECT json_agg(messages.{0}(u.ident)) FROM"
    " (SELECT n.ident FROM unnest(%b::text[]) WITH ORDINALITY AS n (ident, place),"
    " set_config('lock_timeout', %s, true) ORDER BY n.place OFFSET 0) AS u"
)
# The answer is null if messages.use failed.
_JOIN_MANY: Final = (
    "SELECT json_agg(CASE WHEN messages.use(u.ident) ->> 'Err' = '0' THEN CASE u.function"
    " WHEN 'topic_listen' THEN messages.topic_listen(u.topic)"
    " WHEN 'topic_notify' THEN messages.topic_notify(u.topic)"
    " ELSE messages.topic_observe(u.topic) END END) FROM"
    " (SELECT n.* FROM unnest(%b::text[], %b::text[], %b::text[])"
    " WITH ORDINALITY AS n (ident, function, topic, place),"
    " set_config('lock_timeout', %s, true) ORDER BY n.place OFFSET 0) AS u"
)
_NOT_OUR_NODE: Final = {"Err": "53", "Errstr": "it is not a node of this session"}

# Functions that join or leave a topic. They wait for other sessions that change the same topic.
JOIN_OR_LEAVE: Final = (*CALL_BUILDERS, *UNDOES)
# Functions whose calls may share a round trip, with their numbers of arguments.
_SHARING: Final = {"topic_send": 4, "rpc": 4, "return": 4, "return_error": 3, "audience": 1}
# All functions that call_as can call, with their numbers of arguments.
FUNCTIONS: Final = {
    **_SHARING,
    **dict.fromkeys((*JOIN_OR_LEAVE, "topic_status", "topic_auth", "get_data"), 1),
}
REGISTRATIONS: Final = ("init", "deinit", "crash", "use")


def call_as(ident: str, function: str, *arguments: str | None) -> Call[Answer]:
    """Call a function as a node of the session, whichever node acted before; return its answer.

    For ``get_data`` the answer is the message's header, with the text of the body as ``Body``.
    """
    count = FUNCTIONS[function]
    if len(arguments) > count:
        raise TypeError(f"{function} takes {count} arguments, not {len(arguments)}")
    check_names(ident, *(argument for argument in arguments if argument is not None))
    # Pass all arguments, so that all calls of a function have the same SQL.
    all_arguments = (*arguments, *[None] * (count - len(arguments)))
    call = f"{function}({', '.join(['%s'] * count)})"
    is_text = function == "get_data"
    return Call(
        _CALL_AS.format(call, "::text" if is_text else ""),
        (*all_arguments, ident),
        _read_data if is_text else raise_for_error,
        may_share_round_trip=function in _SHARING,
        ident=ident,
    )


def join_or_leave(
    ident: str, function: str, topic: str, seconds: float = MAX_WAIT_SECONDS
) -> Call[Answer]:
    """Call a function of JOIN_OR_LEAVE as a node; wait up to ``seconds`` per lock."""
    return Call(
        _CALL_AS_WITH_TIMEOUT.format(f"{function}(%s)", ""),
        (*check_names(topic, ident), _lock_timeout(seconds)),
        raise_for_error,
        registers=(function, topic),
        ident=ident,
    )


def registration(function: str, ident: str, seconds: float = MAX_WAIT_SECONDS) -> Call[Answer]:
    """Call init, deinit, crash or use; return its answer."""
    change = "deinit" if function == "crash" else function
    return Call(
        _REGISTER.format(function),
        (*check_names(ident), _lock_timeout(seconds)),
        raise_for_error,
        registers=(change, ident),
        ident=ident,
    )


def register_many(function: str, idents: Sequence[str], seconds: float) -> Call[list[Answer]]:
    """Call init or deinit for each ident, in one transaction; return the answers in order."""
    return Call(
        _REGISTER_MANY.format(function),
        (list(idents), _lock_timeout(seconds)),
        _read_answers(len(idents)),
    )


def join_many(joins: Sequence[tuple[str, str, str]], seconds: float) -> Call[list[Answer]]:
    """Call a function for each (ident, function, topic), in one transaction; see register_many."""
    columns = tuple(list(column) for column in zip(*joins, strict=True))
    return Call(_JOIN_MANY, (*columns, _lock_timeout(seconds)), _read_answers(len(joins)))


def _lock_timeout(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _read_answers(number: int) -> Callable[[Any], list[Answer]]:
    def read(answers: Any) -> list[Answer]:
        if not isinstance(answers, list) or len(answers) != number:
            raise MessagesError(f"expected the answers of {number} calls, not {answers!r:.200}")
        return [answer or _NOT_OUR_NODE for answer in answers]

    return read


def _read_data(answer: Any) -> Answer:
    payload = read_payload(answer)
    return {**payload.header, "Body": payload.text}
