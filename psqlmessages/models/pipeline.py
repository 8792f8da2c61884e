"""Models of the pipeline: traffic windows and jobs."""

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from psqlmessages.models.names import NameField


class Traffic(models.Model):
    """Messages of one sender to one topic within a time window.

    Windows begin at multiples of their length since 1970, by ``published_at``. Sizes are bytes of
    the stored payload. Latencies are milliseconds from publishing until the pipeline has read the
    message. A job overwrites whole values and never adds differences.
    """

    class Window(models.IntegerChoices):
        SECONDS_10 = 10, "10 seconds"
        MINUTE = 60, "1 minute"
        HOUR = 3600, "1 hour"

    topic = NameField()
    sender = NameField()
    window_seconds = models.IntegerField("window", choices=Window)
    starts_at = models.DateTimeField()
    count = models.BigIntegerField("messages")
    bytes = models.BigIntegerField()
    size_p50 = models.FloatField()
    size_p95 = models.FloatField()
    size_p99 = models.FloatField()
    latency_p50 = models.FloatField()
    latency_p95 = models.FloatField()
    latency_p99 = models.FloatField()

    class Meta:
        verbose_name_plural = "traffic"
        ordering: ClassVar = ["-starts_at", "window_seconds", "topic", "sender"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["window_seconds", "starts_at", "topic", "sender"], name="traffic_is_unique"
            ),
            models.CheckConstraint(
                condition=Q(window_seconds__in=(10, 60, 3600)), name="traffic_window_is_known"
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["topic", "window_seconds", "starts_at"], name="traffic_by_topic")
        ]

    def __str__(self) -> str:
        return f"{self.topic} from {self.sender}, {self.window_seconds} s from {self.starts_at}"


class PipelineJob(models.Model):
    """State of a pipeline job, reported by its process. It is alive while ``seen_at`` changes."""

    class State(models.TextChoices):
        STARTING = "starting", "starting"
        RUNNING = "running", "running"
        WAITING = "waiting", "waiting for the database"
        STOPPED = "stopped", "stopped"
        FAILED = "failed", "failed"

    name = models.CharField(max_length=100, db_collation="C", help_text="As it was started.")
    state = models.CharField(max_length=8, choices=State, db_collation="C")
    started_at = models.DateTimeField(db_default=Now())
    seen_at = models.DateTimeField(db_default=Now())
    last_batch = models.BigIntegerField(db_default=-1, help_text="-1: none yet.")
    last_batch_at = models.DateTimeField(null=True)
    rows = models.BigIntegerField(db_default=0, help_text="Since it was started.")
    rows_per_second = models.FloatField(db_default=0, help_text="Of the last batches.")
    lag_seconds = models.FloatField(
        null=True, help_text="Age of the oldest message that was not read yet; 0: all are read."
    )
    error = models.TextField(blank=True, db_default="")

    class Meta:
        verbose_name = "pipeline job"
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name"], name="pipeline_job_name_is_unique")
        ]

    def __str__(self) -> str:
        return self.name
