"""JSON documents: encoded and compressed once, for all requests."""

import gzip
import hashlib
from dataclasses import dataclass

import msgspec

_COMPRESSION = 1
"""Of gzip: a fourth of the size in a tenth of the time of its best."""


@dataclass(frozen=True)
class Document:
    """A JSON document, as sent."""

    body: bytes
    compressed: bytes
    version: str
    """Of the contents: other contents have another one."""


def make_document(value: object) -> Document:
    """Return a value as a document."""
    body = msgspec.json.encode(value)
    return Document(body, gzip.compress(body, _COMPRESSION), hashlib.sha256(body).hexdigest()[:16])
