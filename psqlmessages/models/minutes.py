"""Models of the history: counts per minute, periods without gaps, and refused calls."""

from typing import ClassVar

from django.db import models

from psqlmessages.models.names import NameField


class TopicMinute(models.Model):
    """Messages to a topic in a minute.

    Each of the busiest topics has a row; the row with topic "" has the sums of all others.
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
    """Elements that came into and left a queue in a minute, and its backlog after the minute.

    ``puts``: pushed or moved into the queue; ``gets``: popped or committed; ``removes``: deleted or
    moved, also to the dead-letter queue. A minute without a change has no row.
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
    """A period in which every minute of all topics, or of all queues, was counted.

    If ``ends_at`` is null, the period lasts while the backend ``pid`` holds the writer's lock.
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
    """Calls of a node that were refused because one rule is missing.

    ``type``, ``dest`` and ``mode`` are "" if the error did not contain them. If there are too many
    missing rules, the row with ident "" counts the calls that lack other rules. After an hour
    without a refused call, ``count`` begins again.
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
