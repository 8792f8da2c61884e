"""Tests of this project; `tests/django/test_pages.py` runs them."""

import re
from datetime import timedelta
from unittest.mock import Mock

from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.admin import site
from django.core.management import call_command
from django.db import connections, transaction
from django.test import AsyncClient, TransactionTestCase
from django.utils import timezone

from psqlmessages.django import node, push, push_many, reserve_many
from psqlmessages.models import Exchange, PipelineJob, Queue, Traffic, WebIdentity
from psqlmessages.monitor.access import ACCESS_PERMISSIONS
from psqlmessages.relay import auth
from psqlmessages.relay.asgi import websocket_application
from psqlmessages.relay.hub import get_hub
from psqlmessages.relay.revalidation import Credentials, find_revocations
from psqlmessages.rest.auth import token_for
from psqlmessages.testing import allow_queue, allow_topic
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
        pages = (
            "/healthz", "/metrics", "/monitor/exchanges/figures/", "/monitor/traffic/",
            "/monitor/traffic/figures/", "/monitor/history/?queue=jobs",
        )  # fmt: skip
        found = {page: (await client.get(page)).status_code for page in pages}
        assert found == dict.fromkeys(pages, 200)
        token = await sync_to_async(token_for)(self.person, HOUR)
        calls = {
            ("post", "q/default/jobs", 1): 201, ("get", "q/default/jobs/status"): 200,
            ("put", "x/x1", '{"src": {"queue": "a"}, "dst": [{"queue": "b"}]}'): 201,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {token}"}
        for (method, path, *body), status in calls.items():
            given = {"content_type": "application/json"} if body else {}
            call = getattr(AsyncClient(), method)
            answer = await call(f"/api/{path}", *body, headers=headers, **given)
            assert answer.status_code == status, answer.content

    async def test_a_websocket_with_a_token_opens(self):
        await sync_to_async(allow_topic)("ROOM")
        await WebIdentity.objects.acreate(user=self.person, ident="odd")
        token = await sync_to_async(auth.token_for)(self.person, HOUR)
        headers = [(b"authorization", f"Bearer {token}".encode())]
        socket = WebsocketCommunicator(websocket_application(), "/ws/node/", headers=headers)
        assert (await socket.connect(60))[0]
        await socket.send_json_to({"op": "init", "ident": "odd"})
        assert await socket.receive_json_from(60) == {"Err": "0"}
        await socket.disconnect()
        await get_hub().close()

    def test_users_without_groups_keep_their_websockets(self):
        users = self.person, Person.objects.create_user("walt", code="W2", password="x")
        credentials = [Credentials(user.pk, user.get_session_auth_hash()) for user in users]
        page, other = (Mock(permissions=ACCESS_PERMISSIONS) for _ in users)
        sockets = page, other, Mock(permissions=frozenset())
        subjects = zip(sockets, [*credentials, credentials[1]], [None] * 3, strict=True)
        results = find_revocations([*subjects])
        assert page.permits.call_args.args[1] == ACCESS_PERMISSIONS
        # Django's ModelBackend needs groups, so these permissions are unknown.
        assert [result.error is None for result in results] == [True, False, True]
        assert not any(result.reason for result in results)

    def test_tokens_and_leases_without_time_zones(self):
        assert auth.read_token(auth.token_for(self.person, HOUR)).user == self.person
        assert auth.read_token(auth.token_for(self.person, -HOUR)) is None
        allow_queue("jobs")
        push("jobs", {"a": 1})
        with transaction.atomic():
            (element,) = reserve_many("jobs", 1)
        assert element.body == {"a": 1}

    def test_pages_show_times_with_their_zone(self):
        allow_topic("ROOM")
        allow_queue("jobs")
        push_many("jobs", range(51), delay=HOUR)
        WebIdentity.objects.create(user=self.person, ident="odd")
        Exchange.objects.create(name="x1", source_queue="jobs")
        PipelineJob.objects.create(name="traffic", last_batch_at=timezone.now())
        window = dict.fromkeys((field.name for field in Traffic._meta.fields[1:]), 60)
        Traffic.objects.create(**window | {"starts_at": timezone.now()})
        self.client.force_login(self.person)
        names = "queues/jobs/", "streams/ROOM/", "nodes/odd/", "stored/?topic=ROOM"
        pages = [f"/monitor/{name}" for name in names]
        with node("odd") as reader:
            reader.subscribe("ROOM")
            reader.publish("ROOM", "hello")
            for model in (each for each in site._registry if each.__module__.startswith("psql")):
                pages.append(f"/admin/psqlmessages/{model._meta.model_name}/")
                pages.append(f"{pages[-1]}{model.objects.all()[0].pk}/change/")
            pages.append(f"/admin/psqlmessages/queue/{Queue.objects.get().pk}/elements/")
            (link,) = re.findall('"([?]time=.*?)"', self.client.get(pages[-1]).content.decode())
            pages.append(pages[-1] + link.replace("&amp;", "&"))
            texts = [self.client.get(page).content.decode() for page in pages]
        times = [re.findall('<time datetime="(.*?)"', text) for text in texts]
        assert all(time.endswith("+05:45") for found in times for time in found), times
        times_of_pages = zip(pages, times, strict=True)
        without = {re.sub("[0-9]+", "1", page) for page, found in times_of_pages if not found}
        models = "auth", "exchange", "queue", "topic", "webidentity"
        parts = [f"{model}/{part}" for model in models for part in ("", "1/change/")]
        assert without == {f"/admin/psqlmessages/{part}" for part in parts}
        assert len(times[-1]) == 3, "the second page has the last element only"

    def test_a_router_keeps_the_functions_out_of_other_databases(self):
        for target in ((), ("zero",)):
            call_command("migrate", "psqlmessages", *target, database="legacy", verbosity=0)
        assert connections["legacy"].introspection.table_names() == ["django_migrations"]
