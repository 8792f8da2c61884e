"""Django admin: rules, nodes, topics, queues, exchanges, pipeline, web identities."""

from django.contrib import admin

from psqlmessages.admin.exchanges import ExchangeAdmin
from psqlmessages.admin.identities import WebIdentityAdmin
from psqlmessages.admin.nodes import ClientAdmin
from psqlmessages.admin.pipeline import PipelineJobAdmin, TrafficAdmin
from psqlmessages.admin.queues import QueueAdmin
from psqlmessages.admin.rules import AuthAdmin
from psqlmessages.admin.subscriptions import SubscriptionAdmin
from psqlmessages.admin.topics import TopicAdmin
from psqlmessages.models import (
    Auth,
    Client,
    Exchange,
    PipelineJob,
    Queue,
    Subscription,
    Topic,
    Traffic,
    WebIdentity,
)

admin.site.register(Auth, AuthAdmin)
admin.site.register(Client, ClientAdmin)
admin.site.register(Exchange, ExchangeAdmin)
admin.site.register(PipelineJob, PipelineJobAdmin)
admin.site.register(Queue, QueueAdmin)
admin.site.register(Subscription, SubscriptionAdmin)
admin.site.register(Topic, TopicAdmin)
admin.site.register(Traffic, TrafficAdmin)
admin.site.register(WebIdentity, WebIdentityAdmin)
