"""Settings: what the Django setting PSQLMESSAGES may hold, with the defaults."""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Settings:
    """The settings of psqlmessages; docs/settings.md says what each is for."""

    MAX_BODY_BYTES: int = 64 * MIB

    def __post_init__(self) -> None:
        if not 8 * KIB <= self.MAX_BODY_BYTES <= 512 * MIB:
            raise ImproperlyConfigured(
                f"PSQLMESSAGES['MAX_BODY_BYTES'] is {self.MAX_BODY_BYTES}: "
                f"it must lie between {8 * KIB} and {512 * MIB}."
            )


@cache
def get_settings() -> Settings:
    """Read the setting PSQLMESSAGES. Unknown keys raise ImproperlyConfigured."""
    given: dict[str, Any] = getattr(settings, "PSQLMESSAGES", {})
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(given) - known):
        raise ImproperlyConfigured(
            f"PSQLMESSAGES has unknown keys {unknown}; the known ones are {sorted(known)}."
        )
    return Settings(**given)


def _forget_settings(*, setting: str, **_: Any) -> None:
    if setting == "PSQLMESSAGES":
        get_settings.cache_clear()


setting_changed.connect(_forget_settings)
