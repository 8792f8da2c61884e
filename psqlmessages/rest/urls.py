"""URLs of the API; if django-ninja is missing, every URL returns an error that names it."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, JsonResponse
from django.urls import path, re_path


def patterns() -> list[Any]:
    """Return the URL patterns below ``api/``."""
    try:
        from psqlmessages.rest.api import api
        from psqlmessages.rest.docs import file
    except ModuleNotFoundError as error:
        if error.name not in ("ninja", "pydantic"):
            raise
        return [re_path("", _missing)]
    return [
        path("docs/<str:version>/<str:name>", file, name="api_file"),
        path("", api.urls),
        re_path("", _nothing),
    ]


def _missing(_request: HttpRequest, **_: Any) -> JsonResponse:
    detail = "The API needs django-ninja: pip install 'psqlmessages[web]'."
    return JsonResponse({"detail": detail, "err": None}, status=501)


def _nothing(_request: HttpRequest, **_: Any) -> JsonResponse:
    return JsonResponse({"detail": "not found", "err": None}, status=404)
