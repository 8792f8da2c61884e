"""Kept bodies: those over the NOTIFY limit, until their timeout is over."""

from django.db import models


class Body(models.Model):
    """A body kept for the listeners of a topic, or for one registration (RPC and its answer).

    The table is made by ``sql/50_bodies.sql``: unlogged partitions, emptied in turn.
    """

    pk = models.CompositePrimaryKey("slot", "id")
    slot = models.SmallIntegerField()
    id = models.UUIDField()
    topic_id = models.BigIntegerField(null=True)
    client_id = models.BigIntegerField(null=True)
    expires_at = models.DateTimeField()
    header = models.TextField(db_collation="C")
    body = models.TextField()

    class Meta:
        verbose_name_plural = "bodies"

    def __str__(self) -> str:
        return f"{self.id} until {self.expires_at}"
