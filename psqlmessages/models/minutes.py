"""Models of the history: counts per minute, the periods that are known, and refused calls."""

from typing import ClassVar

from django.db import models

from psqlmessages.models.names import NameField


class TopicMinute(models.Model):
    """Messages to a topic in a minute. A topic without messages has no row.

    If too many topics had messages, the row with the name "" has the sums of those without a row.
    """

    topic = NameField()
    minute = models.DateTimeField()
    messages = models.BigIntegerField()
    bytes = models.BigIntegerField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["topic", "minute"], name="topic_minute_is_unique")
        ]
        indexes: ClassVar = [models.Index(fields=["minute"], name="topic_minute_by_time")]

    def __str__(self) -> str:
        return f"{self.topic} at {self.minute}"


class QueueMinute(models.Model):
    """Elements that came into and left a queue in a minute, and its backlog at the end.

    A minute without a change has no row. ``removes`` includes elements that were moved, also to the
    dead-letter queue.
    """

    queue = NameField()
    minute = models.DateTimeField()
    puts = models.BigIntegerField()
    gets = models.BigIntegerField()
    removes = models.BigIntegerField()
    backlog = models.BigIntegerField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["queue", "minute"], name="queue_minute_is_unique")
        ]
        indexes: ClassVar = [models.Index(fields=["minute"], name="queue_minute_by_time")]

    def __str__(self) -> str:
        return f"{self.queue} at {self.minute}"


class HistoryPeriod(models.Model):
    """A period whose minutes were all counted, of the topics or of the queues.

    Without an end it lasts as long as the process ``pid`` of PostgreSQL holds the writer's lock.
    """

    class Subject(models.TextChoices):
        TOPIC = "topic"
        QUEUE = "queue"

    kind = models.CharField(max_length=5, choices=Subject, db_collation="C")
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField(null=True)
    pid = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.kind} from {self.starts_at} to {self.ends_at or 'now'}"


class RefusedCall(models.Model):
    """Calls of a node that lacked a rule, as counted by the processes that made them.

    ``type``, ``dest`` and ``mode`` are "" if the error did not name them. The row without an ident
    has the calls whose rules were too many for a row of their own. The count begins again after an
    hour without such a call.
    """

    ident = NameField()
    type = models.CharField(max_length=5, db_collation="C")
    dest = NameField()
    mode = models.CharField(max_length=2, db_collation="C")
    count = models.BigIntegerField()
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["ident", "type", "dest", "mode"], name="refused_call_is_unique"
            )
        ]

    def __str__(self) -> str:
        return f"{self.count} calls of {self.ident} to {self.dest}"
