"""Sessions and clients: the connections that have nodes, and the nodes."""

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now

from psqlmessages.models.names import NameField, RoleField


class Session(models.Model):
    """One PostgreSQL connection with nodes. It lives while its backend holds the advisory lock."""

    id = models.IntegerField(primary_key=True)
    pid = models.IntegerField()
    role = RoleField()
    channel = models.CharField(max_length=63, db_collation="C")
    started_at = models.DateTimeField(db_default=Now())

    class Meta:
        permissions: ClassVar = [
            ("terminate_session", "Can end connections that have transactions open"),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["channel"], name="session_channel_is_its_own"),
        ]

    def __str__(self) -> str:
        return f"{self.role} with pid {self.pid}"


class Client(models.Model):
    """A registration of a node; a node that returns is a new registration."""

    session = models.ForeignKey(Session, models.DO_NOTHING, related_name="clients")
    ident = NameField()
    role = RoleField()
    connected_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name = "connected node"
        ordering: ClassVar = ["ident"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["ident"], name="ident_is_registered_once"),
        ]

    def __str__(self) -> str:
        return self.ident
