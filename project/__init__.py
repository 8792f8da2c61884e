"""The example project: an ordinary Django project that uses the app psqlmessages."""
