"""Settings of the sites under test: the example project's, and what a test gives besides."""

import json
import os

from project.settings import *  # noqa: F403
from project.settings import INSTALLED_APPS as EXAMPLE_APPS

# The tests' own users need no hash that is slow on purpose.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# Values of the product's own modules, by their full names.
PATCHED = {}
INSTALLED_APPS = [*EXAMPLE_APPS, "tests.web.patched.Patched"]

globals().update(json.loads(os.environ.get("SITE_SETTINGS", "{}")))
