"""The addresses of the app: `path("", include("psqlmessages.urls"))`."""

from django.urls import path, register_converter

from psqlmessages.monitor import views
from psqlmessages.monitor.charts import plotly
from psqlmessages.monitor.healthz import healthz
from psqlmessages.monitor.metrics import metrics
from psqlmessages.monitor.names import TopicConverter

register_converter(TopicConverter, "topic")

app_name = "psqlmessages"

urlpatterns = [
    path("monitor/", views.topics, name="monitor"),
    path("monitor/topics/", views.topic, name="monitor_topics"),
    path("monitor/topics/<topic:name>/", views.topic, name="monitor_topic"),
    path("monitor/rule/", views.add_rule, name="monitor_rule"),
    path("monitor/plotly-<str:version>.min.js", plotly, name="monitor_plotly"),
    path("healthz", healthz, name="healthz"),
    path("metrics", metrics, name="metrics"),
]
