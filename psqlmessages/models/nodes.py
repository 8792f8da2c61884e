"""Models of sessions, nodes, topics and memberships."""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from psqlmessages.models.names import NameField, RoleField, isolate


class Session(models.Model):
    """A PostgreSQL connection with nodes, alive while it holds the advisory lock ``id``."""

    id = models.IntegerField(primary_key=True)
    pid = models.IntegerField()
    role = RoleField()
    channel = models.CharField(max_length=63, db_collation="C")
    started_at = models.DateTimeField(db_default=Now())

    class Meta:
        permissions: ClassVar = [
            ("terminate_session", "Can end connections with open transactions"),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["channel"], name="session_channel_is_its_own"),
        ]

    def __str__(self) -> str:
        return f"{self.role} with pid {self.pid}"


class Client(models.Model):
    """A registered node. A node that registers again gets a new row."""

    session = models.ForeignKey(Session, models.DO_NOTHING, related_name="clients")
    ident = NameField()
    role = RoleField()
    connected_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name = _("connected node")
        ordering: ClassVar = ["ident"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["ident"], name="ident_is_registered_once"),
        ]

    def __str__(self) -> str:
        return isolate(self.ident)


class Topic(models.Model):
    """A topic. SQL functions set the fields that are not editable, so that sends read few rows.

    ``channels``: the channels of sessions whose nodes listen or observe. ``subscriber_channels``:
    the channels of sessions whose nodes have a subscription; a stored message wakes them.
    ``is_made_by_publish``: a publish created the topic.
    """

    name = NameField()
    retention = models.IntegerField(
        db_default=0,
        default=0,
        help_text=_("Seconds that each message is stored, even without a subscription."),
    )
    listeners = models.IntegerField(db_default=0, editable=False)
    channels = ArrayField(models.TextField(), db_default=[], editable=False)
    subscriptions = models.IntegerField(db_default=0, editable=False)
    subscriber_channels = ArrayField(models.TextField(), db_default=[], editable=False)
    is_made_by_publish = models.BooleanField(db_default=False, editable=False)

    class Meta:
        ordering: ClassVar = ["name"]
        permissions: ClassVar = [
            ("view_monitor", "Can view the live monitor"),
            ("view_bodies", "Can view the bodies of messages in the live monitor"),
            ("send_test_messages", "Can send test messages to topics and queues"),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name"], name="topic_name_is_unique"),
            models.CheckConstraint(
                condition=Q(retention__gte=0),
                name="topic_retention_is_not_negative",
                violation_error_message=_("The retention is 0 seconds or more."),
            ),
        ]

    def __str__(self) -> str:
        return isolate(self.name)


class Membership(models.Model):
    """A node that sends to a topic or listens to it.

    The fields after ``kind`` repeat data from elsewhere, so that a send reads only this row and the
    topic's row. ``channel``, ``pid`` and ``role`` are those of the session. ``header`` is the
    constant part of a message's header. ``timeout`` (seconds) comes from the rules; SQL functions
    update it when rules change.
    """

    class Kind(models.TextChoices):
        NOTIFY = "notify", _("sends")
        LISTEN = "listen", _("listens")

    client = models.ForeignKey(
        Client, models.DO_NOTHING, related_name="memberships", db_index=False
    )
    topic = models.ForeignKey(Topic, models.DO_NOTHING, related_name="memberships", db_index=False)
    kind = models.CharField(max_length=6, choices=Kind, db_collation="C")
    channel = models.CharField(max_length=63, db_collation="C")
    pid = models.IntegerField()
    role = RoleField()
    header = models.TextField()
    timeout = models.IntegerField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["client", "topic", "kind"], name="membership_is_unique"
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["notify", "listen"]), name="membership_kind_is_known"
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["topic", "kind"], name="membership_by_topic")]

    def __str__(self) -> str:
        return f"{self.client} {self.get_kind_display()} {self.topic}"


class Observation(models.Model):
    """A node that observes a topic or pattern: it gets messages without being a listener."""

    client = models.ForeignKey(
        Client, models.DO_NOTHING, related_name="observations", db_index=False
    )
    pattern = NameField()
    channel = models.CharField(max_length=63, db_collation="C")

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["client", "pattern"], name="observation_is_unique"),
        ]
        indexes: ClassVar = [models.Index(fields=["pattern"], name="observation_by_pattern")]

    def __str__(self) -> str:
        return f"{self.client} observes {self.pattern}"


class Body(models.Model):
    """A body over the NOTIFY limit, for the listeners of a topic, or for one node (an RPC).

    ``sql/50_large_bodies.sql`` creates the table with unlogged partitions, emptied in turn.
    """

    pk = models.CompositePrimaryKey("slot", "id")
    slot = models.SmallIntegerField()
    id = models.UUIDField()
    topic_id = models.BigIntegerField(null=True)
    client_id = models.BigIntegerField(null=True)
    expires_at = models.DateTimeField()
    header = models.TextField(db_collation="C")
    body = models.TextField()

    class Meta:
        verbose_name_plural = _("bodies")

    def __str__(self) -> str:
        return f"{self.id} until {self.expires_at}"
