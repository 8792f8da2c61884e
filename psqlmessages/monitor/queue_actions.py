"""Actions on queues: pause, drain, push a test message; delete, move and redrive elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from psqlmessages.client import queue_calls
from psqlmessages.models import Auth, Queue
from psqlmessages.models.names import is_name, isolate, list_names, patterns
from psqlmessages.models.rules import database
from psqlmessages.monitor.access import SEND_TEST_MESSAGES, VIEW_ELEMENTS
from psqlmessages.monitor.actions import Action, Fields, field_value, parse_json, read_body
from psqlmessages.monitor.formats import MAX_NAMES, format_count
from psqlmessages.monitor.listing import limit_query_time
from psqlmessages.monitor.queue_status import MAX_ON_PAGE, read_queue
from psqlmessages.orm import fetch, own_ident, run
from psqlmessages.wire import MAX_ID, EncodedBody, parse_number

# Search and act on at most this many elements, the first of the queue.
MAX_SEARCHED: Final = 10_000
_SHOWN_CHARACTERS: Final = 2000
_CHANGE_QUEUE: Final = "psqlmessages.change_queue"
_DELETE_ELEMENTS: Final = "psqlmessages.delete_element"
_CHANGE_ELEMENTS: Final = "psqlmessages.change_element"
_MAX_DELAY_SECONDS: Final = 999_999_999
# The view sets this field to "yes" if the user may see bodies. Otherwise bodies are not searched.
MAY_SEE_BODIES: Final = "may_see_bodies"

_PEEK: Final = """
    SELECT p.id, p.state, p.mature, p.pushed_at, p.tries, p.enc, left(p.headers, %(shown)s),
        left(p.body, %(shown)s), octet_length(p.body), p.headers::jsonb ->> 'x-dl-from-queue',
        p.headers::jsonb ->> 'x-dl-tries'
    FROM messages.peek(%(ident)s, %(queue)s, %(first)s, %(with_bodies)s) AS p
    WHERE %(search)s = '' OR p.id::text = %(search)s
        OR strpos(lower(p.headers), lower(%(search)s)) > 0
        OR strpos(lower(p.body), lower(%(search)s)) > 0
    OFFSET %(offset)s LIMIT %(limit)s
