"""Certificates, passwords, addresses and options of a broker, with a real mosquitto."""

import getpass
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from aggregator.security.certificate_authority import utc_now
from protocol.cli import access_options, config_option, given_secret, read_access
from protocol.errors import ConfigError
from protocol.mqtt import diagnostics, reconnecting_session
from protocol.mqtt.client import Version
from protocol.mqtt.reconnecting_session import (
    BrokerAddress,
    Connected,
    Disconnected,
    Drained,
    Outgoing,
    Received,
)
from protocol.mqtt.tls import (
    NO_AUTHENTICATION,
    BrokerAccess,
    expiry_warning,
    open_tls,
    parse_broker,
    parse_brokers,
    readable_by_others,
    warnings,
)
from tests.support.network.brokers import Certificates, free_address, mosquitto, needs_mosquitto
from tests.support.network.sessions import leaked, listening, refusal, running

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


@contextmanager
def closed(
    address: BrokerAddress, made: Certificates, *, mutual: bool = True, more: str = ""
) -> Iterator[None]:
    options = f"{made.mosquitto(mutual=mutual)}\n{more or 'allow_anonymous false'}\nuser {getpass.getuser()}"
    with mosquitto(address, made.folder, options=options):
        yield


@needs_mosquitto
@pytest.mark.parametrize("version", [Version.MQTTv5, Version.MQTTv311])
def test_valid_certificate_connects(
    address: BrokerAddress, made: Certificates, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting_session, "VERSIONS", (version,))
    for name in ("shed-1", "shed-2"):
        made.client(name)
    with (
        closed(address, made),
        running(address, "b", "t", access=made.access("shed-1"), manual_ack=True) as (receiver, hears),
        running(address, "a", access=made.access("shed-2"), will=lambda: Outgoing("w", b"")) as (says, ear),
    ):
        hears.wait(Connected)
        ear.wait(Connected)
        for number in range(40):
            says.send(Outgoing("t", bytes([number]) + bytes(60_000)))
        for number in range(40):
            received = hears.wait(Received)
            assert received.payload[0] == number
            receiver.acknowledge(received)
        ear.wait(Drained)


@needs_mosquitto
def test_websocket_over_tls(address: BrokerAddress, made: Certificates) -> None:
    """Messages of any size arrive; a broker without WebSockets is no broker there."""
    made.client("shed-1")
    port = free_address().port
    websocket = parse_broker(f"wss://127.0.0.1:{port}/mqtt", tls=True)
    plain = "allow_anonymous true\nlistener {} 127.0.0.1\nsocket_domain ipv4\nprotocol websockets\n"
    options = plain.format(port) + made.mosquitto()
    with (
        mosquitto(address, made.folder, options=options),
        running(websocket, "a", "t", access=made.access("shed-1")) as (session, hears),
        running(replace(address, path="/mqtt"), "b") as (_, other),
    ):
        hears.wait(Connected)
        for payload in (b"small", bytes(100_000)):
            session.send(Outgoing("t", payload))
            assert hears.wait(Received).payload == payload
        assert "WebSocket" in other.wait(Disconnected).reason


@needs_mosquitto
@pytest.mark.parametrize(
    ("name", "ago_days", "said"),
    [
        ("", 0, "it (probably )?requires a certificate: give --tls-cert"),
        ("late", 200, "late.crt(: it has expired| as revoked, expired)"),
        ("revoked", 0, "revoked.crt(: it was revoked| as revoked)"),
        ("broker", 0, "broker.crt(: it is not a client certificate| as revoked)"),
        ("stranger", 0, "stranger.crt(: it was issued by another authority| as revoked)"),
    ],
)
def test_unusable_client_certificate_is_explained(
    address: BrokerAddress, made: Certificates, tmp_path: Path, name: str, ago_days: int, said: str
) -> None:
    issuer = Certificates(tmp_path / "other") if name == "stranger" else made
    if name and name != "broker":
        issued = issuer.client(name, ago_days=ago_days)
        if name == "revoked":
            made.revoke(issued.serial)
    with closed(address, made):
        assert re.search(said, refusal(address, replace(issuer.access(name), ca=made.ca)))


