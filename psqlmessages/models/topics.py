"""Topics, who sends and listens to them, and who observes."""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from psqlmessages.models.names import NameField, RoleField
from psqlmessages.models.sessions import Client


class Topic(models.Model):
    """A topic. What is not editable is derived: a send reads it and no other row.

    ``wakes``: channels of the connected subscribers, who are told that there is something to read.
    """

    name = NameField()
    retention = models.IntegerField(
        db_default=0,
        default=0,
        help_text="Seconds that every message is kept at least, be it subscribed to or not.",
    )
    listeners = models.IntegerField(db_default=0, editable=False)
    channels = ArrayField(models.TextField(), db_default=[], editable=False)
    subscriptions = models.IntegerField(db_default=0, editable=False)
    wakes = ArrayField(models.TextField(), db_default=[], editable=False)
    is_made_by_publish = models.BooleanField(db_default=False, editable=False)

    class Meta:
        ordering: ClassVar = ["name"]
        permissions: ClassVar = [
            ("view_monitor", "Can view the live monitor"),
            ("view_bodies", "Can view the bodies of messages in the live monitor"),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name"], name="topic_name_is_unique"),
            models.CheckConstraint(
                condition=Q(retention__gte=0),
                name="topic_retention_is_not_negative",
                violation_error_message="A retention is of 0 seconds or more.",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """A node sends to a topic or listens to it.

    What follows ``kind`` is derived when the state or the rules change, so that a send looks up
    one row: whose call it may be (channel, pid, role), the fixed part of the header, the timeout
    of the rules in seconds.
    """

    class Kind(models.TextChoices):
        NOTIFY = "notify", "sends"
        LISTEN = "listen", "listens"

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
    """A node receives what a topic, or all topics of a pattern, receive, and is no listener."""

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
