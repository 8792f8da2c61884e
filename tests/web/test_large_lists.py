"""Pages with 100,000 topics, 10,000 nodes, 10,000 rules and 5,000 queues stay short."""

from time import perf_counter

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from tests.reliability.counts import report
from tests.sql.conftest import World

FILL = """
    INSERT INTO psqlmessages_topic (name)
    SELECT 'T' || lpad(n::text, 6, '0') FROM generate_series(1, 100000) AS n;

    INSERT INTO psqlmessages_client (session_id, ident, role)
    SELECT s.id, 'N' || lpad(n::text, 5, '0'), s.role
    FROM psqlmessages_session AS s, generate_series(1, 10000) AS n WHERE s.role = 'user1';

    INSERT INTO psqlmessages_queue (name, channel)
    SELECT 'Q' || lpad(n::text, 4, '0'), 'q' || n FROM generate_series(1, 5000) AS n;

    INSERT INTO messages.auth (role, ident, type, dest, mode, timeout)
    SELECT 'user1', 'N' || lpad(n::text, 5, '0'), 'Topic', 'T000001', 'W', 60
    FROM generate_series(1, 10000) AS n;

    ANALYZE psqlmessages_topic, psqlmessages_client, psqlmessages_queue, psqlmessages_auth;
"""
# Each page, and a name that it must show.
PAGES = {
    "/monitor/": "", "/monitor/streams/": "",
    "/monitor/queues/": "Q0001", "/monitor/queues/?q=Q4999": "Q4999",
    "/monitor/nodes/": "N00001", "/monitor/nodes/?q=N09999": "N09999",
    "/monitor/nodes/N09999/": "N09999", "/monitor/queues/Q4999/": "Q4999",
    "/monitor/topics/T099999/": "T099999",
    "/admin/psqlmessages/topic/": "T000001", "/admin/psqlmessages/topic/?q=T099999": "T099999",
    "/admin/psqlmessages/client/": "N00001", "/admin/psqlmessages/client/?q=N09999": "N09999",
    "/admin/psqlmessages/queue/": "Q0001", "/admin/psqlmessages/queue/?q=Q4999": "Q4999",
    "/admin/psqlmessages/auth/": "N00001", "/admin/psqlmessages/auth/?q=N09999": "N09999",
}  # fmt: skip


@pytest.mark.nightly  # fills large tables
@pytest.mark.django_db(transaction=True)
def test_pages_stay_short(world: World):
    world.rules("user1 N00000 Topic T R 60")
    world.node("user1", "N00000")
    world.owner.connection.execute(FILL)
    client = Client()
    client.force_login(User.objects.create_superuser("chief"))
    found: dict[str, tuple[float, int, int]] = {}
    for page, name in PAGES.items():
        assert name in client.get(page).content.decode()  # the first time, templates are compiled
        with CaptureQueriesContext(connection) as queries:
            begin = perf_counter()
            answer = client.get(page)
            found[page] = perf_counter() - begin, len(answer.content), len(queries)
    report(
        "100,000 topics, 10,000 nodes and rules, 5,000 queues", f"{len(PAGES)} pages and lists",
        slowest_milliseconds=round(1000 * max(seconds for seconds, *_ in found.values())),
        largest_bytes=max(size for _, size, _ in found.values()),
    )  # fmt: skip
    assert {page: each for page, each in found.items() if each[1] > 150_000 or each[2] > 10} == {}
