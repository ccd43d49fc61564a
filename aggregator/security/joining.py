"""Enrolling devices by links: making a link, and answering a device that has one."""

import hashlib
import hmac
import secrets
import time

import msgspec
from msgspec import structs

from aggregator.security.certificate_authority import Issued, issue_client, utc_now
from aggregator.security.device_keys import (
    FleetFull,
    LinkUse,
    NameTaken,
    NewCertificate,
    NewKey,
    NewLink,
    check_new,
    open_links,
    spent,
)
from aggregator.security.enrollment import Write, card_of, consistent_identity, store_key
from aggregator.security.identity import (
    identity_folder,
    mark_closed,
    open_ca,
    write_phone,
    write_revocation_list,
)
from aggregator.storage.store import Store
from aggregator.storage.stored_values import StoredLink
from protocol.errors import ConfigError, JoinRefused
from protocol.storage.keyfile import read_key, read_or_make_key
from protocol.wire.joining import (
    SECRET_BYTES,
    JoinAnswer,
    JoinLink,
    JoinRequest,
    SignedAnswer,
    proof_of,
    request_of,
    secret_id,
)
from protocol.wire.signing import public_key, sign_joined
from protocol.wire.topics import is_name

VALID_MINUTES = 15


def make_link(  # noqa: PLR0913 - every option of the command line
    store: Store,
    *,
    address: str,
    fleet: str,
    device: str = "",
    broker: str = "",
    valid_minutes: float = VALID_MINUTES,
    days: int = 1825,
    renew: bool = False,
    max_devices: int | None = None,
    write: Write | None = None,
) -> JoinLink:
    """Make a link that enrolls one device, and store it; the device chooses its name unless `device` is one.

    `address` is the dashboard's, as seen from devices; `enroll` explains the other arguments. The database
    has neither the secret nor a hash by which it could be guessed: it is derived from the signing key.

    Raises:
        ConfigError: the name is invalid or taken, the device is one too many, or too many links are open.
        StateError: the state cannot be written.
    """
    if device and not is_name(device):
        raise ConfigError(f"invalid device name {device!r}: expected 1 to 64 letters, digits, '-' or '_'")
    now_s = int(time.time())
    with consistent_identity(store, write) as carry_out:
        if device:
            new = NewCertificate(device=device, serial="0", now_s=now_s, renew=renew, max_devices=max_devices)
            check_new(store, new)
        open_ca(store.folder, fleet)  # which may fail, and the device that uses the link needs it
        key, nonce = read_or_make_key(identity_folder(store.folder) / "signing.key"), secrets.token_hex(16)
        secret = _secret(key, nonce)
        carry_out(
            NewLink(
                StoredLink(
                    id=secret_id(secret),
                    nonce=nonce,
                    device=device,
                    broker=broker,
                    days=days,
                    renew=renew,
                    expires_s=now_s + int(60 * valid_minutes),
                )
            )
        )
    return JoinLink(
        address=address.removesuffix("/"),
        fleet=fleet,
        key=public_key(key),
        name=device,
        secret=secret,
        broker=broker,
    )


def _secret(key: bytes, nonce: str) -> bytes:
    """Return the secret of a link, derived from the aggregator's private key."""
    return hmac.digest(key, f"protofleet 1 link {nonce}".encode(), hashlib.sha256)[:SECRET_BYTES]


def answer_join(
    store: Store, body: bytes, *, fleet: str, max_devices: int | None = None, write: Write | None = None
) -> tuple[str, bytes]:
    """Enroll a device that has a link, closing the fleet; return its name and the answer (`SignedAnswer`, JSON).

    The same request is answered again with the same answer.

    Raises:
        MsgspecError: the body is not a `JoinRequest` in JSON.
        JoinRefused: the link is not good for this request, or the device cannot be enrolled.
        ConfigError: its TLS key is none of a box.
        StateError: the state cannot be written.
    """
    request = msgspec.json.decode(body, type=JoinRequest)
    with consistent_identity(store, write) as carry_out:
        key = read_key(identity_folder(store.folder) / "signing.key")
        link = _link_of(store, request, key, fleet=fleet)
        if link.answer:
            return request.device, _signed(link.answer, key)
        now = utc_now()
        new = NewCertificate(
            device=request.device,
            serial="0",
            now_s=int(now.timestamp()),
            renew=link.renew,
            max_devices=max_devices,
        )
        _check_new(store, new)
        ca = open_ca(store.folder, fleet)
        issued = issue_client(ca, request.device, now=now, days=link.days, public=request.tls_key.encode())
        answer = _answer(store, request, link, ca=ca, issued=issued)
        new = structs.replace(new, serial=f"{issued.serial:x}")
        carry_out(new)
        write_phone(store.folder, request.device, issued)
        use = LinkUse(id=link.id, proof=request.proof, answer=answer)
        enrolled = NewKey(**structs.asdict(new), public=bytes.fromhex(request.key), link=use)
        store_key(store, enrolled, carry_out)
        mark_closed(store.folder)
        write_revocation_list(store, ca)
        return request.device, _signed(answer, key)


def _check_new(store: Store, new: NewCertificate) -> None:
    """Raise JoinRefused, with the words for a joining device, if it cannot be enrolled."""
    try:
        check_new(store, new)
    except NameTaken as error:
        sentence = "another device of the fleet has this name: choose another one"
        raise JoinRefused("name_taken", sentence) from error
    except FleetFull as error:
        sentence = "the fleet has as many devices as its operator allows: ask the operator"
        raise JoinRefused("fleet_full", sentence) from error


def _link_of(store: Store, request: JoinRequest, key: bytes, *, fleet: str) -> StoredLink:
    """Return the link that a request was made with; raises JoinRefused unless it is good for the request."""
    link = next((each for each in open_links(store, now_s=time.time()) if each.id == request.id), None)
    secret = _secret(key, link.nonce if link is not None else "")
    if link is None or secret_id(secret) != request.id:  # the aggregator's key was replaced
        raise spent()
    expected = proof_of(secret, request, aggregator_key=public_key(key))
    if not hmac.compare_digest(expected, request.proof) or request.fleet != fleet:
        raise JoinRefused(
            "link_damaged", "this link is damaged: copy it again, or ask the operator for a new one"
        )
    if link.proof not in ("", request.proof):
        raise spent()
    if link.device not in ("", request.device):
        sentence = f"this link is for {link.device}, not for {request.device}: use that name"
        raise JoinRefused("link_for_another_name", sentence)
    if (request.kind == "box") != bool(request.tls_key):
        raise ConfigError("expected a TLS key of a box, and none of a phone")
    return link


def _answer(store: Store, request: JoinRequest, link: StoredLink, *, ca: Issued, issued: Issued) -> str:
    device, fleet = request.device, request.fleet
    card = card_of(store, device, fleet=fleet, broker=link.broker, public=bytes.fromhex(request.key))
    is_box = request.kind == "box"
    answer = JoinAnswer(
        fleet=fleet,
        device=device,
        key=request.key,
        request=request_of(request.proof),
        aggregator_key_number=card.aggregator_key_number,
        root_key=card.root_key,
        broker=card.broker,
        ca_crt=ca.certificate.decode() if is_box else "",
        device_crt=issued.certificate.decode() if is_box else "",
    )
    return msgspec.json.encode(answer).decode()


def _signed(answer: str, key: bytes) -> bytes:
    return msgspec.json.encode(SignedAnswer(answer, sign_joined(answer, key=key).hex()))
