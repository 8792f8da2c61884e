"""Django admin: rules, nodes, topics, queues, exchanges, pipeline, web identities.

Importing a module registers its models.
"""

from psqlmessages.admin import (  # noqa: F401 - imported to register
    exchanges,
    identities,
    nodes,
    pipeline,
    queues,
    rules,
    subscriptions,
    topics,
)
