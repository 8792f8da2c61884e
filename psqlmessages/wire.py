"""Wire format of a notification's payload: a header (one line of JSON), then the body. No I/O."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

BASE64: Final = "b64"
JSON: Final = "json"
# The largest id of a message or element.
MAX_ID: Final = 2**63 - 1


class MalformedPayload(ValueError):
    """A payload or body does not have the format of this package."""


class Payload(NamedTuple):
    """A parsed payload: the header, and the text of the body, which is None without a body."""

    header: dict[str, Any]
    text: str | None


class MalformedText(ValueError):
    """Text is too large, or not valid UTF-8, JSON or YAML. The message begins with "it"."""

    def sentence(self, subject: str = "It") -> str:
        """Return the message as a sentence, with ``subject`` in place of "it"."""
        return f"{subject}{str(self)[2:]}."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the field {duplicate!r:.100} twice")
    return fields


# With these options, json.dumps and json.loads would create an encoder or decoder for each call.
_encoder: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_decoder: Final = json.JSONDecoder(parse_constant=_refuse_constant)
_strict_decoder: Final = json.JSONDecoder(
    parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
)


def set_json_default(default: Callable[[Any], Any]) -> None:
    """Set how this process encodes values of types that JSON lacks.

    ``default`` converts a value to one that JSON has, or raises TypeError.
    """
    _encoder.default = default  # type: ignore[assignment, method-assign]


def parse_strict_json(text: str) -> Any:
    """Parse JSON; raise MalformedText if it is invalid, or has NaN, Infinity or a field twice."""
    try:
        return _strict_decoder.decode(text)
    except RecursionError:
        raise MalformedText("it is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise MalformedText(f"it is not JSON: {error}") from None


def decode_document(document: bytes | str, max_bytes: int) -> str:
    """Decode UTF-8 without its byte order mark; raise MalformedText if invalid or too large."""
    encoded = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
    if len(encoded) > max_bytes:
        raise MalformedText(f"it has {len(encoded):,} bytes; at most {max_bytes:,} are allowed")
    try:
        return document.decode("utf-8-sig") if isinstance(document, bytes) else document
    except UnicodeDecodeError as error:
        raise MalformedText(f"it is not UTF-8 text: byte {error.start:,} is not valid") from None


def parse_number(text: str, maximum: int) -> int | None:
    """Parse a whole number without a sign. Leading zeros are allowed.

    Returns None for another text, or for a number above ``maximum``.
    """
    digits = text.lstrip("0")
    # Compare the lengths first: `int` raises ValueError for more than 4,300 digits.
    if not (text.isascii() and text.isdecimal()) or len(digits) > len(str(maximum)):
        return None
    number = int(digits or 0)
    return number if number <= maximum else None


def parse(payload: str) -> Payload:
    """Split a payload into header and body; raise MalformedPayload if it is invalid."""
    end_of_line = payload.find("\n")
    try:
        header, end = _decoder.raw_decode(payload)
    except (ValueError, RecursionError) as error:
        raise MalformedPayload(f"the first line is not JSON: {error}") from None
    if end != (end_of_line if end_of_line >= 0 else len(payload)):
        raise MalformedPayload("the first line has text after the JSON")
    if type(header) is not dict:
        raise MalformedPayload("the first line is not a JSON object")
    return Payload(header, payload[end + 1 :] if end_of_line >= 0 else None)


def serialize(header: dict[str, Any], text: str | None = None) -> str:
    """Create a payload from header and body; the reverse of :func:`parse`."""
    line = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return line if text is None else f"{line}\n{text}"


class EncodedBody(NamedTuple):
    """The text of an encoded body, and its encoding ``enc``: None, "b64" or "json"."""

    text: str
    enc: str | None = None

    @classmethod
    def of(cls, value: Any) -> EncodedBody:
        """Encode a value: str unchanged, bytes as base64, other values as JSON."""
        if isinstance(value, str):
            return cls(_check_storable(value))
        if isinstance(value, bytes | bytearray | memoryview):
            return cls(base64.b64encode(value).decode("ascii"), BASE64)
        return cls(_to_json(value), JSON)


def decode(text: str, enc: str | None) -> Any:
    """Decode a body's text; raise MalformedPayload if ``enc`` is unknown or the text is invalid."""
    if enc is None:
        return text
    try:
        if enc == JSON:
            return _decoder.decode(text)
        if enc == BASE64:
            return base64.b64decode(text, validate=True)
    except (ValueError, RecursionError) as error:
        raise MalformedPayload(f"the body is not {enc}: {error}") from None
    raise MalformedPayload(f"unknown encoding {enc!r:.100}")


def list_values(values: Iterable[Any], name: str) -> list[Any]:
    """Return an argument's values as a list; raise TypeError for str, bytes or a non-iterable."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list or another iterable of {name}, not {values!r:.100}")
    return list(values)


def encode_many(values: Iterable[Any]) -> tuple[list[str], str | None]:
    """Encode values that are sent in one call; return their texts and the encoding of all.

    If str and other JSON values are mixed, all are encoded as JSON, which receivers decode to the
    same values. Raises TypeError if bytes and other values are mixed.
    """
    values = list_values(values, "bodies")
    if all(isinstance(value, str) for value in values):
        return [_check_storable(value) for value in values], None
    bodies = [EncodedBody.of(value) for value in values]
    encodings = {body.enc for body in bodies}
    if len(encodings) <= 1:
        return [body.text for body in bodies], next(iter(encodings), None)
    if BASE64 in encodings:
        raise TypeError("bytes and other values cannot be mixed in one call: send them in two")
    return [_to_json(value) for value in values], JSON


def describe_unstorable(text: str) -> str:
    """Describe the first character that PostgreSQL cannot store in text; "" if there is none."""
    if (position := text.find("\0")) >= 0:
        return f"a NUL character at position {position}"
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate at position {error.start}"
    return ""


def _check_storable(text: str) -> str:
    if character := describe_unstorable(text):
        raise ValueError(
            f"the body has {character}, which PostgreSQL cannot store in text: send it as bytes"
        )
    return text


def _to_json(value: Any) -> str:
    try:
        text = _encoder.encode(value)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"a body of type {type(value).__name__} cannot be sent: {error}"
            " (a body must be str, bytes or a JSON value)"
        ) from None
    except RecursionError:
        raise ValueError(f"a body of type {type(value).__name__} is nested too deeply") from None
    try:
        text.encode()
    except UnicodeEncodeError:
        # UTF-8 cannot encode lone surrogates, so escape all characters that are not ASCII.
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_encoder.default)
    return text