@needs_mosquitto
def test_unverifiable_broker_is_refused(address: BrokerAddress, made: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path / "other")
    made.client("shed-1")
    elsewhere = BrokerAddress("127.0.0.2", address.port)
    access = made.access("shed-1")
    with closed(BrokerAddress("0.0.0.0", address.port), made):  # noqa: S104 - for the other name
        assert "not signed by" in refusal(address, replace(access, ca=other.ca))
        assert "an authority of this system: give" in refusal(address, replace(access, ca=None))
        assert "its certificate is not for 127.0.0.2" in refusal(elsewhere, access)


@needs_mosquitto
def test_each_of_several_brokers_is_verified_under_its_own_name(
    address: BrokerAddress, made: Certificates
) -> None:
    made.client("shed-1")
    elsewhere = BrokerAddress("127.0.0.2", address.port)
    with (
        closed(BrokerAddress("0.0.0.0", address.port), made),  # noqa: S104 - for the other name
        running((elsewhere, address), "a", access=made.access("shed-1")) as (_, log),
    ):
        assert log.wait(Connected).broker == str(address)
        (refused,) = [each for each in log.seen if isinstance(each, Disconnected)]
        assert "its certificate is not for 127.0.0.2" in refused.reason


@needs_mosquitto
def test_expired_broker_certificate_is_refused(address: BrokerAddress, made: Certificates) -> None:
    made.broker(ago_days=200)
    with closed(address, made, mutual=False):
        assert "its certificate has expired: enroll the broker again" in refusal(address, made.access())


@contextmanager
def tls_server(certificate: Path, **options: ssl.TLSVersion) -> Iterator[BrokerAddress]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    context.set_ciphers("ALL:@SECLEVEL=0")
    for name, value in options.items():
        setattr(context, name, value)

    def answer(peer: socket.socket) -> None:
        try:
            context.wrap_socket(peer, server_side=True).close()
        except OSError:
            return

    with listening(answer) as (broker, _):
        yield broker


def test_client_certificate_cannot_serve_as_broker(made: Certificates) -> None:
    made.client("localhost")
    with tls_server(made.folder / "localhost.crt") as broker:
        said = refusal(BrokerAddress("localhost", broker.port), made.access())
    assert "unsuitable certificate purpose: give the broker a server certificate" in said


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_old_tls_version_is_refused(made: Certificates) -> None:
    old = ssl.TLSVersion.TLSv1_1
    with tls_server(made.folder / "broker.crt", minimum_version=old, maximum_version=old) as broker:
        assert "supports only an old TLS version: configure TLS 1.2" in refusal(broker, made.access())


