"""Models of exchanges: source, destinations, counts."""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import DEFAULT_DB_ALIAS, models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from psqlmessages.models.names import NameField, isolate

MAX_PARALLEL = 16
MAX_WSIZE = 4096
# The node name is exchange.NAME, and a node name has at most 100 characters.
EXCHANGE_CHARACTERS = 90


class Exchange(models.Model):
    """Takes elements from a queue, and pushes copies to the destinations that select them."""

    class NoRouteAction(models.TextChoices):
        QUEUE = "queue", _("goes to the queue __no_route__")
        DISCARD = "discard", _("is removed, and counted as discarded")

    name = NameField(max_length=EXCHANGE_CHARACTERS)
    source_namespace = models.CharField(
        _("namespace of the source"),
        max_length=100,
        default=DEFAULT_DB_ALIAS,
        help_text=_("An alias of DATABASES."),
    )
    source_queue = NameField()
    parallel = models.SmallIntegerField(
        default=1,
        help_text=format_lazy(
            _("Consumers in each worker process, 1 to {most}."), most=MAX_PARALLEL
        ),
    )
    wsize = models.SmallIntegerField(
        _("window size"),
        default=100,
        help_text=format_lazy(
            _("Maximum number of elements that a process takes at a time, 1 to {most}."),
            most=MAX_WSIZE,
        ),
    )
    reserve = models.BooleanField(
        default=True,
        help_text=_(
            "Reserve elements until every destination in another namespace has its copy."
            " Otherwise copies that fail there are lost."
        ),
    )
    no_route_action = models.CharField(
        _("without route"),
        max_length=7,
        choices=NoRouteAction,
        default=NoRouteAction.QUEUE,
        db_default=NoRouteAction.QUEUE.value,
        db_collation="C",
        help_text=_(
            "What happens to an element that no destination accepts. If a selector failed, the"
            " element is never discarded."
        ),
    )
    is_running = models.BooleanField(_("running"), default=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["name"], name="exchange_name_is_unique"),
            models.CheckConstraint(
                condition=~Q(name="") & ~Q(name__endswith="*"),
                name="exchange_name_is_no_pattern",
                violation_error_message=_("An exchange needs a name that does not end in *."),
            ),
            models.CheckConstraint(
                condition=~Q(source_queue="") & ~Q(source_queue__endswith="*"),
                name="exchange_source_is_no_pattern",
                violation_error_message=_("The source must be a queue name and cannot end in *."),
            ),
            models.CheckConstraint(
                condition=Q(parallel__range=(1, MAX_PARALLEL)),
                name="exchange_parallel_is_within_bounds",
                violation_error_message=format_lazy(
                    _("An exchange has 1 to {most} consumers in each process."), most=MAX_PARALLEL
                ),
            ),
            models.CheckConstraint(
                condition=Q(wsize__range=(1, MAX_WSIZE)),
                name="exchange_wsize_is_within_bounds",
                violation_error_message=format_lazy(
                    _("A window has 1 to {most} elements."), most=MAX_WSIZE
                ),
            ),
            models.CheckConstraint(
                condition=Q(no_route_action__in=("queue", "discard")),
                name="exchange_no_route_action_is_known",
            ),
        ]

    def __str__(self) -> str:
        return isolate(self.name)


class Destination(models.Model):
    """A queue that gets a copy of each element that the selector accepts."""

    exchange = models.ForeignKey(Exchange, models.CASCADE, related_name="destinations")
    position = models.SmallIntegerField()
    namespace = models.CharField(
        max_length=100, default=DEFAULT_DB_ALIAS, help_text=_("An alias of DATABASES.")
    )
    queue = NameField()
    selector = models.TextField(
        blank=True,
        default="",
        help_text=_(
            "A CEL expression, or @ and the name of a selector in code. Empty: every element."
        ),
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
                violation_error_message=_(
                    "The destination must be a queue name and cannot end in *."
                ),
            ),
            models.CheckConstraint(
                condition=Q(position__gte=0), name="destination_position_is_not_negative"
            ),
        ]

    def __str__(self) -> str:
        return isolate(f"{self.namespace}/{self.queue}")


class ExchangeCount(models.Model):
    """Counter of one worker process for one exchange and outcome.

    ``seconds`` is the sum of durations, ``buckets`` their histogram, and ``seen_at`` the worker's
    last heartbeat. The outcomes ``to`` and ``bad_selector`` count the copies and the selector
    failures of one destination, whose position is ``destination``. For all other outcomes
    ``destination`` is -1. The row of outcome ``ok`` also has the rules that the worker lacks, and
    ``failing_since``: since when it has lacked rules, or had errors without a success (see
    ``ExchangeLog.is_failing``); None if it works.
    """

    class Outcome(models.TextChoices):
        OK = "ok", _("routed")
        NO_ROUTE = "no_route", _("no route")
        DISCARDED = "discarded", _("discarded")
        TOO_MANY_HOPS = "too_many_hops", _("too many hops")
        FAILED = "failed", _("failed")
        TO = "to", _("copies")
        BAD_SELECTOR = "bad_selector", _("failed selectors")

    exchange = models.ForeignKey(Exchange, models.CASCADE, related_name="counts")
    worker = models.UUIDField()
    outcome = models.CharField(max_length=13, choices=Outcome, db_collation="C")
    destination = models.SmallIntegerField(default=-1)
    count = models.BigIntegerField(db_default=0)
    seconds = models.FloatField(db_default=0)
    buckets = ArrayField(models.BigIntegerField(), db_default=[])
    selector_seconds = models.FloatField(db_default=0)
    seen_at = models.DateTimeField(db_default=Now())
    missing_rules = ArrayField(models.TextField(), db_default=[])
    failing_since = models.DateTimeField(null=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["exchange", "worker", "outcome", "destination"],
                name="exchange_count_is_unique",
            )
        ]

    def __str__(self) -> str:
        return f"{self.outcome} of {self.exchange_id}"
