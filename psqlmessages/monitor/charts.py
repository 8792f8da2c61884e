"""Charts: plotly.min.js out of the installed wheel, compressed once per process."""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Final

from django.http import Http404, HttpRequest, HttpResponse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.views.decorators.http import require_safe

_FILE: Final = "plotly/package_data/plotly.min.js"
# plotly writes its rules into a <style> as it loads, which the policy forbids, unless it finds an
# element of this id and class: then the page has brought the rules itself. The style sheet of the
# maps in it is left out in the same way, by an id that each version makes anew.
_IDS: Final = re.compile(rb'document\.getElementById\("([0-9a-f]{64})"\)')
_YEAR_SECONDS: Final = 365 * 24 * 60 * 60
_LEVEL: Final = 6


@dataclass(frozen=True, slots=True)
class Script:
    """The script of a version of plotly, plain and compressed."""

    path: Path
    compressed: bytes
    etag: str
    style_ids: tuple[str, ...]


@cache
def version() -> str | None:
    """Return the version of plotly that is installed; None where none is."""
    try:
        return metadata.version("plotly")
    except metadata.PackageNotFoundError:
        return None


@cache
def script() -> Script | None:
    """Read plotly's script; None where it is not installed."""
    if version() is None:
        return None
    path = Path(str(metadata.distribution("plotly").locate_file(_FILE)))
    if not path.is_file():
        return None
    plain = path.read_bytes()
    ids = dict.fromkeys(found.decode() for found in _IDS.findall(plain))
    digest = sha256(plain).hexdigest()[:32]
    return Script(path, gzip.compress(plain, _LEVEL, mtime=0), f'W/"{digest}"', tuple(ids))


@require_safe
def plotly(request: HttpRequest, version: str) -> HttpResponse:
    """Serve plotly's script under an address of its version, so that it is fetched once."""
    found = script()
    if found is None or version != globals()["version"]():
        raise Http404("That version of plotly is not installed.")
    response = get_conditional_response(request, etag=found.etag)
    if response is None:
        accepts_gzip = "gzip" in request.headers.get("Accept-Encoding", "")
        content = found.compressed if accepts_gzip else found.path.read_bytes()
        response = HttpResponse(content, content_type="text/javascript; charset=utf-8")
        if accepts_gzip:
            response.headers["Content-Encoding"] = "gzip"
    response.headers["ETag"] = found.etag
    response.headers["Cache-Control"] = f"public, max-age={_YEAR_SECONDS}, immutable"
    patch_vary_headers(response, ["Accept-Encoding"])
    return response
