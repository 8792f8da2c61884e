"""The Django application."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules


class PsqlMessagesConfig(AppConfig):
    """Registers the checks and finds the handlers."""

    name = "psqlmessages"
    verbose_name = "Messages"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks, and the handlers in the ``message_handlers`` of every app."""
        from psqlmessages import checks
        from psqlmessages.install import write_settings

        checks.register()
        post_migrate.connect(write_settings, sender=self)
        autodiscover_modules("message_handlers")
