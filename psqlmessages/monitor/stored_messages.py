"""Page of the stored messages of a stream, from a time on, with search in senders and bodies."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, Final, NamedTuple

from django.core.exceptions import BadRequest, ValidationError
from django.db import DatabaseError, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.http import urlencode
from django.utils.timezone import get_current_timezone_name
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from psqlmessages.models import Topic
from psqlmessages.models.rules import database
from psqlmessages.monitor.access import VIEW_BODIES
from psqlmessages.monitor.actions import parse_time
from psqlmessages.monitor.listing import PAGE_SIZE, check_parameters, limit_query_time, parse_search
from psqlmessages.monitor.names import object_url
from psqlmessages.monitor.stream_status import position_at
from psqlmessages.monitor.views import common_context, require_monitor_access, require_name
from psqlmessages.orm import fetch
from psqlmessages.wire import MAX_ID, MalformedText, parse_number, parse_strict_json

# A search reads at most this many messages.
MAX_SEARCHED: Final = 10_000
_SHOWN_CHARACTERS: Final = 2000
# A search for a field of JSON bodies, such as $.order.id = 42; json_path.js reads it alike.
_STEP: Final = r"\.([^\s.\[\]()=!<>?*\"]+)|\[([0-9]{1,9})\]"
_FIELD_SEARCH: Final = re.compile(rf"\$((?:{_STEP})+)(?:\s*==?\s*(.+))?", re.DOTALL)

# The index of the primary key, which begins with topic and id, finds the first message.
_MESSAGES: Final = """
    SELECT m.id, m.sender, m.published_at, m.enc, octet_length(m.payload),
        CASE WHEN %(with_bodies)s THEN left(m.payload, %(shown)s) END
    FROM (
        SELECT * FROM psqlmessages_streammessage AS s
        WHERE s.topic_id = %(topic)s AND s.id > %(after)s ORDER BY s.id LIMIT %(searched)s
    ) AS m
    WHERE CASE
        WHEN %(path)s::text IS NOT NULL THEN
            %(with_bodies)s
            AND messages._has_json_field(m.payload, %(path)s::jsonpath, %(variables)s)
        ELSE %(search)s = '' OR strpos(lower(m.sender), lower(%(search)s)) > 0
            OR (%(with_bodies)s AND strpos(lower(m.payload), lower(%(search)s)) > 0)
        END
    ORDER BY m.id LIMIT %(limit)s
"""
# Finds the last messages before an id, up to one page, and returns the position before the first
# of them; null if no message has a lower id.
_PREVIOUS_POSITION: Final = """
    SELECT min(m.id) - 1 FROM (
        SELECT s.id FROM psqlmessages_streammessage AS s
        WHERE s.topic_id = %s AND s.id < %s ORDER BY s.id DESC LIMIT %s
    ) AS m
"""


class StoredMessage(NamedTuple):
    """A message as the page shows it: with the beginning of its body, if the user may see it."""

    id: int
    sender: str
    published_at: Any
    enc: str | None
    size: int
    body: str | None


@require_safe
@require_monitor_access
def stored_messages(request: HttpRequest) -> HttpResponse:
    """Show a page of messages: those ``after`` an id, or from a ``time`` on.

    Without either, show the last messages, or the first matches of a ``search``.
    """
    check_parameters(request, ["topic", "time", "after", "search"])
    name = require_name(request.GET.get("topic", ""))
    topic = Topic.objects.using(database()).filter(name=name).first()
    if topic is None:
        raise Http404("There is no topic with this name.")
    search = parse_search(request)
    with_bodies = request.user.has_perm(VIEW_BODIES)
    context: dict[str, Any] = {
        **common_context(request), "topic": name, "topic_url": object_url("topic", name),
        "time": request.GET.get("time", ""), "search": search, "zone": get_current_timezone_name(),
        "may_see_bodies": with_bodies, "bodies_permission": VIEW_BODIES,
        "max_searched": MAX_SEARCHED,
    }  # fmt: skip
    try:
        with transaction.atomic(using=database()):
            limit_query_time()
            after = _position_before_page(request, topic, search)
            messages = _read(topic, after, search, with_bodies=with_bodies)
            previous = _previous_position(topic, messages[0].id if messages else after + 1)
    except ValidationError as error:
        context["errors"] = error.messages
    except DatabaseError as error:
        context["errors"] = [_("The messages cannot be read."), str(error).strip()]
    else:
        context["messages_"] = messages[:PAGE_SIZE]
        if previous is not None and not search:
            context["earlier"] = _query(name, previous)
        if len(messages) > PAGE_SIZE:
            context["later"] = _query(name, messages[PAGE_SIZE - 1].id, search)
    status = 400 if "errors" in context else 200
    return render(request, "psqlmessages/monitor/stored.html", context, status=status)


def _position_before_page(request: HttpRequest, topic: Topic, search: str) -> int:
    """Return the id after which the requested page begins.

    Without ``after`` and ``time``, a search begins at 0; otherwise the last page is shown.
    """
    if text := request.GET.get("after"):
        if (after := parse_number(text, MAX_ID)) is None:
            raise BadRequest("The parameter 'after' is not an id.")
        return after
    if text := request.GET.get("time"):
        return position_at(topic.name, parse_time(text))
    return 0 if search else _previous_position(topic, MAX_ID) or 0


def _read(topic: Topic, after: int, search: str, *, with_bodies: bool) -> list[StoredMessage]:
    """Read the messages of a page; one more shows that there is a next page."""
    path, variables = _parse_field_search(search)
    values = {
        "topic": topic.pk,
        "after": after,
        "search": search,
        "path": path,
        "variables": variables,
        "searched": MAX_SEARCHED if search else PAGE_SIZE + 1,
        "with_bodies": with_bodies,
        "shown": _SHOWN_CHARACTERS,
        "limit": PAGE_SIZE + 1,
    }
    return [StoredMessage(*row) for row in fetch(_MESSAGES, values, database())]


def _parse_field_search(search: str) -> tuple[str | None, str]:
    """Return a search for a JSON field as an SQL/JSON path and its variables, an object in JSON.

    The path is None if the search is for other text.
    Raises ValidationError if the search begins like a path and is none. The path has only quoted
    names and numbers, so that the searched text cannot change what the path does.
    """
    if not search.startswith(("$.", "$[")):
        return None, "{}"
    if not (found := _FIELD_SEARCH.fullmatch(search)):
        raise ValidationError(
            _("Not a JSON path: %(text)s. Write $.order.id or $.items[0].id = 42.")
            % {"text": search}
        )
    steps, text = found[1], found[4]
    path = "$" + "".join(
        f".{json.dumps(name)}" if name else f"[{index}]" for name, index in re.findall(_STEP, steps)
    )
    if text is None:
        return path, "{}"
    value = in_quotes = json.dumps(text)
    with suppress(MalformedText):
        parse_strict_json(text)
        # As it was typed: PostgreSQL compares numbers of any length exactly.
        value = text
    # 42 finds the number and the text, "42" only the text.
    return (
        f"{path} ? (@ == $value || @ == $text)",
        f'{{"value": {value}, "text": {in_quotes}}}',
    )


def _previous_position(topic: Topic, before: int) -> int | None:
    """Return the position before the page that ends before an id; None if this page is empty."""
    ((position,),) = fetch(_PREVIOUS_POSITION, [topic.pk, before, PAGE_SIZE], database())
    return None if position is None else int(position)


def _query(topic: str, after: int, search: str = "") -> str:
    return "?" + urlencode({"topic": topic, "after": after, "search": search})
