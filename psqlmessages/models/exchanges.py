"""Models of exchanges: source, destinations, counts."""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import DEFAULT_DB_ALIAS, models
from django.db.models import Q
from django.db.models.functions import Now

from psqlmessages.models.names import NameField

MAX_PARALLEL = 16
MAX_WSIZE = 4096
# The node name is exchange.NAME, and a node name has at most 100 characters.
EXCHANGE_CHARACTERS = 90


class Exchange(models.Model):
    """Takes elements from a queue, and pushes copies to the destinations that select them."""

    name = NameField(max_length=EXCHANGE_CHARACTERS)
    source_namespace = models.CharField(
        "namespace of the source",
        max_length=100,
        default=DEFAULT_DB_ALIAS,
        help_text="An alias of DATABASES.",
    )
    source_queue = NameField()
    parallel = models.SmallIntegerField(
        default=1, help_text=f"Loops in each process that runs it, 1 to {MAX_PARALLEL}."
    )
    wsize = models.SmallIntegerField(
        "window size",
        default=100,
        help_text=f"Elements in flight in each process at most, 1 to {MAX_WSIZE}.",
    )
    reserve = models.BooleanField(
        default=True,
        help_text="Reserve elements and keep them until every destination in another namespace"
        " has its copy; else what fails there is lost.",
    )
    is_running = models.BooleanField("running", default=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name"], name="exchange_name_is_unique"),
            models.CheckConstraint(
                condition=~Q(name="") & ~Q(name__endswith="*"),
                name="exchange_name_is_no_pattern",
                violation_error_message="An exchange has a name, which does not end in *.",
            ),
            models.CheckConstraint(
                condition=~Q(source_queue="") & ~Q(source_queue__endswith="*"),
                name="exchange_source_is_no_pattern",
                violation_error_message="A source is a queue, and a name that ends in * is none.",
            ),
            models.CheckConstraint(
                condition=Q(parallel__range=(1, MAX_PARALLEL)),
                name="exchange_parallel_is_within_bounds",
                violation_error_message=f"Loops in parallel are 1 to {MAX_PARALLEL}.",
            ),
            models.CheckConstraint(
                condition=Q(wsize__range=(1, MAX_WSIZE)),
                name="exchange_wsize_is_within_bounds",
                violation_error_message=f"A window has 1 to {MAX_WSIZE} elements.",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Destination(models.Model):
    """A queue that gets a copy if its selector agrees. Selectors run in order of position."""

    exchange = models.ForeignKey(Exchange, models.CASCADE, related_name="destinations")
    position = models.SmallIntegerField()
    namespace = models.CharField(
        max_length=100, default=DEFAULT_DB_ALIAS, help_text="An alias of DATABASES."
    )
    queue = NameField()
    selector = models.TextField(
        blank=True,
        default="",
        help_text="A CEL expression, or @ and the name of a selector in code; empty: always.",
    )

    class Meta:
        ordering: ClassVar = ["exchange", "position"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["exchange", "position"],
                name="destination_position_is_unique",
                deferrable=models.Deferrable.DEFERRED,
            ),
            models.CheckConstraint(
                condition=~Q(queue="") & ~Q(queue__endswith="*"),
                name="destination_is_no_pattern",
                violation_error_message="A destination is a queue; a name that ends in * is none.",
            ),
            models.CheckConstraint(
                condition=Q(position__gte=0), name="destination_position_is_not_negative"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.namespace}/{self.queue}"


class ExchangeCount(models.Model):
    """Counters of a worker process for an exchange, by outcome; sum them over all workers.

    ``seconds`` is a sum, ``buckets`` is a histogram of durations, and ``seen_at`` is the last
    heartbeat of the worker. The outcomes ``to`` and ``bad_selector`` count the copies and the
    selector failures of one destination, given by its position.
    """

    class Outcome(models.TextChoices):
        OK = "ok", "routed"
        NO_ROUTE = "no_route", "no route"
        TOO_MANY_HOPS = "too_many_hops", "too many hops"
        FAILED = "failed", "failed"
        TO = "to", "copies"
        BAD_SELECTOR = "bad_selector", "selectors failed"

    exchange = models.ForeignKey(Exchange, models.CASCADE, related_name="counts")
    worker = models.UUIDField()
    outcome = models.CharField(max_length=13, choices=Outcome, db_collation="C")
    destination = models.SmallIntegerField(default=-1)
    count = models.BigIntegerField(db_default=0)
    seconds = models.FloatField(db_default=0)
    buckets = ArrayField(models.BigIntegerField(), db_default=[])
    selector_seconds = models.FloatField(db_default=0)
    seen_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["exchange", "worker", "outcome", "destination"],
                name="exchange_count_is_unique",
            )
        ]

    def __str__(self) -> str:
        return f"{self.outcome} of {self.exchange_id}"
