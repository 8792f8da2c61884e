"""URLs of the app: `path("", include("psqlmessages.urls"))`."""

from collections.abc import Iterable
from inspect import iscoroutinefunction

from django.db import connections, transaction
from django.urls import URLPattern, URLResolver, include, path, register_converter
from django.views.i18n import JavaScriptCatalog

from psqlmessages.models.names import NameConverter
from psqlmessages.monitor import graph, nodes, now, queues, streams, traffic, views
from psqlmessages.monitor.healthz import healthz
from psqlmessages.monitor.metrics import metrics
from psqlmessages.monitor.minutes import history_data
from psqlmessages.monitor.rule_actions import add_rule
from psqlmessages.monitor.stored_messages import stored_messages
from psqlmessages.monitor.topic_actions import send_test_message
from psqlmessages.rest import url_patterns

register_converter(NameConverter, "object_name")

app_name = "psqlmessages"

urlpatterns = [
    path("monitor/", now.now, name="monitor"),
    path("monitor/topics/", views.topics, name="monitor_topics"),
    path("monitor/topics/<object_name:name>/", views.topic, name="monitor_topic"),
    path("monitor/queues/", queues.queue, name="monitor_queues"),
    path("monitor/queues/<object_name:name>/", queues.queue, name="monitor_queue"),
    path("monitor/streams/", streams.streams, name="monitor_streams"),
    path("monitor/streams/<object_name:name>/", streams.stream, name="monitor_stream"),
    path(
        "monitor/subscriptions/<int:pk>/<str:action>/",
        streams.operate,
        name="monitor_subscription_action",
    ),
    path("monitor/nodes/", nodes.nodes, name="monitor_nodes"),
    path("monitor/nodes/<object_name:name>/", nodes.node, name="monitor_node"),
    path("monitor/exchanges/", graph.exchanges, name="monitor_exchanges"),
    path("monitor/exchanges/figures/", graph.graph_data, name="monitor_exchanges_figures"),
    path("monitor/traffic/", traffic.traffic, name="monitor_traffic"),
    path("monitor/traffic/topic/", traffic.traffic_topic, name="monitor_traffic_topic"),
    path("monitor/traffic/figures/", traffic.traffic_data, name="monitor_traffic_figures"),
    path("monitor/history/", history_data, name="monitor_history"),
    path("monitor/send/", send_test_message, name="monitor_send"),
    path("monitor/stored/", stored_messages, name="monitor_stored"),
    # Translations for the scripts: the catalogs "djangojs" of this app and of LOCALE_PATHS.
    path(
        "monitor/texts.js",
        JavaScriptCatalog.as_view(packages=["psqlmessages"]),
        name="monitor_texts",
    ),
    path("monitor/rule/", add_rule, name="monitor_rule"),
    path("healthz", healthz, name="healthz"),
    path("metrics", metrics, name="metrics"),
    path("api/", include(url_patterns())),
]


def _exempt_from_transactions(entries: Iterable[URLPattern | URLResolver]) -> None:
    """Exempt async views from ATOMIC_REQUESTS: Django cannot run them in a transaction."""
    for entry in entries:
        if isinstance(entry, URLResolver):
            _exempt_from_transactions(entry.url_patterns)
        elif iscoroutinefunction(entry.callback):
            for alias in connections:
                transaction.non_atomic_requests(using=alias)(entry.callback)


_exempt_from_transactions(urlpatterns)
