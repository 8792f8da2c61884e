"""List of topics: one page of it, with filter and sort order, read from the database. No I/O."""

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
# By name of a column: its values. Among equal values, the topics with more messages come first.
_COLUMNS: Final = {
    "topic": "t.name",
    "senders": _MEMBERS.format("notify"),
    "listeners": _MEMBERS.format("listen"),
    "rate": "coalesce(s.rate, 0)",
    "size_rate": "coalesce(s.size_rate, 0)",
    "last": "coalesce(s.last, 0)",
}
DEFAULT_SORT: Final = "-rate"


class TopicQuery(NamedTuple):
    """Which page of the list: the text to find in names of topics and nodes, the order, the page.

    ``sort``: a column, after ``-`` if its largest value is first; ``page``: from 1.
    """

    search: str = ""
    sort: str = DEFAULT_SORT
    page: int = 1

    @property
    def sql(self) -> str:
        """The statement that reads the names on the page, each with the number of all topics."""
        column = _COLUMNS[self.sort.removeprefix("-")]
        direction = "DESC" if self.sort.startswith("-") else "ASC"
        return f"""
            WITH seen AS MATERIALIZED (
                SELECT * FROM unnest(
                    %(names)s::text[], %(rates)s::float8[], %(size_rates)s::float8[],
                    %(counts)s::bigint[], %(lasts)s::float8[]
                ) AS u (name, rate, size_rate, messages, last)
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

    def parameters(self, topics: Iterable[TopicHistory], second: int) -> dict[str, Any]:
        """Return the statement's parameters. ``topics``: those with messages, for the order."""
        seen = [topic for topic in topics if topic.last_at]
        totals = [topic.total_for_rate(second) for topic in seen]
        return {
            "names": [topic.name for topic in seen],
            "rates": [total.messages for total in totals],
            "size_rates": [total.size for total in totals],
            "counts": [topic.history_count() for topic in seen],
            "lasts": [topic.last_at for topic in seen],
            "search": self.search,
            "offset": (self.page - 1) * PAGE_SIZE,
        }


class TopicPage(NamedTuple):
    """The topics on a page in their order, and the number of topics on all pages."""

    names: tuple[str, ...] = ()
    total: int = 0


def parse_query(values: Mapping[Any, Any]) -> TopicQuery | None:
    """Read the query of a page from its request; None if it is malformed."""
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
