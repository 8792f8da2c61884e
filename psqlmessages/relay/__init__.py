"""The relay: WebSockets for application users. Those of a process share one listening session."""
