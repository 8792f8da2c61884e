"""Tests of this project; `tests/django/test_pages.py` runs them."""

from datetime import timedelta

from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import connections, transaction
from django.test import AsyncClient, TransactionTestCase

from psqlmessages import orm
from psqlmessages.django import push, reserve_many
from psqlmessages.models import WebIdentity
from psqlmessages.relay import auth
from psqlmessages.rest.auth import token_for
from psqlmessages.testing import allow_queue
from tests.django.odd.models import Person

HOUR = timedelta(hours=1)


class UnusualProject(TransactionTestCase):
    databases = frozenset({"default", "direct", "legacy"})

    @classmethod
    def tearDownClass(cls) -> None:
        # The REST API keeps connections, and the event loop that could close them has ended.
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        super().tearDownClass()

    def setUp(self) -> None:
        self.person = Person.objects.create_superuser("wanda", code="W1", password="x")

    async def test_async_views_answer(self):
        await sync_to_async(allow_queue)("jobs")
        await WebIdentity.objects.acreate(user=self.person, ident="odd")
        client = AsyncClient()
        await client.aforce_login(self.person)
        pages = ("/healthz", "/metrics", "/monitor/exchanges/figures/", "/monitor/traffic/")
        found = {page: (await client.get(page)).status_code for page in pages}
        assert found == dict.fromkeys(pages, 200)
        token = await sync_to_async(token_for)(self.person, HOUR)
        headers = {"authorization": f"Bearer {token}"}
        pushed = await AsyncClient().post(
            "/api/q/default/jobs", b"1", content_type="application/json", headers=headers
        )
        assert pushed.status_code == 201, pushed.content

    def test_tokens_and_leases_without_time_zones(self):
        assert auth.read_token(auth.token_for(self.person, HOUR)).user == self.person
        assert auth.read_token(auth.token_for(self.person, -HOUR)) is None
        allow_queue("jobs")
        push("jobs", {"a": 1})
        with transaction.atomic():
            (element,) = reserve_many("jobs", 1)
        assert element.body == {"a": 1}

    def test_a_router_keeps_the_functions_out_of_other_databases(self):
        for target in ((), ("zero",)):
            call_command("migrate", "psqlmessages", *target, database="legacy", verbosity=0)
        assert connections["legacy"].introspection.table_names() == ["django_migrations"]

    def test_sessions_that_listen_use_the_direct_database(self):
        assert "connect_timeout=7" in orm.direct_dsn()
        assert "connect_timeout=5" in orm.database_dsn()
