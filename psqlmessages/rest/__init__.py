"""REST: queues, exchanges and topics over HTTP, with waiting readers. Needs django-ninja."""
