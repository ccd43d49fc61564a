"""Joining a fleet by a link: the link, the request with its proof, and the aggregator's answer. No I/O.

The link's secret is never sent: a request has an HMAC of its fields and the link's key under it, and the answer is
signed with that key, the aggregator's. So neither can be changed on the way, also without TLS.
"""

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
from msgspec import Meta

from protocol.errors import BadSignature, ConfigError
from protocol.wire.messages import Name, Natural, Text
from protocol.wire.signing import is_joined
from protocol.wire.topics import is_name

SECRET_BYTES = 16

MAX_ANSWER_BYTES = 64 * 1024

PATH = "/join"

Kind = Literal["phone", "box"]
"""A phone connects through the aggregator's gateway, a box to the broker."""

Hex8 = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hex32 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]
Pem = Annotated[str, Meta(max_length=16 * 1024)]


@dataclass(frozen=True, kw_only=True)
class JoinLink:
    """A link, `https://HOST/join/#...`; what follows `#` is sent to no server."""

    address: str
    """`http://HOST[:PORT]` or `https://HOST[:PORT]`, and the path of a proxy."""
    fleet: str
    key: bytes
    """The aggregator's public key."""
    name: str = ""
    """The device's; empty if the device chooses it."""
    secret: bytes = field(default=b"", repr=False)
    """Empty in an open fleet, which no device is enrolled in."""
    broker: str = ""
    """As seen from boxes; phones use the gateway."""

    def __str__(self) -> str:
        values = {"fleet": self.fleet, "key": self.key.hex(), "name": self.name}
        values |= {"secret": _base64(self.secret), "broker": self.broker}
        return f"{self.address}{PATH}/#{urlencode({name: text for name, text in values.items() if text})}"


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A device that asks to be enrolled."""

    fleet: Name
    device: Name
    kind: Kind
    key: Hex32
    """The device's public key, which verifies its uploads."""
    tls_key: Annotated[str, Meta(max_length=1024)] = ""
    """A box's public key (PEM) for its certificate at the broker."""
    id: Hex8
    """The secret's, which does not reveal it."""
    proof: Hex32


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An enrollment, in the JSON text that the aggregator signs."""

    fleet: Name
    device: Name
    key: Hex32
    request: Hex32
    """The sha256 of the request's proof: an answer to another request is none."""
    aggregator_key_number: Natural
    root_key: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    broker: Text
    ca_crt: Pem = ""
    device_crt: Pem = ""


class SignedAnswer(msgspec.Struct, frozen=True):
    """The text of a JoinAnswer and its signature."""

    answer: Annotated[str, Meta(max_length=MAX_ANSWER_BYTES)]
    signature: Hex64


def parse_link(text: str) -> JoinLink:
    """Return a link; raises ConfigError if it is none."""
    try:
        parts = urlsplit(text.strip())
        values = {name: each for name, (each, *_) in parse_qs(parts.fragment, strict_parsing=True).items()}
        secret, key = _secret(values.get("secret", "")), bytes.fromhex(values["key"])
        is_link = (
            parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
        )
        path = parts.path.removesuffix("/")
        if not is_link or not path.endswith(PATH) or len(key) != 32 or not is_name(values["fleet"]):
            raise ValueError
        if (name := values.get("name", "")) and not is_name(name):
            raise ValueError
    except (ValueError, KeyError):
        raise ConfigError(
            "expected a link as `aggregator enroll --link` prints it, https://HOST/join/#fleet=..., in quotes"
        ) from None
    return JoinLink(
        address=f"{parts.scheme}://{parts.netloc}{path.removesuffix(PATH)}",
        fleet=values["fleet"],
        key=key,
        name=name,
        secret=secret,
        broker=values.get("broker", ""),
    )


def secret_id(secret: bytes) -> str:
    return hashlib.sha256(secret).digest()[:8].hex()


def proof_of(secret: bytes, request: JoinRequest, *, aggregator_key: bytes) -> str:
    """Return the proof (hex) that a request was made with a link's secret and key, whatever proof it has."""
    tls_key = hashlib.sha256(request.tls_key.encode()).hexdigest() if request.tls_key else ""
    keys = (request.key, tls_key, aggregator_key.hex())
    text = " ".join(("protofleet 1 join", request.fleet, request.device, request.kind, *keys))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def signed_request(link: JoinLink, device: str, kind: Kind, *, key: bytes, tls_key: str = "") -> JoinRequest:
    """Return the request of a device with its public keys, and the proof that it has the link."""
    request = JoinRequest(
        fleet=link.fleet,
        device=device,
        kind=kind,
        key=key.hex(),
        tls_key=tls_key,
        id=secret_id(link.secret),
        proof="0" * 64,
    )
    return msgspec.structs.replace(request, proof=proof_of(link.secret, request, aggregator_key=link.key))


def open_answer(data: bytes, *, link: JoinLink, request: JoinRequest) -> JoinAnswer:
    """Return the aggregator's answer to a request.

    Raises:
        BadSignature: the link's key has not signed it, or it is the answer to another request.
    """
    try:
        sent = msgspec.json.decode(data, type=SignedAnswer)
        signature = bytes.fromhex(sent.signature)
        if not is_joined(sent.answer, signature, public=link.key):
            raise BadSignature(
                "the answer is not signed by the aggregator's key in the link: ask for a new link"
            )
        answer = msgspec.json.decode(sent.answer, type=JoinAnswer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadSignature(f"the answer is not an aggregator's ({error}): repeat the command") from error
    asked = (request.fleet, request.device, request.key, request_of(request.proof))
    if (answer.fleet, answer.device, answer.key, answer.request) != asked:
        raise BadSignature("the answer is to another request: repeat the command")
    return answer


def request_of(proof: str) -> str:
    """Return the `request` of the answer to a request, by its proof."""
    return hashlib.sha256(bytes.fromhex(proof)).hexdigest()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _secret(text: str) -> bytes:
    """Return a secret, empty if there is none; raises ValueError for another length."""
    try:
        secret = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError from error
    if secret and len(secret) != SECRET_BYTES:
        raise ValueError
    return secret
