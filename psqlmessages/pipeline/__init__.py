"""The data pipeline on Spark: `session` and `register`. Needs the extra psqlmessages[pipeline]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psqlmessages.pipeline.errors import needs_extra

if TYPE_CHECKING:
    from psqlmessages.pipeline.spark_session import register, session

__all__ = ["register", "session"]


def __getattr__(name: str) -> Any:
    # Imported on first use: modules that need no Spark, such as `database`, work without the extra.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_extra():
        from psqlmessages.pipeline import spark_session
    return getattr(spark_session, name)
