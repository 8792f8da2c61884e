"""ASGI application of the example project: Django serves pages, the relay serves WebSockets."""

import os

from channels.routing import ProtocolTypeRouter
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

# Create Django's application first. This loads the apps, whose models the relay imports.
http = get_asgi_application()

from psqlmessages.relay.asgi import websocket_application  # noqa: E402

application = ProtocolTypeRouter({"http": http, "websocket": websocket_application()})
