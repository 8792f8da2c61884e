"""Settings of the example project. Environment variables change some of them.

DATABASE_URL    your database; without it, the embedded PostgreSQL is started
SECRET_KEY      without it, a key is generated and stored in .secret_key
DEBUG           "0" turns DEBUG off; all pages but /healthz then need HTTPS
ALLOWED_HOSTS   host names, separated by commas; required if DEBUG is off
PLAIN_HTTP      "1" allows HTTP if DEBUG is off, for a trial
PROXY           "1" if a proxy terminates TLS and always sets X-Forwarded-Proto
METRICS         "1" turns on /metrics, for Prometheus
"""

import os
from pathlib import Path

import dj_database_url
from csp.constants import NONE, SELF
from django.core.exceptions import ImproperlyConfigured
from django.core.management.utils import get_random_secret_key

from project.generated_secrets import read_or_generate
from project.postgres import ServerError, embedded

BASE_DIR = Path(__file__).resolve().parent.parent


def _database_url() -> str:
    if url := os.environ.get("DATABASE_URL"):
        return url
    try:
        return embedded().start().url()
    except ServerError as error:
        raise ImproperlyConfigured(str(error)) from error


def _is_on(variable: str, default: str = "0") -> bool:
    return os.environ.get(variable, default) not in ("", "0")


SECRET_KEY = os.environ.get("SECRET_KEY") or read_or_generate(
    BASE_DIR / ".secret_key", get_random_secret_key
)
DEBUG = _is_on("DEBUG", "1")
ALLOWED_HOSTS = [host for host in os.environ.get("ALLOWED_HOSTS", "").split(",") if host]

# daphne comes first, so that `manage.py runserver` is daphne's command, which serves WebSockets.
INSTALLED_APPS = [
    "daphne",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.postgres",
    "django.contrib.staticfiles",
    "csp",
    "psqlmessages",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "project.static.StaticFiles",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "project.urls"
ASGI_APPLICATION = "project.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": dj_database_url.parse(_database_url(), conn_health_checks=True)}
# Detect within about 20 s that a firewall has silently dropped a connection. Options in the URL
# take precedence.
DATABASES["default"]["OPTIONS"] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    **DATABASES["default"].get("OPTIONS", {}),
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "index"
TIME_ZONE = "UTC"

# With DEBUG, files are served from their source folders. Without DEBUG, the compressed copies of
# `collectstatic` are served.
STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / ".static"
STATICFILES_DIRS = [BASE_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}
WHITENOISE_AUTOREFRESH = WHITENOISE_USE_FINDERS = DEBUG
WHITENOISE_ALLOW_ALL_ORIGINS = False

# All pages, including the admin, load files from this server only.
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "connect-src": [SELF],
        "font-src": [SELF],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
        "base-uri": [NONE],
    }
}
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
CSRF_COOKIE_HTTPONLY = True

if not DEBUG and not _is_on("PLAIN_HTTP"):
    SECURE_SSL_REDIRECT = True
    SECURE_REDIRECT_EXEMPT = [r"^healthz$"]  # health checks bypass the proxy
    SECURE_HSTS_SECONDS = 365 * 24 * 60 * 60
    SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = True
    SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = True
if _is_on("PROXY"):
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")

PSQLMESSAGES = {"NODE": "example", "METRICS": _is_on("METRICS")}
