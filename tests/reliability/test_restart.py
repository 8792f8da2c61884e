"""PostgreSQL restarts under everything that talks to it: all come back by themselves, once each."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from time import monotonic

import pytest
import pytest_django

from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.reliability.crowd import ASYNC, SYNC, WEB, Crowd, crowd
from tests.reliability.restarts import FAST, WAYS, go_away

FAULT = "PostgreSQL restarts"
NODES = [*SYNC, *ASYNC, *WEB]
# A node says that it is lost, that it cannot return, that it is back; and again each ten seconds.
RECORDS_EACH, RECORDS_EACH_TEN_SECONDS = 3, 2


@pytest.fixture(scope="module")
def gathered(
    own: TestedServer,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> Iterator[Crowd]:
    """The crowd, at work on the module's own server."""
    with django_db_blocker.unblock(), crowd(own, tmp_path_factory.mktemp("site")) as made:
        made.exercise("before")
        yield made


@pytest.mark.timeout(300)
@pytest.mark.nightly  # 30 nodes and 5 processes; every day test_restart_flows.py
@pytest.mark.parametrize("way", WAYS)
def test_all_come_back_by_themselves_once_each(
    gathered: Crowd, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    away(gathered, way, 0, caplog)


@pytest.mark.timeout(300)
@pytest.mark.nightly  # a server is away for a while
def test_after_a_long_absence_all_come_back_and_the_log_stays_short(
    gathered: Crowd, caplog: pytest.LogCaptureFixture
) -> None:
    away(gathered, FAST, size(10, 30), caplog)


def away(crowd: Crowd, way: str, seconds: int, caplog: pytest.LogCaptureFixture) -> None:
    """Let the server go away and come back; what must hold then."""
    caplog.set_level(logging.INFO, "psqlmessages")
    before, lines = crowd.ears.counts("reconnected"), crowd.lines()
    server = crowd.server.server
    go_away(server, way)
    if seconds:
        threading.Event().wait(seconds)
        assert crowd.post("refused") == 503
        assert crowd.site.get("/healthz")[0] == 503
    server.start()
    came = monotonic()
    crowd.wait_for_registration()
    took = monotonic() - came
    crowd.exercise(f"{way} {seconds}")
    returns = Counter(crowd.ears.counts("reconnected")) - Counter(before)
    loggers = Counter(record.name for record in caplog.records)
    said = crowd.lines() - lines
    what = f"30 nodes and 5 processes, {way}" + (f", {seconds} s away" if seconds else "")
    counted(
        FAULT,
        what,
        back_after_seconds=took,
        log_records=loggers.total(),
        log_lines_of_processes=said.total(),
    )
    print(dict(loggers), dict(said))
    assert returns == dict.fromkeys(NODES, 1)
    each = RECORDS_EACH + RECORDS_EACH_TEN_SECONDS * (seconds // 10)
    assert loggers.total() <= each * len(NODES), caplog.text
    assert said.total() <= 10 * each, [process.said for process in crowd.processes.values()]
