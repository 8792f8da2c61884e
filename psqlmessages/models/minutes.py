"""Models of the history: what happened in each minute, and the periods that are known."""

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
