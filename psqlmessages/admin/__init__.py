"""The admin: rules, nodes, topics, subscriptions, and which web user may be which node."""

from django.contrib import admin

from psqlmessages.admin.clients import ClientAdmin
from psqlmessages.admin.identities import WebIdentityAdmin
from psqlmessages.admin.rules import AuthAdmin
from psqlmessages.admin.subscriptions import SubscriptionAdmin
from psqlmessages.admin.topics import TopicAdmin
from psqlmessages.models import Auth, Client, Subscription, Topic, WebIdentity

admin.site.register(Auth, AuthAdmin)
admin.site.register(Client, ClientAdmin)
admin.site.register(Subscription, SubscriptionAdmin)
admin.site.register(Topic, TopicAdmin)
admin.site.register(WebIdentity, WebIdentityAdmin)
