"""`make run`: its output, its files, and its end."""

import os
import re
import signal
import socket
import stat
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from django.contrib.auth.models import User

from project import serve
from project.example import create_example_data
from project.postgres.ports import free_port
from psqlmessages.models import Auth, Exchange, WebIdentity
from tests.conftest import TestedServer
from tests.pipeline.processes import until
from tests.project.example import Example, copy_project, own_database
from tests.sql.conftest import World, world

__all__ = ["world"]


@pytest.fixture
def example(tmp_path: Path, server: TestedServer) -> Iterator[Example]:
    copy, port = copy_project(tmp_path), str(free_port())
    with own_database(server, "example") as url, closing(Example(copy, url, PORT=port)) as example:
        example.until("Press Ctrl-C to stop.")
        yield example


COPIES = """
    SELECT count(DISTINCT (exchange_id, destination)) = 4 FROM psqlmessages_exchangecount
    WHERE outcome = 'to' AND count > 0
"""


@pytest.mark.timeout(400)
def test_it_shows_all_and_ends_by_itself_at_ctrl_c(example: Example):
    assert len(re.findall(r"^  \d\. ", example.shown, re.MULTILINE)) == 7
    assert "steps went as expected" in example.shown
    assert example.field("user") == "admin"
    kept = example.folder / ".admin_password"
    assert example.field("password") == kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    address = f"{example.field('address')}healthz"
    with urllib.request.urlopen(address, timeout=60) as response:  # noqa: S310
        assert response.status == 200
    assert len(example.children()) == 5
    with psycopg.connect(example.database_url, autocommit=True) as owner:
        until(lambda: owner.execute(COPIES).fetchone() == (True,))
        os.kill(example.pid_of("exchange"), signal.SIGKILL)
        example.until("The exchange worker has ended with exit code -9; the pages still work.")
        assert (example.press_ctrl_c(), example.children()) == (0, []), example.shown
        assert "is killed" not in example.shown
        assert "Traceback" not in example.shown
        rules = "SELECT FROM messages.auth WHERE role LIKE 'psqlmessages_demo_'"
        assert owner.execute(rules).fetchone() is None


def test_the_terminal_of_another_session_is_not_taken(monkeypatch):
    screen, terminal = os.openpty()
    with os.fdopen(screen), os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with serve.take_terminal():
            pass


def test_the_password_is_the_same_again_until_it_is_changed(transactional_db: None, tmp_path: Path):
    file = tmp_path / "password"
    password = create_example_data(file)
    assert password
    assert create_example_data(file) == password == file.read_text()
    administrator = User.objects.get()
    assert administrator.is_superuser
    administrator.set_password("another one")
    administrator.save()
    assert create_example_data(file) is None


def test_it_prepares_its_objects_once(world: World, transactional_db: None, tmp_path: Path):
    for _ in range(2):
        create_example_data(tmp_path / "password")
    assert sorted(map(" ".join, Auth.objects.values_list("ident", "dest", "mode"))) == [
        "chat/* DEMO.CHAT RW",
        "demo.desk demo.audit R", "demo.desk demo.eu R", "demo.shop demo.orders W",
        "example * A", "example.monitor.* * O",
        "exchange.demo.again demo.orders W", "exchange.demo.again demo.slow R",
        "exchange.demo.sort demo.audit W", "exchange.demo.sort demo.eu W",
        "exchange.demo.sort demo.orders R", "exchange.demo.sort demo.slow W",
        "pipeline.* * R",
    ]  # fmt: skip
    assert Exchange.objects.count() == 2
    (identity,) = WebIdentity.objects.all()
    assert identity.ident == "chat/admin/*"


def test_it_takes_another_port_if_8000_is_busy_and_none_was_given(monkeypatch, capsys):
    monkeypatch.delenv("PORT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(serve, "DEFAULT_PORT", taken)
        with serve._listening_socket() as listening:
            assert listening.getsockname()[1] != taken
        assert capsys.readouterr().out.startswith(f"Port {taken} is in use")
        for port in (str(taken), "many", "-1", "70000"):
            monkeypatch.setenv("PORT", port)
            with pytest.raises(serve.ServeError, match=f"Cannot serve on PORT={port}: "):
                serve._listening_socket()
