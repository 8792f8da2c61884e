"""Models of rules and web identities."""

from typing import ClassVar

from django.conf import settings
from django.contrib.auth.models import Group
from django.db import models, router
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from psqlmessages.models.names import NameField, RoleField, isolate


class RuleManager(models.Manager["Auth"]):
    """The rules. `loaddata` finds them by their natural key."""

    def get_by_natural_key(self, role: str, ident: str, type_: str, dest: str) -> "Auth":
        """Return the rule of a role, node and destination."""
        return self.get(role=role, ident=ident, type=type_, dest=dest)


class Auth(models.Model):
    """A rule. If several rules match, all their modes are allowed, with the longest timeout.

    If rules change, triggers update the rows of connected nodes in the same transaction. They skip
    rows that another transaction has locked; housekeeping updates these later. In psql, use the
    view ``messages.auth``.
    """

    class Type(models.TextChoices):
        RPC = "Rpc", "Rpc"
        TOPIC = "Topic", "Topic"
        QUEUE = "Queue", "Queue"

    class Mode(models.TextChoices):
        WRITE = "W", _("W (send)")
        READ = "R", _("R (receive)")
        BOTH = "RW", _("RW (send and receive)")
        OBSERVE = "O", _("O (observe)")
        ADMINISTER = "A", _("A (administer)")

    role = RoleField(
        help_text=_("PostgreSQL role that the rule applies to; for a group role, all its members.")
    )
    ident = NameField(help_text=_("Node name, or a prefix and * for all names that begin with it."))
    type = models.CharField(max_length=5, choices=Type, db_collation="C")
    dest = NameField(
        _("destination"),
        help_text=_("Node (Rpc), topic or queue, or a prefix and * for all that begin with it."),
    )
    mode = models.CharField(max_length=2, choices=Mode, db_collation="C")
    timeout = models.IntegerField(
        help_text=_("How long large bodies and large answers are stored, in seconds.")
    )

    objects = RuleManager()

    class Meta:
        verbose_name = _("rule")
        ordering: ClassVar = ["type", "dest", "ident", "role"]
        constraints: ClassVar = [
            # This order supports the lookup of a node's permissions.
            models.UniqueConstraint(
                fields=["ident", "type", "dest", "role"],
                name="rule_is_unique",
                violation_error_message=_(
                    "This role, node, type and destination already have a rule."
                ),
            ),
            models.CheckConstraint(
                condition=~Q(role="") & ~Q(ident="") & ~Q(dest=""), name="rule_names_are_not_empty"
            ),
            models.CheckConstraint(condition=Q(timeout__gt=0), name="rule_timeout_is_positive"),
            models.CheckConstraint(
                condition=Q(type__in=["Rpc", "Topic", "Queue"]), name="rule_type_is_known"
            ),
            models.CheckConstraint(
                condition=Q(mode__in=["W", "R", "RW", "O", "A"]), name="rule_mode_is_known"
            ),
            models.CheckConstraint(
                condition=~Q(type="Rpc") | Q(mode="W"), name="rule_for_rpc_has_mode_w"
            ),
            models.CheckConstraint(
                condition=~Q(mode="O") | Q(type="Topic"), name="rule_to_observe_is_for_a_topic"
            ),
            models.CheckConstraint(
                condition=~Q(mode="A") | Q(type="Queue"), name="rule_to_administer_is_for_a_queue"
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["type", "dest"], name="rule_by_destination"),
            models.Index(fields=["role"], name="rule_by_role"),
        ]

    def __str__(self) -> str:
        ident, dest = isolate(self.ident), isolate(self.dest)
        return f"{ident} ({self.role}): {self.mode} {self.type} {dest}"

    def natural_key(self) -> tuple[str, str, str, str]:
        """Return the fields that identify the rule, for `dumpdata --natural-primary`."""
        return self.role, self.ident, self.type, self.dest


def database() -> str:
    """Return the alias of the database that holds the rules."""
    return router.db_for_write(Auth)


class WebIdentity(models.Model):
    """Lets a user, or the members of a group, act as the nodes that ``ident`` matches.

    The permissions of these nodes come from the rules.
    """

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, null=True, blank=True, related_name="+"
    )
    group = models.ForeignKey(Group, models.CASCADE, null=True, blank=True, related_name="+")
    ident = NameField(help_text=_("Node name, or a prefix and * for all names that begin with it."))

    class Meta:
        verbose_name = _("web identity")
        verbose_name_plural = _("web identities")
        ordering: ClassVar = ["ident"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["ident", "user", "group"],
                nulls_distinct=False,
                name="web_identity_is_unique",
                violation_error_message=_("This user or group already has this node."),
            ),
            models.CheckConstraint(
                condition=Q(user__isnull=True) ^ Q(group__isnull=True),
                name="web_identity_is_of_a_user_or_a_group",
                violation_error_message=_("Choose either a user or a group."),
            ),
            models.CheckConstraint(condition=~Q(ident=""), name="web_identity_ident_is_not_empty"),
        ]

    def __str__(self) -> str:
        return f"{self.user or self.group} as {isolate(self.ident)}"
