"""Selectors in code, as a project has them: imported by name on executors."""

from psqlmessages.exchanges import SelectorContext, selector


@selector("pipeline-even")
def even(env: SelectorContext) -> bool:
    return int(env.msg.body) % 2 == 0
