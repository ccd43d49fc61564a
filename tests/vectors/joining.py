"""Vectors of joining: links, requests with their proofs, signed answers, and connections through the gateway."""

import json
from typing import Any

import msgspec

from protocol.errors import BadSignature, ConfigError
from protocol.wire import signing
from protocol.wire.codec import digest_of
from protocol.wire.joining import (
    JoinAnswer,
    JoinLink,
    JoinRequest,
    open_answer,
    parse_link,
    request_of,
    signed_request,
)
from tests.vectors.signatures import DEVICE, FLEET, KEYS, PUBLIC

SECRET = digest_of(b"secret of a link")[:16]
LINK = JoinLink(
    address="https://fleet.example:8443", fleet=FLEET, key=PUBLIC["first"], name=DEVICE, secret=SECRET,
    broker="broker.example:8883,[2001:db8::1]",
)  # fmt: skip
TLS_KEY = "-----BEGIN PUBLIC KEY-----\n(any text is hashed as it is)\n-----END PUBLIC KEY-----\n"
CHALLENGE = digest_of(b"challenge").hex()


def vectors() -> dict[str, Any]:
    """Return links, requests, answers and connections, valid and invalid."""
    return {
        "about": "`secret` and keys are hex. A link without `fields` is refused. `proof` is that of the other fields "
        "and `aggregator_key`, the link's. "
        "An answer is verified for the first request and the key of the first link.",
        "links": _links(),
        "requests": [
            {"secret": SECRET.hex(), "aggregator_key": LINK.key.hex(), **msgspec.to_builtins(each)}
            for each in (_request("phone"), _request("box"))
        ],
        "answers": _answers(),
        "connections": _connections(),
    }  # fmt: skip


def _links() -> list[dict[str, Any]]:
    text, bare = str(LINK), f"https://fleet.example/join/#fleet={FLEET}&key={PUBLIC['first'].hex()}"
    return [
        {"link": link, "fields": _fields(link)}
        for link in (
            text,
            bare,
            bare.replace("/join/#", "/join#"),
            bare.replace("https://fleet.example", "http://localhost:8080"),
            bare.replace("fleet.example", "fleet.example/proxied"),
            text.replace(f"key={PUBLIC['first'].hex()}", "key=00"),
            text.replace(f"fleet={FLEET}", "fleet=a/b"),
            text.replace(f"name={DEVICE}", "name=a%20b"),
            f"{bare}&secret=AAAA",
            bare.replace("https:", "ftp:"),
            bare.replace("/join/", "/other/"),
            bare.partition("#")[0],
        )
    ]


def _fields(text: str) -> dict[str, str] | None:
    try:
        link = parse_link(text)
    except ConfigError:
        return None
    return {
        "address": link.address,
        "fleet": link.fleet,
        "key": link.key.hex(),
        "name": link.name,
        "secret": link.secret.hex(),
        "broker": link.broker,
    }


def _request(kind: str) -> JoinRequest:
    if kind == "phone":
        return signed_request(LINK, DEVICE, "phone", key=PUBLIC["device"])
    return signed_request(LINK, DEVICE, "box", key=PUBLIC["device"], tls_key=TLS_KEY)


def _answers() -> list[dict[str, Any]]:
    request = _request("phone")
    right = JoinAnswer(
        fleet=FLEET, device=DEVICE, key=request.key, request=request_of(request.proof), aggregator_key_number=0,
        root_key="", broker=LINK.broker,
    )  # fmt: skip
    text = msgspec.json.encode(right).decode()
    signature = signing.sign_joined(text, key=KEYS["first"]).hex()
    numbered = msgspec.structs.replace(right, aggregator_key_number=3, root_key=PUBLIC["root"].hex())
    bodies: list[dict[str, Any]] = [
        {"answer": text, "signature": signature},
        {"answer": text.replace(",", ", "), "signature": signature},
        {"answer": text, "signature": signing.sign_joined(text, key=KEYS["second"]).hex()},
        {"answer": text, "signature": signature[:-2]},
        {"answer": text},
        *(
            _signed(each)
            for each in (
                numbered,
                msgspec.structs.replace(right, device="phone-2"),
                msgspec.structs.replace(right, fleet="other"),
                msgspec.structs.replace(right, key=PUBLIC["second"].hex()),
                msgspec.structs.replace(right, request="0" * 64),
                msgspec.structs.replace(right, root_key="00"),
            )
        ),
        {"answer": "[]", "signature": signing.sign_joined("[]", key=KEYS["first"]).hex()},
    ]
    return [{"body": json.dumps(body), "valid": _is_valid(body, request)} for body in bodies]


def _signed(answer: JoinAnswer) -> dict[str, str]:
    text = msgspec.json.encode(answer).decode()
    return {"answer": text, "signature": signing.sign_joined(text, key=KEYS["first"]).hex()}


def _is_valid(body: dict[str, Any], request: JoinRequest) -> bool:
    try:
        open_answer(json.dumps(body).encode(), link=LINK, request=request)
    except BadSignature:
        return False
    return True


def _connections() -> list[dict[str, Any]]:
    signature = signing.sign_connection(CHALLENGE, key=KEYS["device"], fleet=FLEET, device=DEVICE)
    cases = (
        (FLEET, DEVICE, CHALLENGE, "device"),
        ("other", DEVICE, CHALLENGE, "device"),
        (FLEET, "phone-2", CHALLENGE, "device"),
        (FLEET, DEVICE, "0" * 64, "device"),
        (FLEET, DEVICE, CHALLENGE, "second"),
    )
    return [
        {
            "fleet": fleet,
            "device": device,
            "challenge": challenge,
            "key": PUBLIC[key].hex(),
            "signed": f"protofleet 1 connect {fleet} {device} {challenge}",
            "signature": signature.hex(),
            "valid": signing.is_own_connection(
                challenge, signature, public=PUBLIC[key], fleet=fleet, device=device
            ),
        }
        for fleet, device, challenge, key in cases
    ]
