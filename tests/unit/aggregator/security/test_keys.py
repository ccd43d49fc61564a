"""Keys and certificates: replacing the aggregator's signing key, and the CA by the rules of X.509."""

import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from unittest.mock import patch

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, VerificationError
from cryptography.x509.verification import Store as TrustedCAs

from aggregator.messaging.manifest_signer import ManifestSigner, identity_of
from aggregator.security import key_rotation
from aggregator.security.certificate_authority import (
    CA_DAYS,
    Issued,
    create_ca,
    issue_client,
    issue_server,
    revocation_list,
)
from aggregator.security.enrollment import enroll
from aggregator.security.key_rotation import certificate_chain, issue_key, key_certificates, rotate_key
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SigningKey
from edge_client.core.manifest_trust import (
    Identity,
    ManifestTrust,
    UntrustedManifest,
    verify,
    with_operator_key,
)
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError
from protocol.wire.signing import open_manifest, public_key
from tests.support.messages.manifests import signed_manifest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = open_store(tmp_path / "state")
    identity_of(made.folder)
    yield made
    made.close()


def seen_by(device: ManifestTrust, store: Store) -> ManifestTrust:
    """Return a device's trust after a start of the aggregator."""
    signer = ManifestSigner(store, key=identity_of(store.folder), fleet="barn")
    payload = signer.sign("task", b"task")
    signer.keep()
    return verify(device, "task", open_manifest(payload, fleet="barn", channel="task"))


