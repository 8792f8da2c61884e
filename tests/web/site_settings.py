"""Settings of the sites under test: the example project's, and what a test gives besides."""

import json
import os

from project.settings import *  # noqa: F403

# The tests' own users need no hash that is slow on purpose.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

globals().update(json.loads(os.environ.get("SITE_SETTINGS", "{}")))
