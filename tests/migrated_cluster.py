"""A stopped cluster with our tables and the tests' roles: the servers of tests are its copies.

To create one takes seven times as long as to copy it.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import django
import psycopg
from psycopg import sql

from project.postgres import CLUSTERS, Server, ServerError
from project.postgres.home import new_password

ROOT = Path(__file__).parents[1]
LOGIN_ROLES = ("user1", "user2", "user3", "hostile")
GROUP, MEMBERS = "team", ("user3",)
# What a migrated database depends on, beside the version of Django.
SOURCES = ("psqlmessages/migrations/*.py", "psqlmessages/sql/**/*.*", "project/settings.py")


def major_version(binaries: Path) -> int:
    """Return the major version of the programs in a folder."""
    try:
        answer = subprocess.check_output([binaries / "postgres", "--version"], text=True)
    except OSError as error:
        raise ServerError(f"There is no PostgreSQL in {binaries}: {error}") from error
    version = re.search(r"\d+", answer)
    if version is None:
        raise ServerError(f"{binaries / 'postgres'} did not print its version, but {answer!r}")
    return int(version[0])


def copy_cluster(server: Server) -> None:
    """Give a server that is not running the data of the migrated cluster, unless it has them."""
    version = migrations_version()
    mark = server.home.requested_folder / "version"
    if server.home.data.exists() and mark.exists() and mark.read_text() == version:
        return
    server.stop("immediate")
    server.home.prepare()
    source = Server(CLUSTERS / f"migrated-{major_version(server.binaries)}", server.binaries)
    source.home.prepare()
    with (CLUSTERS / "migrated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        create_cluster(source, version)
        for name in ("data", "passwords"):
            target = server.home.folder / name
            subprocess.run(["rm", "-rf", target], check=True)
            subprocess.run(["cp", "-a", source.home.folder / name, target], check=True)
    mark.write_text(version)


def create_cluster(server: Server, version: str) -> None:
    """Create and migrate the cluster, unless an earlier run of the tests did."""
    mark = server.home.requested_folder / "version"
    if mark.exists() and mark.read_text() == version:
        return
    server.stop("immediate")
    server.home.remove()
    server.home.prepare()
    try:
        environment = {**os.environ, "DATABASE_URL": server.start().url()}
        migrate = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
        subprocess.run(migrate, env=environment, cwd=ROOT, check=True)
        with psycopg.connect(server.superuser_url(Server.owner), autocommit=True) as superuser:
            create_roles(superuser, server)
    finally:
        server.stop()
    mark.write_text(version)


def migrations_version() -> str:
    """Return a digest of all that decides what `migrate` makes."""
    digest = hashlib.sha256(django.__version__.encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def create_roles(superuser: psycopg.Connection, server: Server) -> None:
    """Create the roles of the tests; repair existing ones, if an earlier run was killed."""
    found = superuser.execute("SELECT rolname FROM pg_roles").fetchall()
    for role in {GROUP, *LOGIN_ROLES} - {name for (name,) in found}:
        superuser.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
    for role in LOGIN_ROLES:
        password = server.home.passwords.get(role) or new_password()
        alter = sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}")
        superuser.execute(alter.format(sql.Identifier(role), sql.Literal(password)))
        server.home.passwords.store(role, password)
        verb = "GRANT {} TO {}" if role in MEMBERS else "REVOKE {} FROM {}"
        superuser.execute(sql.SQL(verb).format(sql.Identifier(GROUP), sql.Identifier(role)))
