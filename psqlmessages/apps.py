"""The Django application."""

import sys

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class PsqlMessagesConfig(AppConfig):
    """The app. Django calls `ready` once at the start of the process."""

    name = "psqlmessages"
    verbose_name = _("Messages")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register checks, limits and signals; import the ``message_handlers`` of all apps."""
        from psqlmessages import checks, conf, silent_connections, wire
        from psqlmessages.schema import write_settings

        checks.register()
        wire.set_json_default(conf.json_default)
        silent_connections.register()
        if "daphne.server" in sys.modules:
            from psqlmessages.relay import daphne_limits

            daphne_limits.register()
        post_migrate.connect(write_settings, sender=self)
        autodiscover_modules("message_handlers")
