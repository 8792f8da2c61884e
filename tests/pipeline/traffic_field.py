"""Publishers, the table of traffic, and the same windows computed by SQL."""

from datetime import datetime, timedelta
from itertools import product
from typing import Any

from tests.pipeline.processes import QUICK_JAVA
from tests.sql.conftest import World

Windows = dict[tuple[str, str, int, datetime], Any]

QUICK = f"spark.driver.extraJavaOptions={QUICK_JAVA}"
JOB = ("psqlmessages", "pipeline", "traffic", "--master", "local[2]", "--conf", QUICK)
TOPICS = ("ORDERS", "PARCELS", "BILLS")
SENDERS = ("SHOP", "STORE")
BY_SQL = """
    SELECT s.topic, s.sender, w.seconds,
           date_bin(make_interval(secs => w.seconds), s.published_at, 'epoch'::timestamptz),
           count(*), sum(octet_length(s.body)),
           percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY octet_length(s.body))
    FROM messages.stored AS s CROSS JOIN (VALUES (10), (60), (3600)) AS w (seconds)
    GROUP BY 1, 2, 3, 4
"""
WRITTEN = """
    SELECT topic, sender, window_seconds, starts_at, count, bytes,
           ARRAY[size_p50, size_p95, size_p99]
    FROM psqlmessages_traffic
"""
PUBLISH = """
    SELECT messages.publish_many(%s, %s, ARRAY(
        SELECT repeat('é', floor(random() * 1000)::int) FROM generate_series(1, %s)
    ))
"""


class TrafficField:
    """Publishers of some topics with stored messages, and the windows of these."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.owner = world.owner
        for sender, topic in product(SENDERS, TOPICS):
            world.rule("user1", sender, "Topic", topic, "W", 10)
        world.rule(self.owner.query("SELECT session_user"), "pipeline.*", "Topic", "*", "R", 10)
        self.owner.execute("UPDATE psqlmessages_topic SET retention = 100000")
        self.owner.execute("TRUNCATE psqlmessages_traffic, psqlmessages_pipelinejob")
        self.publisher = world.program("user1")

    def publish(self, number: int, topic: str = "ORDERS", sender: str = "SHOP") -> None:
        self.publisher.execute(PUBLISH, (sender, topic, number))

    def publish_everywhere(self, number: int) -> None:
        for topic, sender in product(TOPICS, SENDERS):
            self.publish(number, topic, sender)

    def spread(self, seconds: int) -> None:
        self._change("SET published_at = published_at - %s * random()", timedelta(seconds=seconds))

    def date(self, moment: datetime, the_last: int) -> None:
        last = f"SELECT id FROM messages.stored ORDER BY id DESC LIMIT {the_last}"
        self._change(f"SET published_at = %s WHERE id IN ({last})", moment)

    def _change(self, how: str, *arguments: object) -> None:
        self.owner.execute(f"UPDATE psqlmessages_streammessage {how}", arguments)

    def expected(self) -> Windows:
        return _by_key(self.owner.execute(BY_SQL).fetchall())

    def written(self) -> Windows:
        return _by_key(self.owner.execute(WRITTEN).fetchall())

    def job(self, *columns: str) -> Any:
        return self.owner.execute(
            f"SELECT {', '.join(columns)} FROM psqlmessages_pipelinejob WHERE name = 'traffic'"
        ).fetchone()


def _by_key(rows: list[tuple[Any, ...]]) -> Windows:
    return {row[:4]: (row[4], int(row[5]), [round(share, 6) for share in row[6]]) for row in rows}
