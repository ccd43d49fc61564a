"""What the fleet's authority signs, looked at with the rules by which OpenSSL and others believe it."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from aggregator.security.pki import (
    AUTHORITY_DAYS,
    Issued,
    issue_client,
    issue_server,
    make_authority,
    revoked_list,
)
from protocol.errors import ConfigError

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> Issued:
    """A fleet's."""
    return make_authority("orchard", now=NOW)


def read(issued: Issued) -> x509.Certificate:
    """The certificate in it."""
    return x509.load_pem_x509_certificate(issued.certificate)


def test_an_authority_signs_certificates_and_no_other_authority(authority: Issued) -> None:
    """It is one, of one level, for signing alone, and lasts twenty years."""
    certificate = read(authority)
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert (usage.value.key_cert_sign, usage.value.crl_sign) == (True, True)
    assert not usage.value.digital_signature
    assert certificate.not_valid_after_utc == NOW + timedelta(days=AUTHORITY_DAYS)


@pytest.mark.parametrize("host", ["broker.example", "10.1.2.3", "fd00::1", "[fd00::2]", "shed-broker"])
def test_a_broker_is_believed_under_its_names(authority: Issued, host: str) -> None:
    """A name or an address, in a certificate for servers; under another one it is not believed."""
    issued = issue_server(authority, ["localhost", host], now=NOW, days=30)
    believer = PolicyBuilder().store(Store([read(authority)]))
    builder = believer.time(NOW + timedelta(days=29))
    try:
        wanted: x509.DNSName | x509.IPAddress = x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        wanted = x509.DNSName(host)
    assert builder.build_server_verifier(wanted).verify(read(issued), [])
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("elsewhere.example")).verify(read(issued), [])
    with pytest.raises(VerificationError):
        believer.time(NOW + timedelta(days=31)).build_server_verifier(wanted).verify(read(issued), [])


def test_a_device_has_its_name_and_connects(authority: Issued) -> None:
    """The common name is the device's, the purpose a client's and nothing else, the certificate no authority's."""
    certificate = read(issue_client(authority, "shed-1", now=NOW, days=30))
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == "shed-1"
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(read(authority))


def test_nothing_lasts_longer_than_the_authority(authority: Issued) -> None:
    """A certificate for longer ends with it."""
    certificate = read(issue_client(authority, "shed-1", now=NOW + timedelta(days=10), days=AUTHORITY_DAYS))
    assert certificate.not_valid_after_utc == read(authority).not_valid_after_utc


def test_a_clock_that_is_slow_by_hours_is_no_obstacle(authority: Issued) -> None:
    """Everything counts since yesterday."""
    for issued in (authority, issue_client(authority, "shed-1", now=NOW, days=1)):
        assert read(issued).not_valid_before_utc == NOW - timedelta(days=1)


def test_the_list_of_the_revoked(authority: Issued) -> None:
    """It is the authority's, has what was revoked and since when, and does not end before the authority does."""
    since = NOW - timedelta(days=3)
    listed = x509.load_pem_x509_crl(revoked_list(authority, {7: since, 9: NOW}, now=NOW))
    assert {one.serial_number: one.revocation_date_utc for one in listed} == {7: since, 9: NOW}
    signer = read(authority)
    assert listed.issuer == signer.subject
    assert listed.is_signature_valid(signer.public_key())  # type: ignore[arg-type]  # P-256, as of its making
    assert listed.next_update_utc == signer.not_valid_after_utc


@pytest.mark.parametrize(
    "host", ["", "broker:8883", "a b", "-a", "a-.b", "1.2.3", "http://a", "ü.example", "a" * 64]
)
def test_what_is_no_host_is_refused(authority: Issued, host: str) -> None:
    """With a line that says what was expected."""
    with pytest.raises(ConfigError, match="expected a host name or an IP address, without a port"):
        issue_server(authority, [host], now=NOW, days=1)


def test_a_name_that_is_too_long_is_refused(authority: Issued) -> None:
    """64 characters pass."""
    issue_client(authority, "a" * 64, now=NOW, days=1)
    with pytest.raises(ConfigError, match="too long for a certificate"):
        issue_client(authority, "a" * 65, now=NOW, days=1)


def test_an_authority_in_pieces_signs_nothing(authority: Issued) -> None:
    """With another key, or what is no key, there is a line and no certificate."""
    other = make_authority("orchard", now=NOW)
    for key, said in ((other.key, "another key"), (b"none", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            issue_client(Issued(authority.certificate, key, 1), "shed-1", now=NOW, days=1)


def test_no_private_key_is_shown(authority: Issued) -> None:
    """Not where a value is printed by mistake."""
    assert "PRIVATE" not in repr(authority)
