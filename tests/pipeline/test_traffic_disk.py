"""Traffic on a full disk: the job says so and ends, and afterwards each window is that of SQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.django.processes import manage
from tests.own_server import own_server
from tests.pipeline.traffic_field import JOB, TrafficField
from tests.reliability.counts import counted
from tests.reliability.disk import disk, move_tables
from tests.reliability.test_disk import FAULT, MEGABYTES, SETTINGS
from tests.servers import SERVER
from tests.sql.conftest import World


@pytest.mark.slow  # a PostgreSQL is made, and Spark is started twice
@pytest.mark.timeout(1500)
def test_the_job_of_traffic_says_so_and_goes_on_when_there_is_room(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    binaries = pytestconfig.stash[SERVER].binaries
    with (
        own_server(tmp_path, binaries, settings=SETTINGS) as own,
        disk(own.server.home.folder / "small", MEGABYTES) as small,
    ):
        move_tables(own, small)
        field = TrafficField(World(own))
        field.publish_everywhere(300)
        field.spread(3_600)
        arguments = (*JOB, "--checkpoint", str(tmp_path / "checkpoint"), "--once")
        small.fill()
        refused = manage(own, *arguments, timeout=600)
        written_meanwhile = len(field.written())
        small.clear()
        done = manage(own, *arguments, timeout=600)
        written, expected = field.written(), field.expected()
        field.world.close()
    counted(
        FAULT, "the job of traffic, and the same once more", windows=len(expected),
        unlike_those_of_sql=sum(
            written.get(key) != expected.get(key) for key in written.keys() | expected.keys()
        ),
    )  # fmt: skip
    assert refused.returncode != 0
    assert "No space left on device" in refused.stderr
    assert written_meanwhile == 0
    assert done.returncode == 0, done.stderr
    assert written == expected
