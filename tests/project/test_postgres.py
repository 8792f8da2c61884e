"""The starter of the embedded PostgreSQL: whatever happened before, `start` ends with a server."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from project.postgres import Server, ServerError
from project.postgres import __main__ as command_module
from project.postgres import home as home_module
from project.serve import describe_data
from tests.servers import SERVER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shared(pytestconfig) -> Iterator[Server]:
    top = Path(tempfile.mkdtemp(prefix="starter-"))
    top.chmod(0o711)
    server = Server(top / "shared", pytestconfig.stash[SERVER].binaries)
    yield server
    server.stop("immediate")
    server.home.remove()
    shutil.rmtree(top)


@pytest.fixture
def server(shared: Server) -> Server:
    return shared.start()


def command(server: Server, *arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "project.postgres", *arguments]
    line += ["--data", str(server.home.requested_folder), "--bin", str(server.binaries)]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, text=True, stdout=pipe, stderr=subprocess.STDOUT)


def one(server: Server, query: str, user: str = "postgres") -> object:
    with psycopg.connect(server.url("psqlmessages", user)) as connection:
        return connection.execute(query).fetchone()[0]


def pid_of(server: Server) -> int:
    return server.postmaster.pid


def crash(server: Server) -> int:
    pid = pid_of(server)
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    return pid


SHOWN = (
    ("listen_addresses", "127.0.0.1"), ("max_connections", "200"),
    ("fsync", "on"), ("synchronous_commit", "on"),
)  # fmt: skip
RIGHTS = "SELECT row(rolsuper, rolcreatedb, rolcreaterole, rolreplication)::text FROM pg_roles"
OWNER = "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = 'psqlmessages'"


def test_the_commands_start_and_stop_it_and_report_its_state(server: Server):
    server.stop()
    url = command(server, "url").communicate(timeout=110)[0].strip()
    with psycopg.connect(url) as connection:
        assert connection.info.dbname == "psqlmessages"
    for action, said, code in (
        ("status", "running", 0), ("stop", "stopped", 0), ("status", "not", 1), ("stop", "was", 0)
    ):  # fmt: skip
        process = command(server, action)
        assert process.communicate(timeout=110)[0].split()[0] == said
        assert process.returncode == code


def test_a_running_server_is_kept_and_is_safe(server: Server, monkeypatch):
    pid = pid_of(server)
    server.start()
    assert pid_of(server) == pid
    assert one(server, "SHOW data_directory") == str(server.home.data)
    assert [(name, one(server, f"SHOW {name}")) for name, _ in SHOWN] == [*SHOWN]
    # Ctrl-C in our terminal does not reach the server.
    assert os.getsid(pid) != os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)
    assert one(server, f"{RIGHTS} WHERE rolname = 'psqlmessages'") == "(f,t,t,f)"
    assert one(server, OWNER, "psqlmessages") == "psqlmessages"
    for place in ({}, {"host": str(server.home.socket_folder()), "port": server.home.port}):
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(server.url("postgres", "postgres", "guessed"), **place)
    assert server.home.passwords.path.stat().st_mode & 0o777 == 0o600
    assert server.home.log.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(home_module, "MAX_LOG_BYTES", 10)
    before = server.home.log.read_text()
    server.start()
    assert server.home.log.with_name("server.log.1").read_text() == before
    assert server.home.log.stat().st_size < len(before)


def test_a_killed_postmaster_is_started_again_on_its_port_beside_a_busy_backend(server: Server):
    port = server.home.port
    with closing(psycopg.connect(server.superuser_url(), autocommit=True)) as connection:
        notices: list[object] = []
        connection.pgconn.notice_handler = notices.append
        connection.pgconn.send_query(b"DO $$ BEGIN RAISE NOTICE 'busy'; LOOP END LOOP; END $$")
        while not notices:
            assert select.select([connection.pgconn.socket], [], [], 60)[0]
            connection.pgconn.consume_input()
            connection.pgconn.is_busy()
        old = crash(server)
        assert not server.is_running
        server.start()
    assert pid_of(server) != old
    assert (server.home.port, one(server, "SHOW port")) == (port, str(port))


def test_data_of_an_earlier_run_are_announced(server: Server):
    created_at, second = server.home.created_at, timedelta(seconds=1)
    assert describe_data(server.home, created_at - second) == f"Data: new, in {server.home.data}"
    text = describe_data(server.home, created_at + second)
    assert f"of an earlier run, created {created_at:%Y-%m-%d %H:%M}" in text
    assert text.endswith(f"in {server.home.data}; to delete them: make clean")


def test_a_taken_port_is_exchanged_for_another(server: Server):
    server.stop()
    taken = server.home.port
    with socket.create_server(("127.0.0.1", taken)):
        server.start()
        assert server.home.port != taken
        assert one(server, "SELECT 1") == 1


def test_a_failing_start_shows_the_end_of_the_log(server: Server):
    server.stop()
    wrong = Server(server.home.requested_folder, server.binaries, {"shared_buffers": "a lot"})
    with pytest.raises(ServerError, match=r'invalid value for parameter "shared_buffers"'):
        wrong.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs servers as another user")
def test_a_fallback_folder_of_another_user_is_refused(tmp_path: Path, pytestconfig, monkeypatch):
    tmp_path.chmod(0o700)
    server = Server(tmp_path / ".postgres" / "18", pytestconfig.stash[SERVER].binaries)
    refuge = server.home.folder.parent
    refuge.mkdir(mode=0o700)
    os.chown(refuge, server.home.account.uid, -1)
    try:
        with pytest.raises(ServerError, match="belongs to another user"):
            server.start()
    finally:
        refuge.rmdir()
    # Data stay there if the project's folder is deleted: `make clean` in a new clone removes them.
    server.home.prepare()
    shutil.rmtree(tmp_path / ".postgres")
    monkeypatch.setattr(command_module, "CLUSTERS", tmp_path / ".postgres")
    assert command_module._remove_all() == 0
    assert not refuge.exists()
