"""Selectors in code, as a project has them: imported by name on executors."""

from psqlmessages.exchanges import Env, selector


@selector("pipeline-even")
def even(env: Env) -> bool:
    return int(env.msg.body) % 2 == 0
