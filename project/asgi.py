"""The example project as an ASGI application: pages by Django, WebSockets by the relay."""

import os

from channels.routing import ProtocolTypeRouter
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

# Django's application comes first: it loads the apps, whose models the relay needs.
http = get_asgi_application()

from psqlmessages.relay.asgi import websocket_application  # noqa: E402

application = ProtocolTypeRouter({"http": http, "websocket": websocket_application()})