def _pass_s(seconds: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Set the clock forward: certificates are numbered by the second."""
    later_s = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: later_s)
    return later_s


def test_devices_follow_a_key_that_the_old_one_has_signed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Once and again; one that was away, a new one, and an enrolled one."""
    device = away = seen_by(ManifestTrust(), store)
    for _ in range(2):
        public = rotate_key(store, fleet="barn")
        assert public == public_key(identity_of(store.folder)) != device.key
        device = seen_by(device, store)
        assert device.key == public
    assert seen_by(away, store).key == seen_by(ManifestTrust(), store).key == public
    assert not caplog.messages  # devices need no visit
    identity = store.folder / "identity"
    assert {stat.S_IMODE(file.stat().st_mode) for file in identity.glob("*key*")} == {0o600}


def test_a_device_that_missed_every_replacement_follows(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the last one without a root key, and after those that the root key signed, of which one is sent."""
    monkeypatch.setattr(key_rotation, "MAX_KEY_CERTIFICATES", 14)
    away = seen_by(ManifestTrust(), store)
    for _ in range(12):
        public = rotate_key(store, fleet="barn")
    assert seen_by(away, store).key == public
    with pytest.raises(ConfigError, match=r"replaced 12 times.*aggregator issue-key"):
        rotate_key(store, fleet="barn")
    for number in range(3):
        _pass_s(60, monkeypatch)
        issue_key(tmp_path / "root.key", fleet="barn", out=tmp_path / f"new-{number}")
        public = rotate_key(store, fleet="barn", issued=tmp_path / f"new-{number}")
        introduced = seen_by(away, store)
        assert introduced.key == seen_by(ManifestTrust(), store).key == public
    certificates = key_certificates(store.folder, public)
    assert (len(certificates), len(certificate_chain(certificates))) == (16, 14)
    assert seen_by(introduced, store).number == certificates[-1].number


def test_a_root_key_that_is_kept_elsewhere_replaces_a_stolen_key(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was named once, only its keys are accepted, and the command says so."""
    device = seen_by(ManifestTrust(), store)
    for number in (1, 2):
        root = issue_key(tmp_path / "stick" / "root.key", fleet="barn", out=tmp_path / f"new-{number}")
        public = rotate_key(store, fleet="barn", issued=tmp_path / f"new-{number}")
        device = seen_by(device, store)
        assert (device.key, device.root) == (public, root)
        with pytest.raises(ConfigError, match="aggregator issue-key"):
            rotate_key(store, fleet="barn")
        _pass_s(1, monkeypatch)
    assert not list(store.folder.rglob("root*"))
    with pytest.raises(ConfigError, match="was issued before the current key"):
        rotate_key(store, fleet="barn", issued=tmp_path / "new-1")
    issue_key(tmp_path / "other.key", fleet="barn", out=tmp_path / "other")
    with pytest.raises(ConfigError, match="is signed with the root key"):
        rotate_key(store, fleet="barn", issued=tmp_path / "other")
    issue_key(tmp_path / "stick" / "root.key", fleet="shed", out=tmp_path / "shed")
    with pytest.raises(ConfigError, match="no valid certificate for fleet 'barn'"):
        rotate_key(store, fleet="barn", issued=tmp_path / "shed")
    enroll(store, "cam", fleet="barn", out=tmp_path / "cam")
    card = read_enrollment(tmp_path / "cam")
    assert (card.aggregator_key, card.root_key) == (public, root)
    enrolled = with_operator_key(
        ManifestTrust(), Identity(card.aggregator_key, card.aggregator_key_number, card.root_key)
    )
    assert seen_by(enrolled, store).number == device.number


def test_the_greatest_number_of_a_stolen_key_does_not_outlast_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thief signs the greatest release, in the far future; devices follow the key that replaces the stolen one."""
    device = seen_by(ManifestTrust(), store)
    issue_key(tmp_path / "root.key", fleet="barn", out=tmp_path / "new-1")
    rotate_key(store, fleet="barn", issued=tmp_path / "new-1")
    stolen, greatest = identity_of(store.folder), 2**63 - 1
    forged = signed_manifest(
        b"forged",
        key=stolen,
        fleet="barn",
        channel="task",
        release=greatest,
        issued_s=greatest,
        expires_s=greatest,
        certificates=key_certificates(store.folder, public_key(stolen)),
    )
    signer = ManifestSigner(store, key=stolen, fleet="barn")
    assert signer.has_signed("task", forged)  # as found on the broker
    signer.sign("task", b"task")
    signer.keep()
    device = verify(device, "task", open_manifest(forged, fleet="barn", channel="task"))
    assert (device.key, device.seen["task"][0]) == (public_key(stolen), greatest)
    later_s = _pass_s(1, monkeypatch)
    issue_key(tmp_path / "root.key", fleet="barn", out=tmp_path / "new-2")
    public = rotate_key(store, fleet="barn", issued=tmp_path / "new-2")
    device = seen_by(device, store)
    assert (device.key, device.issued_s) == (public, int(later_s))
    with pytest.raises(UntrustedManifest):
        verify(device, "task", open_manifest(forged, fleet="barn", channel="task"))


def test_an_interrupted_rotation_changes_nothing(store: Store) -> None:
    """Certificates without their key are not published; the next rotation works."""
    device = seen_by(ManifestTrust(), store)
    with (
        patch.object(key_rotation, "write_private", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        rotate_key(store, fleet="barn")
    assert seen_by(device, store).number == 0
    assert seen_by(device, store).key == device.key
    public = rotate_key(store, fleet="barn")
    assert seen_by(device, store).key == public


@pytest.mark.parametrize("again", ["start", "command"])
@pytest.mark.parametrize("has_root", [False, True], ids=["old key", "root key"])
def test_a_rotation_killed_before_the_database_is_finished(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    again: str, *, has_root: bool,
) -> None:  # fmt: skip
    """The next start stores the key that devices can follow, without a warning; the same command succeeds."""
    device = seen_by(ManifestTrust(), store)
    issued, root = tmp_path / "new" if has_root else None, ""
    if issued is not None:
        root = issue_key(tmp_path / "root.key", fleet="barn", out=issued).hex()
    with (
        patch.object(key_rotation, "SigningKey", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        rotate_key(store, fleet="barn", issued=issued)
    key = identity_of(store.folder)
    if again == "command":
        public = rotate_key(store, fleet="barn", issued=issued)
        assert (public == public_key(key)) is has_root
        assert len(key_certificates(store.folder, public)) == 2
        key = identity_of(store.folder)
        assert store.facts.get(SigningKey) == SigningKey(public_key(key).hex(), root)
    device = seen_by(device, store)
    assert device.key == public_key(key)
    assert store.facts.get(SigningKey) == SigningKey(public_key(key).hex(), root)
    assert not caplog.messages


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def ca() -> Issued:
    return create_ca("orchard", now=NOW)


def read(issued: Issued) -> x509.Certificate:
    return x509.load_pem_x509_certificate(issued.certificate)


def test_ca_signs_certificates_but_no_other_ca(ca: Issued) -> None:
    """It is critical that it is a CA of path length 0, for signing only; it is valid for twenty years."""
    certificate = read(ca)
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert (usage.value.key_cert_sign, usage.value.crl_sign) == (True, True)
    assert not usage.value.digital_signature
    assert certificate.not_valid_after_utc == NOW + timedelta(days=CA_DAYS)


@pytest.mark.parametrize("host", ["broker.example", "10.1.2.3", "fd00::1", "[fd00::2]", "shed-broker"])
def test_server_certificate_is_valid_for_its_hosts(ca: Issued, host: str) -> None:
    """For a name or an address; not for another host, nor after its end."""
    issued = issue_server(ca, ["localhost", host], now=NOW, days=30)
    policy = PolicyBuilder().store(TrustedCAs([read(ca)]))
    builder = policy.time(NOW + timedelta(days=29))
    try:
        wanted: x509.DNSName | x509.IPAddress = x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        wanted = x509.DNSName(host)
    assert builder.build_server_verifier(wanted).verify(read(issued), [])
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("elsewhere.example")).verify(read(issued), [])
    with pytest.raises(VerificationError):
        policy.time(NOW + timedelta(days=31)).build_server_verifier(wanted).verify(read(issued), [])


def test_client_certificate_names_device(ca: Issued) -> None:
    """The common name is the device's, the purpose is client authentication only, and it is no CA."""
    certificate = read(issue_client(ca, "shed-1", now=NOW, days=30))
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == "shed-1"
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(read(ca))


def test_certificate_ends_with_ca(ca: Issued) -> None:
    """A longer validity that was requested is cut."""
    certificate = read(issue_client(ca, "shed-1", now=NOW + timedelta(days=10), days=CA_DAYS))
    assert certificate.not_valid_after_utc == read(ca).not_valid_after_utc


@pytest.mark.parametrize("years", [-30, 30])
def test_ca_that_was_created_by_a_wrong_clock_issues_nothing(ca: Issued, years: int) -> None:
    """A certificate of it would have expired already, or be valid in years."""
    now = NOW + timedelta(days=365 * years)
    with pytest.raises(ConfigError, match=r"valid from 2026-11-20 to 2046-11-16.* set the clock"):
        issue_client(ca, "shed-1", now=now, days=30)
    with pytest.raises(ConfigError, match="set the clock"):
        issue_server(ca, ["broker.example"], now=now, days=30)


def test_validity_starts_a_day_before_issue(ca: Issued) -> None:
    """Devices with a slow clock accept it."""
    for issued in (ca, issue_client(ca, "shed-1", now=NOW, days=1)):
        assert read(issued).not_valid_before_utc == NOW - timedelta(days=1)


def test_revocation_list_is_signed_and_valid_as_long_as_ca(ca: Issued) -> None:
    """It has the serial numbers with their times."""
    since = NOW - timedelta(days=3)
    ahead = NOW + timedelta(days=400)  # a clock that has been set wrong since
    listed = x509.load_pem_x509_crl(revocation_list(ca, {7: since, 9: NOW}, now=ahead))
    assert {one.serial_number: one.revocation_date_utc for one in listed} == {7: since, 9: NOW}
    signer = read(ca)
    assert listed.issuer == signer.subject
    assert listed.is_signature_valid(signer.public_key())  # type: ignore[arg-type]  # P-256
    assert listed.last_update_utc == signer.not_valid_before_utc
    assert listed.next_update_utc == signer.not_valid_after_utc


@pytest.mark.parametrize(
    "host", ["", "broker:8883", "a b", "-a", "a-.b", "1.2.3", "http://a", "ü.example", "a" * 64]
)
def test_invalid_host_is_refused(ca: Issued, host: str) -> None:
    with pytest.raises(ConfigError, match="expected a host name or an IP address, without a port"):
        issue_server(ca, [host], now=NOW, days=1)


def test_name_over_64_characters_is_refused(ca: Issued) -> None:
    """A name of 64 characters is accepted."""
    issue_client(ca, "a" * 64, now=NOW, days=1)
    with pytest.raises(ConfigError, match="too long for a certificate"):
        issue_client(ca, "a" * 65, now=NOW, days=1)


def test_damaged_ca_is_an_error(ca: Issued) -> None:
    """Its key is another CA's, or no key at all."""
    other = create_ca("orchard", now=NOW)
    for key, said in ((other.key, "do not match"), (b"none", "cannot read")):
        with pytest.raises(ConfigError, match=said):
            issue_client(Issued(ca.certificate, key), "shed-1", now=NOW, days=1)


def test_repr_has_no_private_key(ca: Issued) -> None:
    """A logged value must not disclose it."""
    assert "PRIVATE" not in repr(ca)
