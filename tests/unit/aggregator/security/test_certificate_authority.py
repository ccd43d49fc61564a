"""Tests for certificates and revocation lists, verified by the rules of X.509."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from aggregator.security.certificate_authority import (
    CA_DAYS,
    Issued,
    create_ca,
    issue_client,
    issue_server,
    revocation_list,
)
from protocol.errors import ConfigError

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
    policy = PolicyBuilder().store(Store([read(ca)]))
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
