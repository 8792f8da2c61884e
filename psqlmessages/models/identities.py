"""Web identities: which web user may act as which node."""

from typing import ClassVar

from django.conf import settings
from django.contrib.auth.models import Group
from django.db import models
from django.db.models import Q

from psqlmessages.models.names import NameField


class WebIdentity(models.Model):
    """A user, or every member of a group, may be the nodes that an ident or pattern names.

    What such a node may do then is up to the rules, as for any other.
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
