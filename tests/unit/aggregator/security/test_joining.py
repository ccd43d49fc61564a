"""Join links in the state directory: their secrets, their single use, and what a killed enrollment leaves."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from aggregator.security import device_keys, joining
from aggregator.security.device_keys import MAX_LINKS
from aggregator.security.enrollment import enroll, revoke
from aggregator.security.joining import answer_join, make_link
from aggregator.security.key_rotation import rotate_key
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import JoinLinks
from protocol.errors import ConfigError, JoinRefused, StateError
from protocol.wire.joining import (
    JoinAnswer,
    JoinLink,
    JoinRequest,
    open_answer,
    parse_link,
    proof_of,
    signed_request,
)

FLEET = "orchard"
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(open_store(tmp_path / "state")) as store:
        yield store


def link_to(store: Store, device: str = "", **options: Any) -> JoinLink:
    return make_link(store, address="https://fleet.example/", fleet=FLEET, device=device, **options)


def pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def of_phone(link: JoinLink, device: str = "phone-1", key: bytes = KEY) -> JoinRequest:
    return signed_request(link, device, "phone", key=key)


def of_box(link: JoinLink, device: str = "shed-1", tls_key: str = "") -> JoinRequest:
    made = tls_key or pem(ec.generate_private_key(ec.SECP256R1()))
    return signed_request(link, device, "box", key=KEY, tls_key=made)


def answered(store: Store, link: JoinLink, request: JoinRequest, **options: Any) -> JoinAnswer:
    device, body = answer_join(store, msgspec.json.encode(request), fleet=FLEET, **options)
    assert device == request.device
    return open_answer(body, link=link, request=request)


def refused(store: Store, link: JoinLink, request: JoinRequest, **options: Any) -> str:
    """Return the reason with which a request is refused."""
    with pytest.raises(JoinRefused) as refusal:
        answered(store, link, request, **options)
    return refusal.value.reason


def phone_files(store: Store) -> set[str]:
    return {file.name for file in (store.folder / "identity" / "phones").glob("*")}


def test_link_is_text_and_closes_the_fleet_once_it_is_used(store: Store) -> None:
    link = link_to(store, "shed-1", broker="broker.example:8883,[::1]:1883")
    assert parse_link(f" {link}\n") == link
    assert parse_link(str(link).replace("/join/#", "/join#")) == link
    assert "shed-1" not in str(link).partition("#")[0]
    assert not store.keys.is_closed()
    request = of_box(link)
    answer = answered(store, link, request)
    assert answer.broker == "broker.example:8883,[::1]:1883"
    certificate = x509.load_pem_x509_certificate(answer.device_crt.encode())
    assert pem_of(certificate) == request.tls_key
    known = store.keys.get("shed-1")
    assert known is not None
    assert (known.public, known.enrolled, int(known.serial, 16)) == (KEY, True, certificate.serial_number)
    assert store.keys.is_closed()
    assert phone_files(store) == set()


def pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def test_phone_has_its_certificate_at_the_gateway(store: Store) -> None:
    """Until it is revoked, or the name is that of a box."""
    link = link_to(store)
    assert answered(store, link, of_phone(link)).device_crt == ""
    assert phone_files(store) == {"phone-1.crt", "phone-1.key"}
    key = store.folder / "identity" / "phones" / "phone-1.key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    revoke(store, "phone-1")
    assert phone_files(store) == set()
    for renewed in (of_phone, of_box):
        link = link_to(store, "phone-1", renew=True)
        answered(store, link, renewed(link, "phone-1"))
        assert bool(phone_files(store)) == (renewed is of_phone)
    link = link_to(store, "phone-1", renew=True)
    answered(store, link, of_phone(link))
    enroll(store, "phone-1", fleet=FLEET, out=None, renew=True)
    assert phone_files(store) == set()


def test_database_reveals_no_secret(store: Store, tmp_path: Path) -> None:
    link = link_to(store)
    (row,) = (store.facts.get(JoinLinks) or JoinLinks()).links
    stored = b"".join(file.read_bytes() for file in (tmp_path / "state").glob("*.sqlite*"))
    assert row.nonce.encode() in stored
    assert link.secret not in stored
    assert link.secret.hex().encode() not in stored


def test_link_is_used_by_one_key_once(store: Store) -> None:
    """Whatever comes between; the same request has the same answer."""
    link = link_to(store)
    first = of_phone(link)
    answer = answered(store, link, first)
    for other in (of_phone(link, key=OTHER_KEY), of_phone(link, "phone-2"), of_box(link)):
        assert refused(store, link, other) == "link_spent"
    assert answered(store, link, first) == answer
    assert set(store.keys.all()) == {"phone-1"}


def test_link_ends_after_its_minutes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Used or not, and its row with it."""
    unused, used = link_to(store), link_to(store, valid_minutes=2)
    request = of_phone(used)
    answered(store, used, request)
    now_s = time.time()
    for module in (joining, device_keys):
        monkeypatch.setattr(module, "time", Mock(time=lambda: now_s + 121))
    assert refused(store, used, request) == "link_spent"
    answered(store, unused, of_phone(unused, "phone-2"))
    assert len((store.facts.get(JoinLinks) or JoinLinks()).links) == 1


