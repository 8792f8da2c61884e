"""A project without the package that the API needs."""

import subprocess
import sys

from tests.web.site import ROOT

PROGRAM = """
import sys

sys.modules["ninja"] = None
import django
from django.conf import settings

settings.configure(
    ROOT_URLCONF="psqlmessages.urls", ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "psqlmessages"],
)
django.setup()
from django.test import Client

for path in ("/api/q/default/orders", "/api/docs"):
    answer = Client().get(path)
    print(answer.status_code, answer.json()["detail"])
"""


def test_without_django_ninja_every_address_says_what_to_install():
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    line = "501 The API needs django-ninja: pip install 'psqlmessages[web]'.\n"
    assert told.stdout == 2 * line, told.stderr
