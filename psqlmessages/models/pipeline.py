"""Models of the pipeline: traffic windows and jobs."""

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from psqlmessages.models.names import NameField, isolate


class Traffic(models.Model):
    """Number, sizes and latencies of messages of one sender to one topic within a time window.

    A window begins at a multiple of its length since 1970, and has the messages whose
    ``published_at`` is in the window. Sizes are bytes of the stored payload. Latencies are
    milliseconds from publishing to the start of the batch that reads the message. A job that counts
    a window again replaces its row.
    """

    class Window(models.IntegerChoices):
        SECONDS_10 = 10, _("10 seconds")
        MINUTE = 60, _("1 minute")
        HOUR = 3600, _("1 hour")

    topic = NameField()
    sender = NameField()
    window_seconds = models.IntegerField(_("window"), choices=Window)
    starts_at = models.DateTimeField()
    count = models.BigIntegerField(_("messages"))
    bytes = models.BigIntegerField()
    size_p50 = models.FloatField()
    size_p95 = models.FloatField()
    size_p99 = models.FloatField()
    latency_p50 = models.FloatField()
    latency_p95 = models.FloatField()
    latency_p99 = models.FloatField()

    class Meta:
        verbose_name_plural = _("traffic")
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
    """State of a pipeline job, as its process reports it. ``seen_at``: its last heartbeat."""

    class State(models.TextChoices):
        STARTING = "starting", _("starting")
        RUNNING = "running", _("running")
        WAITING = "waiting", _("waiting for the database")
        STOPPED = "stopped", _("stopped")
        FAILED = "failed", _("failed")

    name = models.CharField(max_length=100, db_collation="C")
    state = models.CharField(max_length=8, choices=State, db_collation="C")
    started_at = models.DateTimeField(db_default=Now())
    seen_at = models.DateTimeField(db_default=Now())
    last_batch = models.BigIntegerField(db_default=-1, help_text=_("-1: no batch yet."))
    last_batch_at = models.DateTimeField(null=True)
    rows = models.BigIntegerField(db_default=0, help_text=_("Rows since the start."))
    rows_per_second = models.FloatField(db_default=0, help_text=_("Rate of the last batches."))
    lag_seconds = models.FloatField(
        null=True, help_text=_("Age of the oldest message not read yet. 0: all are read.")
    )
    error = models.TextField(blank=True, db_default="")

    class Meta:
        verbose_name = _("pipeline job")
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name"], name="pipeline_job_name_is_unique")
        ]

    def __str__(self) -> str:
        return isolate(self.name)


# A job in one of these states sends no heartbeat.
ENDED_STATES = (PipelineJob.State.STOPPED, PipelineJob.State.FAILED)