@pytest.mark.parametrize("moment", ["write_phone", "store_key", "mark_closed", "write_revocation_list"])
def test_killed_enrollment_is_repeated(store: Store, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same request, at whatever step it was killed; the link is then used."""
    link = link_to(store)
    request = of_phone(link)
    with monkeypatch.context() as broken:
        broken.setattr(joining, moment, Mock(side_effect=StateError("killed")))
        with pytest.raises(StateError, match="killed"):
            answered(store, link, request)
    answered(store, link, request)
    known = store.keys.get("phone-1")
    assert known is not None
    assert (known.public, known.revoked_s) == (KEY, None)
    certificate = (store.folder / "identity" / "phones" / "phone-1.crt").read_bytes()
    assert x509.load_pem_x509_certificate(certificate).serial_number == int(known.serial, 16)
    assert known.serial not in store.keys.revoked_certificates()
    assert refused(store, link, of_phone(link, key=OTHER_KEY)) == "link_spent"


def test_names_and_quotas_hold_for_links(store: Store) -> None:
    link = link_to(store, "shed-1")
    assert refused(store, link, of_phone(link, "shed-2")) == "link_for_another_name"
    answered(store, link, of_phone(link, "shed-1"))
    with pytest.raises(ConfigError, match="shed-1 is already enrolled"):
        link_to(store, "shed-1")
    free = link_to(store)
    assert refused(store, free, of_phone(free, "shed-1")) == "name_taken"
    assert refused(store, free, of_phone(free, "shed-2"), max_devices=1) == "fleet_full"
    with pytest.raises(ConfigError, match=r"1 of 1 devices \(limits\.max_devices\)"):
        link_to(store, "shed-2", max_devices=1)
    with pytest.raises(ConfigError, match="invalid device name"):
        link_to(store, "a b")
    answered(store, free, of_phone(free, "shed-2"))


def damaged(link: JoinLink) -> Iterator[JoinLink]:
    """Yield links with one other digit."""
    yield replace(link, key=bytes([link.key[0] ^ 1]) + link.key[1:])
    yield replace(link, fleet="orchbrd")


def test_damaged_link_enrolls_nothing(store: Store) -> None:
    """The device could not verify the answer. The link stays good."""
    link = link_to(store)
    for other in damaged(link):
        assert refused(store, other, of_phone(other)) == "link_damaged"
    other = replace(link, secret=bytes(16))
    assert refused(store, other, of_phone(other)) == "link_spent"
    assert store.keys.all() == {}
    answered(store, link, of_phone(link))


def test_link_of_a_replaced_key_is_spent(store: Store) -> None:
    link = link_to(store)
    rotate_key(store, fleet=FLEET)
    assert refused(store, link, of_phone(link)) == "link_spent"


@pytest.mark.parametrize(
    "tls_key",
    ["no key", pem(ec.generate_private_key(ec.SECP384R1())), pem(rsa.generate_private_key(65537, 2048))],
    ids=["text", "P-384", "RSA"],
)
def test_other_keys_get_no_certificate(store: Store, tls_key: str) -> None:
    link = link_to(store)
    with pytest.raises(ConfigError, match="expected a public key"):
        answered(store, link, of_box(link, tls_key=tls_key))
    for request in (signed_request(link, "shed-1", "box", key=KEY), of_phone(link)):
        wrong = msgspec.structs.replace(request, tls_key="" if request.kind == "box" else tls_key)
        signed = msgspec.structs.replace(wrong, proof=proof_of(link.secret, wrong, aggregator_key=link.key))
        with pytest.raises(ConfigError, match="expected a TLS key of a box"):
            answered(store, link, signed)
    assert store.keys.all() == {}


def test_open_links_are_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_keys, "MAX_LINKS", 3)
    assert MAX_LINKS > 3
    for _ in range(3):
        link_to(store)
    with pytest.raises(ConfigError, match="3 join links are open"):
        link_to(store)
