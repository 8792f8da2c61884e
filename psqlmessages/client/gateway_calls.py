"""Calls of a gateway: each names the node that runs it, or runs for many nodes in one statement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from psqlmessages.client.calls import Call, check_names, payload_of, raise_for_error
from psqlmessages.client.registration import CALL_BUILDERS, ENDS
from psqlmessages.exceptions import MessagesError
from psqlmessages.retry import MAX_WAIT_SECONDS

Answer = dict[str, Any]

# CASE runs the function after use, and only if use succeeded. OFFSET 0 makes it one call of use.
_ACTING: Final = (
    "SELECT CASE WHEN u.answer ->> 'Err' = '0' THEN messages.{0} ELSE u.answer{1} END"
    " FROM (SELECT messages.use(%s) AS answer OFFSET 0) AS u"
)
# In the FROM clause, set_config takes effect before the function runs, and lasts until the commit.
_CHANGING: Final = _ACTING + ", set_config('lock_timeout', %s, true)"
_REGISTRATION: Final = "SELECT messages.{0}(%s) FROM set_config('lock_timeout', %s, true)"
_MANY: Final = (
    "SELECT json_agg(messages.{0}(u.ident)) FROM"
    " (SELECT n.ident FROM unnest(%b::text[]) WITH ORDINALITY AS n (ident, place),"
    " set_config('lock_timeout', %s, true) ORDER BY n.place OFFSET 0) AS u"
)
_JOIN_MANY: Final = (
    "SELECT json_agg(CASE WHEN messages.use(u.ident) ->> 'Err' = '0' THEN CASE u.function"
    " WHEN 'topic_listen' THEN messages.topic_listen(u.topic)"
    " WHEN 'topic_notify' THEN messages.topic_notify(u.topic)"
    " ELSE messages.topic_observe(u.topic) END END) FROM"
    " (SELECT n.* FROM unnest(%b::text[], %b::text[], %b::text[])"
    " WITH ORDINALITY AS n (ident, function, topic, place),"
    " set_config('lock_timeout', %s, true) ORDER BY n.place OFFSET 0) AS u"
)
_NOT_HERE: Final = {"Err": "53", "Errstr": "it is not a node of this session"}


class Function(NamedTuple):
    """The number of arguments of a function, and whether its calls may share a round trip."""

    arguments: int
    may_share_round_trip: bool = False


# Functions that wait for other sessions that change the same topic.
CHANGES: Final = (*CALL_BUILDERS, *ENDS)
FUNCTIONS: Final = {
    **dict.fromkeys((*CHANGES, "topic_status", "topic_auth"), Function(1)),
    "topic_send": Function(4, may_share_round_trip=True),
    "rpc": Function(4, may_share_round_trip=True),
    "return": Function(4, may_share_round_trip=True),
    "return_error": Function(3, may_share_round_trip=True),
    "audience": Function(1, may_share_round_trip=True),
    "get_data": Function(1),
}
REGISTRATIONS: Final = ("init", "deinit", "crash", "use")


def call_as(ident: str, function: str, *arguments: str | None) -> Call[Answer]:
    """Call a function as a node of the session, whichever node acted before; return its answer.

    For ``get_data`` the answer is the message's header, with the text of the body as ``Body``.
    """
    wanted = FUNCTIONS[function]
    if len(arguments) > wanted.arguments:
        raise TypeError(f"{function} takes {wanted.arguments} arguments, not {len(arguments)}")
    check_names(ident, *(argument for argument in arguments if argument is not None))
    # Pass all arguments, so that all calls of a function have the same SQL.
    given = (*arguments, *(None for _ in range(wanted.arguments - len(arguments))))
    call = f"{function}({', '.join(['%s'] * wanted.arguments)})"
    is_text = function == "get_data"
    return Call(
        _ACTING.format(call, "::text" if is_text else ""),
        (*given, ident),
        _data if is_text else raise_for_error,
        None,
        wanted.may_share_round_trip,
        ident,
    )


def join_or_leave(
    ident: str, function: str, topic: str, seconds: float = MAX_WAIT_SECONDS
) -> Call[Answer]:
    """Call a function of CALL_BUILDERS or ENDS as a node; wait up to ``seconds`` per lock."""
    return Call(
        _CHANGING.format(f"{function}(%s)", ""),
        (*check_names(topic, ident), _setting(seconds)),
        raise_for_error,
        (function, topic),
        ident=ident,
    )


def registration(function: str, ident: str, seconds: float = MAX_WAIT_SECONDS) -> Call[Answer]:
    """Call init, deinit, crash or use; the result is the answer."""
    kept = "deinit" if function == "crash" else function
    return Call(
        _REGISTRATION.format(function),
        (*check_names(ident), _setting(seconds)),
        raise_for_error,
        (kept, ident),
        ident=ident,
    )


def register_many(function: str, idents: Sequence[str], seconds: float) -> Call[list[Answer]]:
    """Call init or deinit for each of these idents in one transaction; the answers in order."""
    return Call(_MANY.format(function), (list(idents), _setting(seconds)), _answers(len(idents)))


def join_many(joins: Sequence[tuple[str, str, str]], seconds: float) -> Call[list[Answer]]:
    """Call the functions of (ident, function, topic) in one transaction; the answers in order."""
    columns = tuple(list(column) for column in zip(*joins, strict=True))
    return Call(_JOIN_MANY, (*columns, _setting(seconds)), _answers(len(joins)))


def _setting(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _answers(number: int) -> Callable[[Any], list[Answer]]:
    def read(answers: Any) -> list[Answer]:
        if not isinstance(answers, list) or len(answers) != number:
            raise MessagesError(f"expected the answers of {number} calls, not {answers!r:.200}")
        return [answer or _NOT_HERE for answer in answers]

    return read


def _data(answer: Any) -> Answer:
    payload = payload_of(answer)
    return {**payload.header, "Body": payload.text}
