"""Models of queues, elements, push keys and counts."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from psqlmessages.models.names import NameField, isolate

DEAD_LETTERS = "__deadletter__"


class ExistingQueues(models.Manager["Queue"]):
    """The queues that exist. A removed queue exists again while it has elements."""

    def get_queryset(self) -> models.QuerySet[Queue]:
        """Exclude removed queues without elements."""
        elements = Element.objects.filter(queue=models.OuterRef("pk"))
        return super().get_queryset().filter(Q(is_removed=False) | models.Exists(elements))


class Queue(models.Model):
    """A queue. SQL functions set the fields that are not editable.

    Consumers wait for notifications on ``channel``. Pushes send them until ``awaited_until``.
    """

    name = NameField()
    is_paused = models.BooleanField(_("paused"), db_default=False, default=False)
    max_tries = models.IntegerField(
        null=True,
        blank=True,
        help_text=_(
            "After this many failed attempts an element moves to the dead-letter queue."
            " Empty: retry forever."
        ),
    )
    dead_letter_queue = NameField(
        db_default=DEAD_LETTERS,
        default=DEAD_LETTERS,
        help_text=_("The queue to which elements move after the last failed attempt."),
    )
    key_timeout = models.IntegerField(
        db_default=24 * 60 * 60,
        default=24 * 60 * 60,
        help_text=_("Seconds during which a second push with the same key adds nothing."),
    )
    channel = models.CharField(max_length=63, db_collation="C", db_default="", editable=False)
    awaited_until = models.DateTimeField(db_default=Now(), editable=False)
    is_removed = models.BooleanField(db_default=False, default=False, editable=False)

    objects = ExistingQueues()

    class Meta:
        ordering: ClassVar = ["name"]
        permissions: ClassVar = [
            (
                "operate_queues",
                "Can pause queues, and push, move and delete elements, in the monitor",
            ),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name"], name="queue_name_is_unique"),
            models.CheckConstraint(
                condition=~Q(name="") & ~Q(name__endswith="*"), name="queue_name_is_no_pattern"
            ),
            models.CheckConstraint(
                condition=~Q(dead_letter_queue="") & ~Q(dead_letter_queue__endswith="*"),
                name="queue_for_dead_letters_is_no_pattern",
                violation_error_message=_(
                    "A dead-letter queue needs a name that does not end in *."
                ),
            ),
            models.CheckConstraint(
                condition=Q(max_tries__isnull=True) | Q(max_tries__gt=0),
                name="queue_max_tries_is_positive",
                violation_error_message=_(
                    "The number of attempts is 1 or more, or empty for no limit."
                ),
            ),
            models.CheckConstraint(
                condition=Q(key_timeout__gt=0),
                name="queue_key_timeout_is_positive",
                violation_error_message=_("The key timeout is 1 second or more."),
            ),
        ]

    def __str__(self) -> str:
        return isolate(self.name)


class Element(models.Model):
    """An element. It is available from ``available_at``: its mature time, or the end of a lease.

    ``wait_began_at``: the server's time when ``available_at`` was last set; null means
    ``pushed_at``. If the clock is set back, housekeeping computes the remaining wait from this
    time. ``delivered``: marks of the copies that an exchange has pushed so far.
    """

    queue = models.ForeignKey(
        Queue, models.DO_NOTHING, related_name="elements", db_constraint=False, db_index=False
    )
    mature_at = models.DateTimeField(db_default=Now())
    available_at = models.DateTimeField(db_default=Now())
    pushed_at = models.DateTimeField(db_default=Now())
    wait_began_at = models.DateTimeField(null=True)
    lease = models.UUIDField(null=True)
    tries = models.IntegerField(db_default=0)
    enc = models.TextField(null=True)  # noqa: DJ001 - null means plain text
    headers = models.JSONField(db_default={})
    delivered = ArrayField(models.TextField(), null=True)
    body = models.TextField()

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(condition=Q(tries__gte=0), name="element_tries_are_not_negative")
        ]
        indexes: ClassVar = [
            # Not the id itself: while a transaction is open, vacuum counts no rows, and PostgreSQL
            # would then read this whole index to find elements by id.
            models.Index("queue", "available_at", F("id") + 0, name="element_by_availability"),
            models.Index(
                fields=["queue", "available_at"],
                name="element_reserved",
                condition=Q(lease__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.pk} of {self.queue_id}"


class ElementKey(models.Model):
    """The key of a push, and the pushed element. A second push with the key adds nothing."""

    queue = models.ForeignKey(
        Queue, models.DO_NOTHING, related_name="+", db_constraint=False, db_index=False
    )
    key = models.CharField(max_length=200, db_collation="C")
    element_id = models.BigIntegerField()
    expires_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["queue", "key"], name="element_key_is_unique")
        ]
        indexes: ClassVar = [models.Index(fields=["expires_at"], name="element_key_by_expiry")]

    def __str__(self) -> str:
        return self.key


class QueueCount(models.Model):
    """Counts of operations on a queue's elements; the sum of a queue's rows is its count.

    ``puts``: elements that were pushed or moved into the queue; ``gets``: elements that were taken
    without a lease; ``removes``: elements that were deleted, drained or moved away.
    Each operation adds a row, and housekeeping merges rows.
    """

    queue = models.ForeignKey(
        Queue, models.DO_NOTHING, related_name="counts", db_constraint=False, db_index=False
    )
    puts = models.BigIntegerField(db_default=0)
    gets = models.BigIntegerField(db_default=0)
    reserves = models.BigIntegerField(db_default=0)
    commits = models.BigIntegerField(db_default=0)
    rollbacks = models.BigIntegerField(db_default=0)
    dead_letters = models.BigIntegerField(db_default=0)
    removes = models.BigIntegerField(db_default=0)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["queue"], name="queue_count_by_queue")]

    def __str__(self) -> str:
        return f"counts of {self.queue_id}"
