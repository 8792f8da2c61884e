"""The Django application."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class PsqlMessagesConfig(AppConfig):
    name = "psqlmessages"
    verbose_name = "Messages"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from psqlmessages.install import write_settings

        post_migrate.connect(write_settings, sender=self)