@needs_mosquitto
def test_port_without_tls_is_explained(address: BrokerAddress, made: Certificates, tmp_path: Path) -> None:
    expected = ": give the broker's TLS port, or omit --tls"
    with mosquitto(address, tmp_path):
        assert expected in refusal(address, made.access())
    with listening(lambda peer: peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as (broker, _):
        assert expected in refusal(broker, made.access())


@needs_mosquitto
def test_password_is_checked_and_never_shown(address: BrokerAddress, made: Certificates) -> None:
    file = made.folder / "passwords"
    subprocess.run(["mosquitto_passwd", "-c", "-b", file, "shed-1", "right"], check=True, capture_output=True)
    options = f"allow_anonymous false\npassword_file {file}"
    with closed(address, made, mutual=False, more=options):
        right = replace(made.access(), username="shed-1", password="right")
        with running(address, "a", access=right) as (_, ear):
            ear.wait(Connected)
        said = refusal(address, replace(right, password="wrong"))
        assert said.startswith("refused by the broker: Not authorized: check --username and the password")
        assert "give --username and a password" in refusal(address, made.access())
    assert "right" not in repr(right)


def test_failed_handshakes_leak_nothing(made: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path / "other")
    with (
        tls_server(other.folder / "broker.crt") as broker,
        running(broker, "a", access=made.access()) as (_, ear),
    ):
        files, threads = leaked(ear)
    assert files <= 4
    assert threads <= 1


def test_verification_is_always_enabled(made: Certificates) -> None:
    made.client("shed-1")
    for access in (BrokerAccess(tls=True), made.access(), made.access("shed-1")):
        context = open_tls(access)
        assert context is not None
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert not context.hostname_checks_common_name
    assert open_tls(BrokerAccess()) is None


def test_unusable_tls_files_are_named(made: Certificates) -> None:
    for name in ("shed-1", "shed-2"):
        made.client(name)
    good = made.access("shed-1")
    assert good.key is not None
    locked = made.folder / "locked.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", good.key, "-out", locked, "-passout", "pass:secret"], check=True
    )
    text = made.folder / "text"
    text.write_text("not PEM")
    gone = made.folder / "gone"
    for access, said in (
        (replace(good, ca=gone), f"cannot read the authority's certificate {gone}: No such file"),
        (replace(good, ca=text), f"cannot use the authority's certificate {text}: expected PEM"),
        (replace(good, certificate=gone), f"cannot read {gone}: No such file"),
        (replace(good, certificate=text), f"cannot use the certificate {text} with the key"),
        (replace(good, key=gone), f"cannot read {gone}: No such file"),
        (replace(good, key=text), f"with the key {text}: expected PEM, and a key without a password"),
        (replace(good, key=locked), f"with the key {locked}: expected PEM, and a key without a password"),
        (replace(good, key=made.access("shed-2").key), "does not match the certificate"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            open_tls(access)


@pytest.mark.parametrize(
    ("text", "tls", "expected"),
    [
        ("broker.local", False, BrokerAddress("broker.local", 1883)),
        ("broker.local", True, BrokerAddress("broker.local", 8883)),
        ("broker.local:1884", True, BrokerAddress("broker.local", 1884)),
        (" 10.0.0.1:1 ", False, BrokerAddress("10.0.0.1", 1)),
        ("[::1]:1884", False, BrokerAddress("::1", 1884)),
        ("[::1]", False, BrokerAddress("::1", 1883)),
        ("[fe80::1%eth0]", True, BrokerAddress("fe80::1%eth0", 8883)),
        ("::1", False, BrokerAddress("::1", 1883)),
        ("::1", True, BrokerAddress("::1", 8883)),
        ("2001:db8::a", False, BrokerAddress("2001:db8::a", 1883)),
        ("2001:db8:0:0:0:0:0:1", False, BrokerAddress("2001:db8:0:0:0:0:0:1", 1883)),
        ("[::1:2111]", False, BrokerAddress("::1:2111", 1883)),
        ("ws://a", False, BrokerAddress("a", 80, "/mqtt")),
        ("wss://a", True, BrokerAddress("a", 443, "/mqtt")),
        ("ws://[::1]:8080/x/y?z", True, BrokerAddress("::1", 8080, "/x/y?z")),
    ],
)
def test_broker_address_is_parsed(*, text: str, tls: bool, expected: BrokerAddress) -> None:
    """An address as text is parsed to the same address."""
    assert parse_broker(text, tls=tls) == expected
    assert parse_broker(str(expected)) == expected


def test_several_broker_addresses_are_parsed() -> None:
    a, b = BrokerAddress("a", 8883), BrokerAddress("b", 1884)
    assert parse_brokers("a, b:1884,[::1]", tls=True) == (a, b, BrokerAddress("::1", 8883))
    assert parse_brokers("a,b:1884,a:8883", tls=True) == (a, b)
    for text in ("", "a,", "a,,b", "a;b"):
        with pytest.raises(ConfigError, match="expected the broker as HOST"):
            parse_brokers(text)


@pytest.mark.parametrize(
    "text",
    [
        "", ":1883", "host:", "host:x", "host:0", "host:65536", "host:-1", "host:²", "a:1:1", "[a]:1:2", "a:b", "[::1",
        "[::1]1883", "[]", "[a]", "a b", "a\nb", "a\n", "-a", 'a"b', "\u202ea", "a/mqtt", "mqtt://a", "http://a",
        "ws://a/\u202e",
    ],
)  # fmt: skip
def test_invalid_broker_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected the broker as HOST or HOST:PORT"):
        parse_broker(text)


@pytest.mark.parametrize("text", ["::1:2111", "2001:db8::1:1883", "2001:db8::5:1"])
def test_ipv6_address_that_may_end_with_a_port_needs_brackets(text: str) -> None:
    host, _, port = text.rpartition(":")
    with pytest.raises(ConfigError, match=re.escape(f"give [{host}]:{port} or [{text}]")):
        parse_broker(text)


def test_refusal_without_a_cause_names_credentials_and_client_ids() -> None:
    """A broker gives one reason for both (mosquitto: `clientid_prefixes`)."""
    password = BrokerAccess(username="a", password="b")
    for code, access, credentials, client_ids in (
        ("Not authorized", NO_AUTHENTICATION, "give --username", True),
        ("Not authorized", password, "check --username", True),
        ("Bad user name or password", password, "check --username", False),
        ("Client identifier not valid", NO_AUTHENTICATION, "", True),
        ("Server busy", NO_AUTHENTICATION, "", False),
    ):
        reason = diagnostics.refused(code, access)
        assert credentials in reason
        assert ("client ids that begin with pf-" in reason) == client_ids


def test_encrypted_websocket_needs_tls() -> None:
    with pytest.raises(ConfigError, match="give --tls, or --tls-ca"):
        parse_broker("wss://a")


@pytest.mark.parametrize(
    ("host", "tls", "warns"),
    [
        ("localhost", False, False),
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("10.0.0.1", True, False),
        ("10.0.0.1", False, True),
        ("broker.example", False, True),
    ],
)
def test_unencrypted_password_is_a_warning(*, host: str, tls: bool, warns: bool) -> None:
    said = warnings(BrokerAccess(tls=tls, username="a", password="hidden"), BrokerAddress(host))
    assert bool(said) == warns
    assert not any("hidden" in line for line in said)
    assert warnings(BrokerAccess(tls=tls), BrokerAddress(host)) == []


def test_world_readable_key_is_a_warning(made: Certificates) -> None:
    made.client("shed-1")
    access = made.access("shed-1")
    assert access.key is not None
    access.key.chmod(0o644)
    assert any(f"chmod 600 {access.key}" in line for line in warnings(access, BrokerAddress("localhost")))
    access.key.chmod(0o640)
    assert warnings(access, BrokerAddress("localhost")) == []
    assert readable_by_others(made.folder / "gone") == ""


def test_expiring_certificate_is_a_warning(made: Certificates) -> None:
    made.client("shed-1")
    access = made.access("shed-1")
    assert access.certificate is not None
    assert access.key is not None
    access.key.chmod(0o600)
    assert warnings(access, BrokerAddress("localhost")) == []
    assert expiry_warning(access.certificate, utc_now() + timedelta(days=69)) == ""
    for days, says in ((71, " expires on "), (200, " expired on ")):
        assert says in expiry_warning(access.certificate, utc_now() + timedelta(days=days))
    for name, way in (
        ("shed-1", "`aggregator enroll shed-1 --renew --out DIR`"),
        ("second-operator@orchard", "`aggregator enroll-sums --out DIR`"),
    ):
        made.client(name, ago_days=80)
        assert expiry_warning(made.folder / f"{name}.crt", utc_now()).endswith(f"renew it with {way}")
    (line,) = warnings(access, BrokerAddress("localhost"))
    assert "shed-1" in line
    page = "see docs/operations/enrollment.md#renew-certificates"
    made.client("aggregator@orchard", ago_days=80)
    assert expiry_warning(made.folder / "aggregator@orchard.crt", utc_now()).endswith(page)
    assert expiry_warning(made.ca, utc_now() + timedelta(days=365 * 25)).endswith(page)
    access.certificate.write_bytes(b"none")
    assert warnings(access, BrokerAddress("localhost")) == []


@needs_mosquitto
def test_missing_tls_option_is_explained(address: BrokerAddress, made: Certificates) -> None:
    with closed(address, made):
        assert "if it uses TLS, give --enrollment, --tls-ca or --tls" in refusal(address, BrokerAccess())


heard: list[BrokerAccess] = []


@click.command()
@config_option
@access_options
def command(**given: Any) -> None:
    """Take the options as a program does."""
    heard.append(read_access(**given))


def run(*arguments: str | Path, **environment: str) -> Result:
    variables = {f"PROTOFLEET_{name.upper()}": value for name, value in environment.items()}
    return CliRunner(env=variables).invoke(command, [*map(str, arguments)])


def access(*arguments: str | Path, **environment: str) -> BrokerAccess:
    done = run(*arguments, **environment)
    assert done.exit_code == 0, (done.output, done.exception)
    return heard.pop()


def test_authority_or_certificate_implies_tls() -> None:
    assert access() == BrokerAccess()
    assert access("--tls") == BrokerAccess(tls=True)
    assert access("--tls-ca", "ca.crt") == BrokerAccess(tls=True, ca=Path("ca.crt"))
    given = access("--tls-cert", "a.crt", "--tls-key", "a.key")
    assert given == BrokerAccess(tls=True, certificate=Path("a.crt"), key=Path("a.key"))
    assert access(tls_ca="ca.crt", username="shed-1", password="") == BrokerAccess(
        tls=True, ca=Path("ca.crt"), username="shed-1", password=""
    )


def test_password_comes_from_file_or_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("of the file \nanother line\n")
    assert access("--username", "a", password="of the environment").password == "of the environment"
    given = access("--username", "a", "--password-file", file, password="of the environment")
    assert given.password == "of the file "
    assert run("--username", "a", "--password", "secret").exit_code == 2


@pytest.mark.parametrize("text", ["secret\r\n", "\ufeffsecret\n", "secret\nof an older broker"])
def test_secret_is_the_first_line_of_its_file_or_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    """Editors add a line break, and those of Windows a byte-order mark; a secret of Kubernetes often ends with one."""
    (file := tmp_path / "password").write_bytes(text.encode())
    assert given_secret(file, variable="NONE", what="password") == "secret"
    monkeypatch.setenv("SECRET", text.removeprefix("\ufeff"))
    assert given_secret(None, variable="SECRET", what="password") == "secret"


def test_world_readable_password_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "password"
    file.write_text("secret")
    file.chmod(0o600)
    access("--username", "a", "--password-file", file)
    assert caplog.text == ""
    file.chmod(0o644)
    access("--username", "a", "--password-file", file)
    assert f"chmod 600 {file}" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tls-cert", "a.crt"], "--tls-cert and --tls-key require each other"),
        (["--tls-key", "a.key"], "--tls-cert and --tls-key require each other"),
        (["--password-file", "FILE"], "give --username"),
        (["--username", "a"], "give --password-file, or set PROTOFLEET_PASSWORD"),
    ],
)
def test_half_of_an_option_pair_is_a_usage_error(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "password").write_text("secret")
    done = run(*(argument.replace("FILE", f"{tmp_path}/password") for argument in arguments))
    assert done.exit_code == 2
    assert said in done.output


def test_unusable_password_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "password"
    for content, said in ((None, "No such file"), (b"", "is empty"), (b"\n", "is empty"), (b"\xff", "UTF-8")):
        if content is not None:
            file.write_bytes(content)
        error = run("--username", "a", "--password-file", file).exception
        assert isinstance(error, ConfigError)
        assert said in str(error)
        assert str(file) in str(error)
