"""An upgrade under everything that works: functions are replaced, removed and made again."""

from time import monotonic

import pytest
import pytest_django
from django.db import transaction

from psqlmessages import install
from tests.conftest import TestedServer
from tests.reliability.counts import counted, size
from tests.reliability.crowd import Crowd, crowd
from tests.reliability.migrating import ALIAS, LATEST, migrate, owners_database
from tests.reliability.traffic import LONG_ONES, Traffic

FAULT = "an upgrade"
ALL = "36 nodes, an exchange, `run` and a site"


def replace_functions(traffic: Traffic, own: TestedServer) -> None:
    """Install again and again: no call fails, none is lost."""
    rounds, began = size(3, 20), monotonic()
    with owners_database(own) as database:
        for _ in range(rounds):
            with transaction.atomic(using=ALIAS):
                install.install(database)
            traffic.go_on(5)
    counted(
        FAULT, f"functions replaced under {ALL}",
        installations=rounds, calls=traffic.calls, refused=traffic.refused.total(),
        longest_wait_seconds=traffic.longest_seconds, seconds=monotonic() - began,
    )  # fmt: skip
    assert not traffic.refused
    traffic.stop(LONG_ONES)


def remove_functions(traffic: Traffic, crowd: Crowd) -> None:
    """Remove and make again: callers are told meanwhile, and all go on."""
    rounds = size(1, 5)
    with owners_database(crowd.server):
        for _ in range(rounds):
            migrate("0002_queues")
            migrate(LATEST)
            # The exchange and the user's identity went with their tables.
            crowd.write_definitions()
            traffic.go_on(5)
    counted(
        FAULT, f"functions removed and made again under {ALL}",
        removals=rounds, calls=traffic.calls, refused=traffic.refused.total(),
    )  # fmt: skip


def deadlocks(own: TestedServer) -> int:
    """How many PostgreSQL has found."""
    return own.server.home.log.read_text().count("deadlock detected")


@pytest.mark.timeout(300)
@pytest.mark.slow  # a server and eight processes start
def test_all_go_on_while_functions_are_replaced_removed_and_made_again(
    own: TestedServer,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    with django_db_blocker.unblock(), crowd(own, tmp_path_factory.mktemp("site")) as made:
        made.exercise("before")
        traffic = Traffic(made)
        try:
            traffic.open()
            traffic.go_on(5)
            replace_functions(traffic, own)
            remove_functions(traffic, made)
            traffic.read_to_the_end()
            missed, is_told = traffic.lost["published"], traffic.is_told
            traffic.stop(*traffic.flows.keys() - {"published"})
            lost, doubled = traffic.lost | {"published": 0}, traffic.doubled
            counted(
                FAULT, "functions replaced, removed and made again: what came of all",
                calls=traffic.calls, lost=sum(lost.values()), doubled=sum(doubled.values()),
                deadlocks=deadlocks(own), missed_in_the_stream_untold=0 if is_told else missed,
            )  # fmt: skip
        finally:
            traffic.close()
        assert not traffic.failures
        assert not any(lost.values()), lost
        assert not any(doubled.values()), doubled
        assert is_told or not missed
        assert deadlocks(own) == 0
        made.exercise("after")
