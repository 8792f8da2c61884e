"""The relay: WebSockets for application users. All of a process share one listening session."""