"""


class QueuedElement(NamedTuple):
    """An element with the beginnings of its headers and body.

    ``body`` and ``size`` are None if bodies were not read.
    """

    id: int
    state: str
    mature: Any
    pushed_at: Any
    tries: int
    enc: str | None
    headers: str
    body: str | None
    size: int | None
    dead_from: str | None
    dead_tries: str | None


def peek(
    queue: str, search: str = "", offset: int = 0, *, limit: int, with_bodies: bool
) -> list[QueuedElement]:
    """Read elements of a queue as the node of this project, without taking them.

    ``search``: an id, or text in headers and bodies. ``with_bodies``: read and search bodies.
    """
    limit_query_time()
    parameters = {
        "ident": own_ident(),
        "queue": queue,
        "first": MAX_SEARCHED if search else min(MAX_SEARCHED, offset + limit),
        "with_bodies": with_bodies,
        "search": search,
        "shown": _SHOWN_CHARACTERS,
        "offset": offset,
        "limit": limit,
    }
    return [QueuedElement(*row) for row in fetch(_PEEK, parameters, database())]


def list_nodes(queue: str, *modes: str) -> str:
    """List, as text, the first nodes that have a rule for a queue with one of these modes."""
    rules = Auth.objects.using(database()).filter(type="Queue", dest__in=patterns(queue))
    nodes = rules.filter(mode__in=modes).order_by("ident").values_list("ident", flat=True)
    return list_names(nodes.distinct()[: MAX_NAMES + 1], MAX_NAMES) or _("none")


def _readers_text(queue: str) -> str:
    return _("Nodes that may take from {queue}: {nodes}.").format(
        queue=isolate(queue), nodes=list_nodes(queue, "R", "RW", "A")
    )


def _elements_text(number: int) -> str:
    return ngettext("{number:,} element", "{number:,} elements", number).format(number=number)


def _sizes_text(queue: Queue) -> str:
    if (status := read_queue(queue.pk)) is None:
        return _("The queue no longer exists.")
    return _(
        "It has {available} available, {scheduled} scheduled and {reserved} reserved elements."
    ).format(
        available=format_count(status.available, MAX_ON_PAGE),
        scheduled=format_count(status.scheduled, MAX_ON_PAGE),
        reserved=format_count(status.reserved, MAX_ON_PAGE),
    )


# Pause, resume, drain


def _describe_pause(queue: Queue, _fields: Fields) -> Sequence[str]:
    return (
        _("Consumers get no more elements of {queue} until you resume it.").format(queue=queue),
        _("Nodes can still push, and can commit or roll back reserved elements."),
        _sizes_text(queue),
        _readers_text(queue.name),
    )


def _pause(queue: Queue, _fields: Fields) -> str:
    is_changed = run(queue_calls.pause(own_ident(), queue.name), database())
    return _("Paused.") if is_changed else _("The queue was already paused.")


def _describe_resume(queue: Queue, _fields: Fields) -> Sequence[str]:
    return (
        _("Consumers get elements of {queue} again.").format(queue=queue),
        _sizes_text(queue),
        _readers_text(queue.name),
    )


def _resume(queue: Queue, _fields: Fields) -> str:
    is_changed = run(queue_calls.resume(own_ident(), queue.name), database())
    return _("Resumed.") if is_changed else _("The queue was not paused.")


def _describe_drain(queue: Queue, _fields: Fields) -> Sequence[str]:
    return (
        _("All available elements of {queue} will be permanently deleted.").format(queue=queue),
        _sizes_text(queue),
        _("Scheduled and reserved elements stay."),
    )


def _drain(queue: Queue, _fields: Fields) -> str:
    removed = run(queue_calls.drain(own_ident(), queue.name), database())
    return _("Drained: {elements} removed.").format(elements=_elements_text(removed))


# Test messages


def _test_message(fields: Fields) -> dict[str, Any]:
    """Read the posted test message: its body, headers and delay."""
    body = read_body(fields)
    text = field_value(fields, "headers").strip()
    headers = parse_json(text, _("The header text")) if text else None
    if not isinstance(headers, dict | None):
        raise ValidationError(_("The headers are not a JSON object."))
    delay = field_value(fields, "delay").strip() or "0"
    seconds = parse_number(delay, _MAX_DELAY_SECONDS)
    if seconds is None:
        raise ValidationError(
            _("The delay is not a number of seconds: {delay}").format(delay=delay)
        )
    return {"body": body, "headers": headers, "delay": timedelta(seconds=seconds)}


def _describe_push(queue: Queue, fields: Fields) -> Sequence[str]:
    message = _test_message(fields)
    size = len(EncodedBody.of(message["body"]).text.encode())
    text = ngettext(
        "A message of {size:,} byte will be pushed to {queue}.",
        "A message of {size:,} bytes will be pushed to {queue}.",
        size,
    )
    sentences = [text.format(size=size, queue=queue)]
    if message["delay"]:
        sentences.append(_("It will be available after {delay}.").format(delay=message["delay"]))
    sentences.append(_("A consumer will process it like any other message."))
    return [*sentences, _readers_text(queue.name)]


def _push(queue: Queue, fields: Fields) -> str:
    message = _test_message(fields)
    element = run(queue_calls.push(own_ident(), queue.name, **message), database())
    return _("Pushed a test message: element {id}.").format(id=element)


# Chosen elements


def _choose(queue: Queue, fields: dict[str, list[str]]) -> list[int]:
    """Return the ids of the chosen elements; also store them in ``fields`` for the confirmation."""
    if "ids" in fields:
        texts = field_value(fields, "ids").split(",")
    elif "all" in fields:
        search = field_value(fields, "search").strip()
        with_bodies = bool(search) and field_value(fields, MAY_SEE_BODIES) == "yes"
        found = peek(queue.name, search, limit=MAX_SEARCHED, with_bodies=with_bodies)
        texts = [str(element.id) for element in found]
    else:
        texts = fields.get("element", [])
    ids = [key for text in texts if (key := parse_number(text, MAX_ID)) is not None]
    if len(ids) < len(texts):
        raise ValidationError(_("The chosen elements are not valid."))
    if not ids:
        raise ValidationError(_("No element was chosen. Choose elements in the list first."))
    for name in ("element", "all"):
        fields.pop(name, None)
    fields["ids"] = [",".join(texts)]
    return ids


def _destination(queue: Queue, fields: Fields) -> str:
    name = field_value(fields, "to_queue").strip()
    if not is_name(name) or name.endswith("*"):
        raise ValidationError(_("Name the queue to which the elements move."))
    if name == queue.name:
        raise ValidationError(
            _("Name another queue: the elements are in {queue}.").format(queue=queue)
        )
    return name


def _describe_delete(queue: Queue, fields: Fields) -> Sequence[str]:
    elements = _elements_text(len(_choose(queue, fields)))
    text = _("{elements} of {queue} will be permanently deleted.")
    return text.format(elements=elements, queue=queue), _("Reserved elements stay.")


def _delete(queue: Queue, fields: Fields) -> str:
    ids = _choose(queue, fields)
    removed = run(queue_calls.remove_elements(own_ident(), queue.name, ids), database())
    return _summary(_("Deleted"), removed, ids)


def _describe_move(queue: Queue, fields: Fields) -> Sequence[str]:
    return _describe_destinations(queue, {_destination(queue, fields): _choose(queue, fields)})


def _move(queue: Queue, fields: Fields) -> str:
    name, ids = _destination(queue, fields), _choose(queue, fields)
    moved = run(queue_calls.move_elements(own_ident(), queue.name, name, ids), database())
    return _summary(_("Moved to {queue}").format(queue=isolate(name)), moved, ids)


def _describe_redrive(queue: Queue, fields: Fields) -> Sequence[str]:
    ids_by_queue = _redrive_destinations(queue, fields)
    sentences = _describe_destinations(queue, ids_by_queue)
    if left := len(_choose(queue, fields)) - sum(map(len, ids_by_queue.values())):
        text = ngettext(
            "{number:,} element will stay: it is not a dead letter of a known queue.",
            "{number:,} elements will stay: they are not dead letters of a known queue.",
            left,
        )
        sentences.append(text.format(number=left))
    return sentences


def _redrive(queue: Queue, fields: Fields) -> str:
    texts = []
    for name, ids in _redrive_destinations(queue, fields).items():
        moved = run(queue_calls.move_elements(own_ident(), queue.name, name, ids), database())
        texts.append(_summary(_("Redriven to {queue}").format(queue=isolate(name)), moved, ids))
    return " ".join(texts)


def _redrive_destinations(queue: Queue, fields: Fields) -> dict[str, list[int]]:
    """Return the ids of the chosen dead letters by the queue to which they move.

    This is the posted queue, or else the queue in the header ``x-dl-from-queue``. Any sender can
    write this header, so it is ignored unless that queue has ``queue`` as its dead-letter queue.
    """
    ids = _choose(queue, fields)
    if field_value(fields, "to_queue").strip():
        return {_destination(queue, fields): ids}
    query = """
        SELECT f.name::text, e.id FROM psqlmessages_element AS e
        JOIN psqlmessages_queue AS f ON f.name = e.headers ->> 'x-dl-from-queue'
        WHERE e.id = ANY (%s) AND e.queue_id = %s AND f.dead_letter_queue = %s AND f.name <> %s
        ORDER BY f.name, e.id
    """
    ids_by_queue: dict[str, list[int]] = defaultdict(list)
    for name, element in fetch(query, [ids, queue.pk, queue.name, queue.name], database()):
        ids_by_queue[name].append(element)
    if not ids_by_queue:
        raise ValidationError(
            _("None of the chosen elements is a dead letter of a known queue. Name a queue.")
        )
    return dict(ids_by_queue)


def _describe_destinations(queue: Queue, ids_by_queue: Mapping[str, list[int]]) -> list[str]:
    sentences = []
    text = _("{elements} of {queue} will move to {to_queue}.")
    new_text = _("The queue {queue} does not exist. It will be created.")
    for name, ids in ids_by_queue.items():
        elements, to_queue = _elements_text(len(ids)), isolate(name)
        sentences.append(text.format(elements=elements, queue=queue, to_queue=to_queue))
        if not Queue.objects.using(database()).filter(name=name).exists():
            sentences.append(new_text.format(queue=to_queue))
        sentences.append(_readers_text(name))
    return [
        *sentences,
        _("Consumers get the moved elements as new elements, with no failed attempts."),
        _("Reserved elements stay."),
    ]


def _summary(verb: str, number: int, ids: Sequence[int]) -> str:
    text = f"{verb}: {_elements_text(number)}."
    if number < len(ids):
        rest = _elements_text(len(ids) - number)
        text += " " + _("Not changed: {rest}, reserved or taken in the meantime.").format(rest=rest)
    return text


# Actions on chosen elements also need VIEW_ELEMENTS: they say how many elements match a search.
ACTIONS: Final[Mapping[str, Action[Queue]]] = {
    "pause": Action(gettext_lazy("Pause"), (_CHANGE_QUEUE,), _describe_pause, _pause),
    "resume": Action(gettext_lazy("Resume"), (_CHANGE_QUEUE,), _describe_resume, _resume),
    "drain": Action(
        gettext_lazy("Drain"), (_DELETE_ELEMENTS,), _describe_drain, _drain, is_destructive=True
    ),
    "push": Action(
        gettext_lazy("Push a test message"), (SEND_TEST_MESSAGES,), _describe_push, _push
    ),
    "delete": Action(
        gettext_lazy("Delete elements"),
        (VIEW_ELEMENTS, _DELETE_ELEMENTS),
        _describe_delete,
        _delete,
        is_destructive=True,
    ),
    "move": Action(
        gettext_lazy("Move elements"), (VIEW_ELEMENTS, _CHANGE_ELEMENTS), _describe_move, _move
    ),
    "redrive": Action(
        gettext_lazy("Redrive dead letters"),
        (VIEW_ELEMENTS, _CHANGE_ELEMENTS),
        _describe_redrive,
        _redrive,
    ),
}
