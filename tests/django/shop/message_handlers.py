"""Handlers of the tests' project."""

from django.contrib.auth.models import Group
from django.db import connection

from psqlmessages import Message
from psqlmessages.django import on_rpc, on_topic
from tests.django.shop import WORK


@on_topic("ORDERS", node="worker")
def ship(message: Message) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [WORK])
    Group.objects.create(name=message.body)


@on_rpc(node="worker")
def answer(message: Message) -> str:
    return f"you said {message.body}"
