"""Conversion between HTTP bodies and bodies of elements and messages. Pure functions."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from psqlmessages import wire
from psqlmessages.rest.errors import ApiError
from psqlmessages.wire import BASE64, JSON, EncodedBody, MalformedPayload

CONTENT_TYPE: Final = "content-type"
HEADER_PREFIX: Final = "x-ks-hdr-"
# The HTTP header with all headers of an element as one JSON object. If the object is too long, a
# response has only its length.
ALL_HEADERS: Final = "x-ks-headers"
HEADERS_LENGTH: Final = "x-ks-headers-length"

# The content type of each encoding of a body; None: plain text.
_DEFAULT_TYPES: Final = {
    None: "text/plain; charset=utf-8",
    JSON: "application/json",
    BASE64: "application/octet-stream",
}
# The codec of each charset. Python has more, but some are slow, and some encode no text.
_CODECS: Final = {"utf-8": "utf-8", "us-ascii": "ascii", "iso-8859-1": "latin-1"}
_CONTENT_TYPE: Final = re.compile(
    r"[\w!#$&^.+-]{1,100}/[\w!#$&^.+-]{1,100}(?:[ \t]*;[ -~]{0,300})?", re.ASCII
)
_CHARSET: Final = re.compile(r';\s*charset="?([\w-]+)"?', re.ASCII | re.IGNORECASE)
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[!-~](?:[ -~]{0,1022}[!-~])?|")
_NOT_PRINTABLE_ASCII: Final = re.compile("[^ -~]")
# HTTP clients limit headers: Python's http.client accepts 100, in lines of up to 64 KiB.
_MAX_SINGLE_HEADERS: Final = 40
_MAX_ALL_HEADERS_CHARACTERS: Final = 16 * 1024


class _Numeral(str):
    """A JSON number as text: converting it to float would lose digits of PostgreSQL's numeric."""

    __slots__ = ()


class Content(NamedTuple):
    """The content of a response: bytes, content type and further headers."""

    data: bytes
    content_type: str
    headers: dict[str, str]


def parse_request(
    data: bytes, content_type: str, http_headers: Mapping[str, str]
) -> tuple[EncodedBody, str]:
    """Parse a request; return the encoded body, and the element's headers as JSON text.

    The names in ``http_headers`` are in lower case. Raises ApiError 400.
    """
    if content_type and not _CONTENT_TYPE.fullmatch(content_type):
        raise ApiError(400, "the content type is malformed")
    headers = _parse_headers(http_headers)
    if content_type:
        headers[CONTENT_TYPE] = content_type
    text = json.dumps(headers, ensure_ascii=False)
    if character := wire.describe_unstorable(text):
        raise ApiError(400, f"{ALL_HEADERS} has {character}")
    return _encode_body(data, content_type), text


def build_content(text: str, enc: str | None, headers: str) -> Content:
    """Convert an element's body, encoding and headers (JSON text) to a response; never fails."""
    values = json.loads(headers, parse_int=_Numeral, parse_float=_Numeral)
    data, content_type = _decode_body(text, enc, values.get(CONTENT_TYPE))
    # Escape all characters except printable ASCII; the numbers do not change.
    as_json = _NOT_PRINTABLE_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], headers)
    return Content(data, content_type, _format_headers(values, as_json))


# Requests


def _encode_body(data: bytes, content_type: str) -> EncodedBody:
    if _is_json(content_type):
        try:
            text = data.decode("utf-8")
            wire.decode(text, JSON)
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
        except MalformedPayload as error:
            raise ApiError(400, str(error)) from None
        return EncodedBody(text, JSON)
    codec = _find_codec(content_type)
    if content_type.lower().startswith("text/") and codec and b"\0" not in data:
        try:
            return EncodedBody(data.decode(codec))
        except UnicodeDecodeError:
            pass  # The charset is wrong: store the bytes below, to deliver them unchanged.
    return EncodedBody(base64.b64encode(data).decode("ascii"), BASE64)


def _parse_headers(http_headers: Mapping[str, str]) -> dict[str, Any]:
    headers: Any = {}
    if ALL_HEADERS in http_headers:
        try:
            headers = wire.decode(_decode_utf8(ALL_HEADERS, http_headers[ALL_HEADERS]), JSON)
        except MalformedPayload as error:
            raise ApiError(400, f"{ALL_HEADERS}: {error}") from None
        if not isinstance(headers, dict):
            raise ApiError(400, f"{ALL_HEADERS} is not a JSON object")
    for name, value in http_headers.items():
        if name.startswith(HEADER_PREFIX) and len(name) > len(HEADER_PREFIX):
            headers[name.removeprefix(HEADER_PREFIX)] = _decode_utf8(name, value)
    return headers  # type: ignore[no-any-return]


def _decode_utf8(name: str, value: str) -> str:
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise ApiError(400, f"the header {name:.100} is not UTF-8") from None


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _find_codec(content_type: str) -> str | None:
    """Return the codec for the charset of a content type, by default UTF-8; None if unsupported."""
    match = _CHARSET.search(content_type)
    return _CODECS.get(match[1].lower()) if match else "utf-8"


# Responses


def _decode_body(text: str, enc: str | None, stored_type: Any) -> tuple[bytes, str]:
    """Return the bytes of a body and its content type: the stored type if it fits the encoding."""
    is_valid = isinstance(stored_type, str) and _CONTENT_TYPE.fullmatch(stored_type) is not None
    if enc == BASE64:
        try:
            data = wire.decode(text, BASE64)
        except MalformedPayload:
            return text.encode(), _DEFAULT_TYPES[None]
        return data, stored_type if is_valid else _DEFAULT_TYPES[BASE64]
    default = _DEFAULT_TYPES.get(enc, _DEFAULT_TYPES[None])
    if not is_valid or _is_json(stored_type) != (enc == JSON):
        return text.encode(), default
    try:
        return text.encode(_find_codec(stored_type) or "utf-8"), stored_type
    except UnicodeEncodeError:
        return text.encode(), default


def _format_headers(values: Mapping[str, Any], as_json: str) -> dict[str, str]:
    """Return up to 40 HTTP headers with one valid value each, and one with all values as JSON.

    If the JSON is too long, return its length instead.
    """
    single: dict[str, str] = {}
    for name, value in values.items():
        text = json.dumps(value) if value is None or isinstance(value, bool) else value
        has_valid_value = isinstance(text, str) and _HEADER_VALUE.fullmatch(text)
        if name != CONTENT_TYPE and _HEADER_NAME.fullmatch(name) and has_valid_value:
            single[HEADER_PREFIX + name] = text
        if len(single) == _MAX_SINGLE_HEADERS:
            break
    if len(as_json) > _MAX_ALL_HEADERS_CHARACTERS:
        return {**single, HEADERS_LENGTH: str(len(as_json))}
    return {**single, ALL_HEADERS: as_json}
