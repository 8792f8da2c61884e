"""Models of subscriptions and stored messages."""

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from psqlmessages.models.names import NameField, isolate


class Subscription(models.Model):
    """A node's position in the stream of a topic.

    A subscription expires ``timeout`` seconds after ``pinged_at``, the time of its last read.
    ``topic`` is a name and no foreign key, because the row of a topic without messages may be
    removed and created again. ``is_alive`` is false once the subscription was found expired.
    ``is_recovered`` is false if the subscription has expired and missed messages. It becomes true
    if the node calls ``connect_stream`` after the subscription has restarted, or if the position is
    reset.
    """

    ident = NameField()
    topic = NameField()
    position = models.BigIntegerField(help_text=_("Id of the last message read."))
    timeout = models.IntegerField(
        help_text=_("The subscription expires this many seconds after its last read.")
    )
    started_at = models.DateTimeField(db_default=Now())
    pinged_at = models.DateTimeField(db_default=Now())
    is_alive = models.BooleanField(db_default=True)
    is_recovered = models.BooleanField(db_default=True)

    class Meta:
        ordering: ClassVar = ["topic", "ident"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["ident", "topic"], name="subscription_is_unique"),
            models.CheckConstraint(
                condition=Q(timeout__gt=0), name="subscription_timeout_is_positive"
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["topic"], name="subscription_by_topic")]

    def __str__(self) -> str:
        return f"{isolate(self.ident)} from {isolate(self.topic)}"


class StreamMessage(models.Model):
    """A message that is stored while a subscription or the retention needs the message.

    ``sql/62_publish.sql`` creates the table. Its partitions are filled and truncated in turn;
    ``slot`` is the number of the partition.
    """

    pk = models.CompositePrimaryKey("topic_id", "id", "slot")
    topic_id = models.BigIntegerField()
    id = models.BigIntegerField()
    slot = models.SmallIntegerField()
    sender = models.TextField(db_collation="C")
    published_at = models.DateTimeField()
    enc = models.TextField(null=True)  # noqa: DJ001 - null means plain text
    payload = models.TextField()

    class Meta:
        verbose_name = _("stream message")

    def __str__(self) -> str:
        return f"{self.id} from {self.sender}"
