"""Models of rules and web identities."""

from typing import ClassVar

from django.conf import settings
from django.contrib.auth.models import Group
from django.db import models
from django.db.models import Q

from psqlmessages.models.names import NameField, RoleField


class Auth(models.Model):
    """A rule. Matching rules add up: the union of their modes, the longest timeout.

    Triggers apply a change to connected nodes in the same transaction. In psql, use the view
    ``messages.auth``.
    """

    class Type(models.TextChoices):
        RPC = "Rpc", "Rpc"
        TOPIC = "Topic", "Topic"
        QUEUE = "Queue", "Queue"

    class Mode(models.TextChoices):
        WRITE = "W", "W (send)"
        READ = "R", "R (receive)"
        BOTH = "RW", "RW (send and receive)"
        OBSERVE = "O", "O (observe)"

    role = RoleField(help_text="PostgreSQL role allowed; members of a group role are allowed too.")
    ident = NameField(help_text="Node name; a prefix followed by * means all names that begin so.")
    type = models.CharField(max_length=5, choices=Type, db_collation="C")
    dest = NameField(
        "destination",
        help_text="Node (Rpc), topic or queue; a prefix followed by * means all that begin so.",
    )
    mode = models.CharField(max_length=2, choices=Mode, db_collation="C")
    timeout = models.IntegerField(
        help_text="Seconds that a body over the NOTIFY limit is kept, and that a reply token says."
    )

    class Meta:
        verbose_name = "rule"
        ordering: ClassVar = ["type", "dest", "ident", "role"]
        constraints: ClassVar = [
            # This order supports the lookup of a node's permissions.
            models.UniqueConstraint(
                fields=["ident", "type", "dest", "role"],
                name="rule_is_unique",
                violation_error_message="This role, ident, type and destination have a rule.",
            ),
            models.CheckConstraint(
                condition=~Q(role="") & ~Q(ident="") & ~Q(dest=""),
                name="rule_names_are_not_empty",
            ),
            models.CheckConstraint(condition=Q(timeout__gt=0), name="rule_timeout_is_positive"),
            models.CheckConstraint(
                condition=Q(type__in=["Rpc", "Topic", "Queue"]), name="rule_type_is_known"
            ),
            models.CheckConstraint(
                condition=Q(mode__in=["W", "R", "RW", "O"]), name="rule_mode_is_known"
            ),
            models.CheckConstraint(
                condition=~Q(type="Rpc") | Q(mode="W"), name="rule_for_rpc_has_mode_w"
            ),
            models.CheckConstraint(
                condition=~Q(mode="O") | Q(type="Topic"), name="rule_to_observe_is_for_a_topic"
            ),
        ]
        indexes: ClassVar = [
            models.Index(fields=["type", "dest"], name="rule_by_destination"),
            models.Index(fields=["role"], name="rule_by_role"),
        ]

    def __str__(self) -> str:
        return f"{self.ident} ({self.role}): {self.mode} {self.type} {self.dest}"


# Web identities: the nodes that a web user may act as.


class WebIdentity(models.Model):
    """Lets a user, or the members of a group, act as the nodes that an ident or pattern names.

    The rules decide what such a node may do, as for any other.
    """

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, null=True, blank=True, related_name="+"
    )
    group = models.ForeignKey(Group, models.CASCADE, null=True, blank=True, related_name="+")
    ident = NameField(help_text="Node name; a prefix followed by * means all names that begin so.")

    class Meta:
        verbose_name = "web identity"
        verbose_name_plural = "web identities"
        ordering: ClassVar = ["ident"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["ident", "user", "group"],
                nulls_distinct=False,
                name="web_identity_is_unique",
                violation_error_message="This user or group has this ident already.",
            ),
            models.CheckConstraint(
                condition=Q(user__isnull=True) ^ Q(group__isnull=True),
                name="web_identity_is_of_a_user_or_a_group",
                violation_error_message="Choose a user or a group: one of them, and not both.",
            ),
            models.CheckConstraint(condition=~Q(ident=""), name="web_identity_ident_is_not_empty"),
        ]

    def __str__(self) -> str:
        return f"{self.user or self.group} as {self.ident}"
