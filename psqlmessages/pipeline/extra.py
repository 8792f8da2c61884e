"""What to say where the packages of the extra psqlmessages[pipeline] are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = frozenset(
    {"adbc_driver_manager", "adbc_driver_postgresql", "py4j", "pyarrow", "pyspark"}
)


class ExtraMissing(ImportError):
    """A package that the pipeline needs is not installed."""


@contextmanager
def needs_extra() -> Iterator[None]:
    """Raise :class:`ExtraMissing`, which says what to install, where an import within fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        raise ExtraMissing(
            f"The pipeline needs {package}: pip install 'psqlmessages[pipeline]'",
            name=error.name,
        ) from error
