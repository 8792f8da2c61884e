"""REST API: queues, exchanges and topics over HTTP. Needs django-ninja."""
