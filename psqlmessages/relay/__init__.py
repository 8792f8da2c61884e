"""The relay: WebSockets for application users, all of a process on one listening session."""
