"""Pages of the topic list: their filter, sort order and SQL statement. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from psqlmessages.models.names import NAME_CHARACTERS
from psqlmessages.monitor.history import TopicHistory

PAGE_SIZE: Final = 100
_MAX_PAGE: Final = 10_000

_MEMBERS: Final = """(
    SELECT count(*) FROM psqlmessages_membership AS m WHERE m.topic_id = t.id AND m.kind = '{}'
)"""
# The SQL expression of each sort column. Topics with equal values are sorted by
# their number of messages in the last ten minutes.
_COLUMNS: Final = {
    "topic": "t.name",
    "senders": _MEMBERS.format("notify"),
    "listeners": _MEMBERS.format("listen"),
    "rate": "coalesce(s.recent_messages, 0)",
    "size_rate": "coalesce(s.recent_bytes, 0)",
    "last": "coalesce(s.last_at, 0)",
}
DEFAULT_SORT: Final = "-rate"


class TopicQuery(NamedTuple):
    """A page of the list; ``search`` is a text to find in names of topics and their nodes.

    ``sort`` is a column; a ``-`` before it sorts descending. ``page`` is a number from 1.
    """

    search: str = ""
    sort: str = DEFAULT_SORT
    page: int = 1

    @property
    def sql(self) -> str:
        """The statement that reads the names on the page, each with the number of all matches."""
        column = _COLUMNS[self.sort.removeprefix("-")]
        direction = "DESC" if self.sort.startswith("-") else "ASC"
        return f"""
            WITH seen AS MATERIALIZED (
                SELECT * FROM unnest(
                    %(names)s::text[], %(recent_messages)s::bigint[], %(recent_bytes)s::bigint[],
                    %(messages)s::bigint[], %(last_at)s::float8[]
                ) AS u (name, recent_messages, recent_bytes, messages, last_at)
            ), found AS (
                SELECT t.id FROM psqlmessages_topic AS t
                WHERE strpos(lower(t.name), lower(%(search)s)) > 0
                UNION
                SELECT m.topic_id FROM psqlmessages_client AS c
                JOIN psqlmessages_membership AS m ON m.client_id = c.id
                WHERE m.kind IN ('notify', 'listen')
                    AND strpos(lower(c.ident), lower(%(search)s)) > 0
            )
            SELECT t.name::text, count(*) OVER ()
            FROM psqlmessages_topic AS t LEFT JOIN seen AS s ON s.name = t.name
            WHERE %(search)s = '' OR t.id IN (SELECT f.id FROM found AS f)
            ORDER BY {column} {direction}, coalesce(s.messages, 0) DESC, t.name
            LIMIT {PAGE_SIZE} OFFSET %(offset)s
        """  # noqa: S608 - built from constants

    def parameters(self, topics: Iterable[TopicHistory], now: int) -> dict[str, Any]:
        """Return the parameters of ``sql``: the counts of ``topics`` at the Unix time ``now``."""
        seen = [topic for topic in topics if topic.last_at]
        totals = [topic.total_for_rate(now) for topic in seen]
        return {
            "names": [topic.name for topic in seen],
            "recent_messages": [total.messages for total in totals],
            "recent_bytes": [total.size for total in totals],
            "messages": [topic.history_count(now) for topic in seen],
            "last_at": [topic.last_at for topic in seen],
            "search": self.search,
            "offset": (self.page - 1) * PAGE_SIZE,
        }


class TopicPage(NamedTuple):
    """The topics on a page in their order, and the number of topics on all pages."""

    names: tuple[str, ...] = ()
    total: int = 0


def parse_query(values: Mapping[Any, Any]) -> TopicQuery | None:
    """Parse ``q``, ``sort`` and ``page`` of a WebSocket request; None if one is malformed."""
    search, sort = values.get("q", ""), values.get("sort", DEFAULT_SORT)
    page = values.get("page", 1)
    if not (isinstance(search, str) and isinstance(sort, str) and type(page) is int):
        return None
    is_valid = (
        len(search) <= NAME_CHARACTERS
        and "\0" not in search
        and search.encode(errors="replace").decode() == search
        and sort.removeprefix("-") in _COLUMNS
        and 1 <= page <= _MAX_PAGE
    )
    return TopicQuery(search.strip(), sort, page) if is_valid else None
