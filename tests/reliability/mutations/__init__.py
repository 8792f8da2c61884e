"""All mutations by name: text of the installed SQL, what replaces it, the test that must fail."""

from tests.reliability.mutation import Mutation
from tests.reliability.mutations import exchanges, queues, rpc, rules, sends, streams

__all__ = ["MUTATIONS"]

MUTATIONS: dict[str, Mutation] = {
    **rules.MUTATIONS,
    **sends.MUTATIONS,
    **rpc.MUTATIONS,
    **streams.MUTATIONS,
    **queues.MUTATIONS,
    **exchanges.MUTATIONS,
}
