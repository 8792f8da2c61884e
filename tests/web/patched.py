"""An app of the sites under test: it sets times of the product that a busy machine would miss."""

from importlib import import_module

from django.apps import AppConfig
from django.conf import settings


class Patched(AppConfig):
    """What the setting PATCHED names: {"psqlmessages.monitor.viewer.READ_TIMEOUT_SECONDS": 60}."""

    name = "tests.web"
    label = "patched"

    def ready(self) -> None:
        for path, value in settings.PATCHED.items():
            module, _, name = path.rpartition(".")
            assert hasattr(import_module(module), name), path
            setattr(import_module(module), name, value)
