"""A PgBouncer of the tests' own, in front of the test server."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent
from urllib.parse import urlsplit, urlunsplit

import psycopg

from project.postgres.ports import free_port
from tests.conftest import TestedServer, installed
from tests.django.waiting import wait_until
from tests.migrated_cluster import LOGIN_ROLES

# The configuration of the page.
PAGE = (Path(__file__).parents[2] / "docs/how-to/pgbouncer.md").read_text()
CONFIGURATION = dedent(PAGE.split("```ini\n")[1].split("```")[0])


@contextmanager
def pgbouncer(server: TestedServer, pool_mode: str, pool_size: int = 5) -> Iterator[str]:
    """Yield the address of the test database behind a PgBouncer, for the owner."""
    # Debian's package puts it where an ordinary user's PATH does not look.
    program = installed("pgbouncer", "/usr/sbin/pgbouncer")
    url = urlsplit(server.url())
    # Not under pytest's folders, which are closed to other users: it refuses to run as root.
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
    port = free_port()
    passwords = server.server.home.passwords
    roles = (*LOGIN_ROLES, server.server.owner)
    configuration = ConfigParser()
    configuration.read_string(CONFIGURATION)
    configuration["databases"] = {"*": f"host=127.0.0.1 port={url.port}"}
    configuration["pgbouncer"].update({
        "listen_port": str(port), "unix_socket_dir": "", "auth_file": f"{folder}/users.txt",
        "pool_mode": pool_mode, "default_pool_size": str(pool_size), "logfile": f"{folder}/log",
    })  # fmt: skip
    try:
        users = "".join(f'"{role}" "{passwords.get(role)}"\n' for role in roles)
        (folder / "users.txt").write_text(users)
        with (folder / "pgbouncer.ini").open("w") as file:
            configuration.write(file)
        with run(program, folder):
            netloc = url.netloc.replace(f":{url.port}", f":{port}")
            address = urlunsplit(url._replace(netloc=netloc))
            wait_until(lambda: takes_connections(address))
            yield address
    finally:
        shutil.rmtree(folder)


@contextmanager
def run(program: str, folder: Path) -> Iterator[None]:
    user = None
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody").pw_uid
        for path in (folder, *folder.iterdir()):
            os.chown(path, user, -1)
    process = subprocess.Popen([program, "--quiet", str(folder / "pgbouncer.ini")], user=user)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def takes_connections(address: str) -> bool:
    with suppress(psycopg.OperationalError):
        psycopg.connect(address).close()
        return True
    return False
