"""REST API: queues, exchanges and topics over HTTP. Needs django-ninja."""

from typing import Any

from django.http import HttpRequest, JsonResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt


def url_patterns() -> list[Any]:
    """Return the URL patterns below ``api/``; without django-ninja, all respond with the remedy."""
    try:
        from psqlmessages.rest.api import patterns
    except ModuleNotFoundError as error:
        if error.name not in ("ninja", "pydantic"):
            raise
        return [re_path("", _respond_not_installed)]
    return patterns()


@csrf_exempt
def _respond_not_installed(_request: HttpRequest, **_: Any) -> JsonResponse:
    detail = "The API needs django-ninja: pip install 'psqlmessages[web]'."
    return JsonResponse({"detail": detail, "err": None}, status=501)
