"""The settings and the system checks, each provoked."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from django.core import checks
from django.core.checks import registry
from django.core.checks.messages import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from pytest_django import Settings as DjangoSettings

from psqlmessages import checks as ours
from psqlmessages.checks import check_connections, check_databases, check_deployment, check_settings
from psqlmessages.conf import MIB, Settings, get_settings
from psqlmessages.orm import database_dsn
from tests.django.conftest import Changed
from tests.django.odd.settings import OnlyDefault
from tests.exchanges.conftest import namespace
from tests.sql.conftest import World


def ids(messages: list[CheckMessage]) -> list[str]:
    return [str(message.id) for message in messages]


def test_the_checks_are_registered_once_and_for_databases_only_when_asked():
    known = [*registry.registry.registered_checks, *registry.registry.deployment_checks]
    mine = [check for check in known if check.__module__ == ours.__name__]
    assert set(mine) == {check_connections, check_databases, check_deployment, check_settings}
    assert len(mine) == 4
    assert check_databases(databases=None) == check_deployment(databases=None) == []


WRONG = (
    ({"NODES": "shop", "Max": 1}, "E001", "unknown keys: Max, NODES"),
    (["NODE"], "E001", "of type list, not a dictionary"),
    ({"NODE": 5}, "E002", "must be text"),
    ({"NODE": "x" * 71}, "E002", "at most 70 characters"),
    ({"NODE": "shop*"}, "E002", "a pattern"),
    ({"MAX_BODY_BYTES": 512 * MIB + 1}, "E003", "between 8192 and 536870912"),
    ({"MAX_BODY_BYTES": True}, "E003", "must be a number"),
    ({"RELAY_FRAME_BYTES": 1023}, "E004", "between 1024 and 67108864"),
    ({"RELAY_FRAMES_PER_SECOND": 0}, "E005", "between 1 and 10000"),
    ({"RELAY_TOPICS": 0}, "E006", "between 1 and 10000"),
    ({"RELAY_SOCKETS": None}, "E007", "between 1 and 100000"),
    ({"RELAY_QUEUE_FRAMES": 9}, "E008", "between 10 and 100000"),
    ({"RELAY_QUEUE_BYTES": 1}, "E009", "between 65536 and 536870912"),
    ({"METRICS": "yes"}, "E010", "True or False"),
    ({"MAX_HOPS": 0}, "E011", "between 1 and 1000"),
    ({"TRAFFIC_DAYS_OF_TEN_SECONDS": 0}, "E012", "between 1 and 36500"),
    ({"TRAFFIC_DAYS_OF_MINUTES": 0}, "E013", "between 1 and 36500"),
    ({"TRAFFIC_DAYS_OF_HOURS": "a month"}, "E014", "between 1 and 36500"),
    ({"ANSWER_SECONDS": -1}, "E015", "between 0 and 3600"),
    ({"HANDLER_SECONDS": 0}, "E016", "between 1 and 86400"),
    ({"HANDLER_CONCURRENCY": 0}, "E022", "between 1 and 1000"),
    ({"HISTORY_DAYS": -1}, "E030", "between 0 and 3650"),
    ({"PROBLEM_REFUSED_CALLS": 0}, "E031", "between 1 and 1000000"),
    ({"STOP_SECONDS": 0}, "E017", "between 1 and 3600"),
    ({"REQUEST_SECONDS": 0}, "E018", "between 1 and 3600"),
    ({"DATABASE": "nowhere"}, "E019", "an alias of DATABASES"),
    ({"DATABASE": ""}, "E019", "an alias of DATABASES"),
    ({"DIRECT_DATABASE": 5}, "E020", "an alias of DATABASES"),
    ({"JSON_ENCODER": "json.JSONDecoder"}, "E021", "a subclass of json.JSONEncoder"),
    ({"PROBLEM_DEAD_LETTERS": 0}, "E023", "between 1 and 10000"),
    ({"PROBLEM_WAIT_SECONDS": 0}, "E024", "between 1 and 2592000"),
    ({"PROBLEM_LAG_SECONDS": 0}, "E025", "between 1 and 2592000"),
    ({"PROBLEM_TRANSACTION_SECONDS": 0}, "E026", "between 1 and 86400"),
    ({"PROBLEM_QUEUE_PERCENT": 101}, "E027", "between 1 and 100"),
    ({"PROBLEM_RESTART_SECONDS": -1}, "E028", "between 0 and 604800"),
    ({"HEALTH_TOKEN": "too short"}, "E029", "16 or more letters"),
)  # fmt: skip


def test_a_wrong_setting_is_an_error_and_is_never_used(settings: DjangoSettings):
    settings_of = ((given, id_) for given, id_, _ in WRONG if isinstance(given, dict))
    ids_by_setting = {key: id_ for given, id_ in settings_of for key in given}
    expected = {field.name: field.metadata["check"] for field in fields(Settings)}
    assert {key: ids_by_setting.get(key) for key in expected} == expected
    assert len(set(expected.values())) == len(expected)
    for given, id_, words in WRONG:
        settings.PSQLMESSAGES = given
        (found,) = check_settings()
        assert (found.id, found.level) == (f"psqlmessages.{id_}", checks.ERROR)
        assert words in found.msg
        with pytest.raises(ImproperlyConfigured, match=re.escape(words)):
            get_settings()
    # Settings that a test changes are read again.
    for name in ("one", "two"):
        settings.PSQLMESSAGES = {"NODE": name}
        assert name == get_settings().NODE
    settings.PSQLMESSAGES = {"NODES": "shop", "NODE": 5, "MAX_BODY_BYTES": 0}
    assert ids(check_settings()) == [f"psqlmessages.E00{number}" for number in (1, 2, 3)]
    assert check_databases(databases=["default"]) == []


def test_every_setting_is_documented_with_its_default():
    page = (Path(__file__).parents[2] / "docs/reference/settings.md").read_text()
    rows = page.partition("\n## The example project")[0]
    documented = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", rows, re.MULTILINE))
    assert set(documented) == {field.name for field in fields(Settings)}
    for field in fields(Settings):
        assert str(field.default) in documented[field.name].replace("empty", ""), field.name


def test_a_database_that_is_no_postgresql(shop: World, settings: DjangoSettings):
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    with namespace("direct", **sqlite):
        assert ids(check_databases(databases=["default"])) == ["psqlmessages.W101"]
    with namespace("legacy", **sqlite):
        (found,) = check_databases(databases=["default", "legacy"])
        assert (found.id, found.level) == ("psqlmessages.E101", checks.ERROR)
        with pytest.raises(ImproperlyConfigured, match="SQLite"):
            database_dsn("legacy")
        # A database that a router excludes is not checked.
        settings.DATABASE_ROUTERS = [OnlyDefault()]
        assert check_databases(databases=["legacy"]) == []


def test_too_old_a_server_or_one_that_cannot_be_reached(shop: World, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(ours, "MIN_VERSION", 99)
        (found,) = check_databases(databases=["default"])
    assert (found.id, found.level) == ("psqlmessages.E102", checks.ERROR)
    assert "99 or newer is needed" in found.msg
    connection.close()
    with monkeypatch.context() as away:
        away.setitem(connection.settings_dict, "PORT", "1")
        (found,) = check_databases(databases=["default"])
        assert check_deployment(databases=["default"]) == []
    assert (found.id, found.level) == ("psqlmessages.W101", checks.WARNING)


BOUNDS = {"connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5}
MORE = {"keepalives_count": 3, "tcp_user_timeout": 20_000}
HOSTS = (
    ("db.example", {}, "connect_timeout, keepalives_idle, keepalives_interval"),
    ("db.example", BOUNDS, "keepalives_count, tcp_user_timeout"),
    ("db.example", BOUNDS | MORE, None), ("127.0.0.1,db.example", {}, "connect_timeout"),
    ("127.0.0.1", {}, None), ("localhost", {}, None), ("/var/run/postgresql", {}, None),
    ("", {}, None),
)  # fmt: skip


def test_unbounded_or_atomic_connections_are_a_warning(monkeypatch):
    for host, options, missing in HOSTS:
        monkeypatch.setitem(connection.settings_dict, "HOST", host)
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
        found = check_connections(databases=["default"])
        assert ids(found) == (["psqlmessages.W104"] if missing else []), host
        assert missing is None or missing in found[0].msg
    with namespace("direct", ATOMIC_REQUESTS=True):
        found = check_connections(databases=["default", "direct"])
    assert ids(found) == ["psqlmessages.W105"]


def test_missing_functions_are_reported_if_once_installed(shop: World, changed: Changed):
    changed("ALTER SCHEMA messages RENAME TO away", "ALTER SCHEMA away RENAME TO messages")
    assert ids(check_databases(databases=["default"])) == ["psqlmessages.W102"]
    table = "django_migrations"
    changed(f"ALTER TABLE {table} RENAME TO away", f"ALTER TABLE away RENAME TO {table}")
    assert check_databases(databases=["default"]) == []


def test_deployment_checks_warn_of_a_superuser_and_an_open_schema(shop: World, changed: Changed):
    changed("ALTER ROLE psqlmessages SUPERUSER", "ALTER ROLE psqlmessages NOSUPERUSER")
    changed("GRANT CREATE ON SCHEMA public TO PUBLIC", "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    found = check_deployment(databases=["default"])
    assert ids(found) == ["psqlmessages.W201", "psqlmessages.W202"]


WITHOUT_EXTRAS = """
import sys

for name in ("adbc_driver_postgresql", "cel_expr_python", "daphne", "ninja",
             "prometheus_client", "py4j", "pyarrow", "pyspark", "yaml"):
    sys.modules[name] = None
import django
from django.conf import settings
from django.core.management import call_command

settings.configure(
    ROOT_URLCONF="psqlmessages.urls", SECRET_KEY="a", ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=[
        "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.postgres",
        "psqlmessages",
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}},
)
django.setup()
call_command("check", database=[])
from django.test import Client

for path in ("/api/q/default/orders", "/api/docs"):
    answer = Client().get(path)
    print(answer.status_code, answer.json()["detail"])
call_command("psqlmessages", "--help")
"""


def test_without_the_extras_commands_work_and_the_api_says_what_to_install():
    run = [sys.executable, "-W", "error", "-c", WITHOUT_EXTRAS]
    said = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert "doctor" in said.stdout, said.stdout + said.stderr
    assert 2 * "501 The API needs django-ninja: pip install 'psqlmessages[web]'.\n" in said.stdout
