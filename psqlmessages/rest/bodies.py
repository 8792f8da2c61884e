"""Conversion between HTTP bodies and queue bodies. Pure functions."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from psqlmessages import wire
from psqlmessages.wire import BASE64, JSON, EncodedBody, MalformedPayload

CONTENT_TYPE: Final = "content-type"
PREFIX: Final = "x-ks-hdr-"
ALL_HEADERS: Final = "x-ks-headers"
LENGTH: Final = "x-ks-headers-length"

_DEFAULTS: Final = {
    None: "text/plain; charset=utf-8",
    JSON: "application/json",
    BASE64: "application/octet-stream",
}
# Clients may name only these: some of Python's codecs are slow, or are not text encodings.
_CHARSETS: Final = {"utf-8": "utf-8", "us-ascii": "ascii", "iso-8859-1": "latin-1"}
_TYPE: Final = re.compile(
    r"[\w!#$&^.+-]{1,100}/[\w!#$&^.+-]{1,100}(?:[ \t]*;[ -~]{0,300})?", re.ASCII
)
_CHARSET: Final = re.compile(r';\s*charset="?([\w-]+)"?', re.ASCII | re.IGNORECASE)
_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^`|~-]{1,100}")
_PRINTABLE: Final = re.compile(r"[!-~](?:[ -~]{0,1022}[!-~])?|")
_NOT_ASCII: Final = re.compile("[^ -~]")
# Clients limit headers: Python's http.client accepts 100, in lines of up to 64 KiB.
_MOST_SINGLE: Final = 40
_MOST_CHARACTERS: Final = 16 * 1024


class MalformedContent(ValueError):
    """A body or header that does not match its type; the text is a sentence."""


class _Numeral(str):
    """A number as written in JSON: PostgreSQL's numbers have more digits than Python's floats."""

    __slots__ = ()


class Content(NamedTuple):
    """The content of a response: bytes, content type and further headers."""

    data: bytes
    content_type: str
    headers: dict[str, str]


def received(data: bytes, content_type: str, given: Mapping[str, str]) -> tuple[EncodedBody, str]:
    """Parse a request; return the encoded body and the element's headers as JSON text.

    ``given`` are the request's headers by lower-case name. Raises MalformedContent.
    """
    if content_type and not _TYPE.fullmatch(content_type):
        raise MalformedContent("the content type is malformed")
    headers = _headers_of(given)
    if content_type:
        headers[CONTENT_TYPE] = content_type
    return _body_of(data, content_type), json.dumps(headers, ensure_ascii=False)


def answered(text: str, enc: str | None, headers: str) -> Content:
    """Convert an element, with its headers as JSON text, to a response; never fails."""
    values = json.loads(headers, parse_int=_Numeral, parse_float=_Numeral)
    data, content_type = _data_of(text, enc, values.get(CONTENT_TYPE))
    return Content(data, content_type, _shown(values, _ascii(headers)))


# Requests


def _body_of(data: bytes, content_type: str) -> EncodedBody:
    kind = _kind_of(content_type)
    if _is_json(kind):
        try:
            text = data.decode("utf-8")
            wire.decode(text, JSON)
        except UnicodeDecodeError as error:
            raise MalformedContent(f"the body is not valid UTF-8 at byte {error.start}") from None
        except MalformedPayload as error:
            raise MalformedContent(str(error)) from None
        return EncodedBody(text, JSON)
    charset = _charset_of(content_type)
    if kind.startswith("text/") and charset and b"\0" not in data:
        try:
            return EncodedBody(data.decode(charset))
        except UnicodeDecodeError:
            # The charset is wrong. Store the raw bytes, so that they are delivered unchanged.
            pass
    return EncodedBody(base64.b64encode(data).decode("ascii"), BASE64)


def _headers_of(given: Mapping[str, str]) -> dict[str, Any]:
    headers: Any = {}
    if ALL_HEADERS in given:
        try:
            headers = wire.decode(_utf8(ALL_HEADERS, given[ALL_HEADERS]), JSON)
        except MalformedPayload as error:
            raise MalformedContent(f"{ALL_HEADERS}: {error}") from None
        if not isinstance(headers, dict):
            raise MalformedContent(f"{ALL_HEADERS} is not a JSON object")
    for name, value in given.items():
        if name.startswith(PREFIX) and len(name) > len(PREFIX):
            headers[name.removeprefix(PREFIX)] = _utf8(name, value)
    return headers  # type: ignore[no-any-return]


def _utf8(name: str, value: str) -> str:
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise MalformedContent(f"the header {name:.100} is not UTF-8") from None


def _kind_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_json(kind: str) -> bool:
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _charset_of(content_type: str) -> str | None:
    """Return the codec of a content type; None if it is not supported."""
    found = _CHARSET.search(content_type)
    return _CHARSETS.get(found[1].lower()) if found else "utf-8"


# Responses


def _data_of(text: str, enc: str | None, given: Any) -> tuple[bytes, str]:
    is_type = isinstance(given, str) and _TYPE.fullmatch(given) is not None
    if enc == BASE64:
        try:
            return wire.decode(text, BASE64), given if is_type else _DEFAULTS[BASE64]
        except MalformedPayload:
            return text.encode(), _DEFAULTS[None]
    default = _DEFAULTS.get(enc, _DEFAULTS[None])
    if not is_type or _is_json(_kind_of(given)) != (enc == JSON):
        return text.encode(), default
    try:
        return text.encode(_charset_of(given) or "utf-8"), given
    except UnicodeEncodeError:
        return text.encode(), default


def _shown(values: Mapping[str, Any], everything: str) -> dict[str, str]:
    """Return single headers where HTTP can carry them, and all of them as JSON."""
    single: dict[str, str] = {}
    for name, value in values.items():
        shown = json.dumps(value) if value is None or isinstance(value, bool) else value
        is_sendable = isinstance(shown, str) and _PRINTABLE.fullmatch(shown)
        if name != CONTENT_TYPE and _NAME.fullmatch(name) and is_sendable:
            single[PREFIX + name] = shown
        if len(single) == _MOST_SINGLE:
            break
    if len(everything) > _MOST_CHARACTERS:
        return {**single, LENGTH: str(len(everything))}
    return {**single, ALL_HEADERS: everything}


def _ascii(text: str) -> str:
    """Escape non-ASCII characters in JSON text, and change nothing else, including numbers."""
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
