"""Error messages for failed connections to a broker: what went wrong, and what to do. Pure."""

import ssl

from protocol.mqtt.tls import BrokerAccess, BrokerAddress

_UNKNOWN_ISSUERS = {2, 18, 19, 20, 21}
_VERIFY_ERRORS = {
    9: "its certificate is not valid yet: set this machine's clock",
    10: "its certificate has expired: enroll the broker again, or set this machine's clock",
    62: "its certificate is not for {host}: use a name in it, or enroll the broker with this name",
    64: "its certificate is not for {host}: use a name in it, or enroll the broker with this name",
}
"""OpenSSL's verification errors (`X509_V_ERR_...`)."""

_GIVE_CERTIFICATE = "give --tls-cert and --tls-key, or --enrollment"
_ALERTS = {
    "CERTIFICATE_REVOKED": "it was revoked: enroll this client again",
    "CERTIFICATE_EXPIRED": "it has expired, or this machine's clock is wrong: enroll this client again",
    "UNKNOWN_CA": "it was issued by another authority than the broker's: use this fleet's certificate",
    "UNSUPPORTED_CERTIFICATE": "it is not a client certificate: use the one of an enrollment",
    "BAD_CERTIFICATE": "it cannot be read: use the one of an enrollment",
}
"""Why the broker rejects the client's certificate, by TLS alert."""

UNSPECIFIED = "Unspecified error"
"""MQTT's name of the reason code of any other error; paho's also for a connection that ends without a reason."""

_NO_TLS = "give the broker's TLS port, or omit --tls, --tls-ca and --tls-cert"

TOO_MANY_FILES = (
    "this program has so many open files and connections that its MQTT client cannot use another one, 1,024 on Linux: "
    "an aggregator of as many devices needs a broker of its own"
)


def connect_error(error: Exception, broker: BrokerAddress, access: BrokerAccess) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"cannot verify the broker at {broker}: {_verify_error(error, broker, access)}"
    if isinstance(error, ssl.SSLError):
        return _rejection(str(error), access) or f"the broker at {broker} {_tls_error(error, access)}"
    if access.tls and isinstance(error, ConnectionResetError | BrokenPipeError):
        return f"the broker at {broker} closes the connection in the TLS handshake: {_NO_TLS}"
    return f"no broker at {broker}: {getattr(error, 'strerror', None) or error}"


def _tls_error(error: ssl.SSLError, access: BrokerAccess) -> str:
    reason = error.reason or ""
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return "supports only an old TLS version: configure TLS 1.2 or 1.3 there"
    if "HANDSHAKE_FAILURE" in reason:
        return f"rejects the TLS handshake: {_likely_cause(access)}"
    return f"does not use TLS on this port: {_NO_TLS}"


def _verify_error(error: ssl.SSLCertVerificationError, broker: BrokerAddress, access: BrokerAccess) -> str:
    if error.verify_code in _UNKNOWN_ISSUERS:
        issuer = access.ca or "an authority of this system"
        enroll = ", or enroll client and broker with the same --state of the aggregator"
        return (
            f"its certificate is not signed by {issuer}: give the authority's certificate with --tls-ca"
            f"{enroll if access.certificate else ''}"
        )
    if error.verify_code in _VERIFY_ERRORS:
        return _VERIFY_ERRORS[error.verify_code].format(host=broker.host)
    return f"{error.verify_message}: give the broker a server certificate"


def _rejection(text: str, access: BrokerAccess) -> str | None:
    """Return why the broker rejects the client's certificate, from OpenSSL's error text; None for another error."""
    if "CERTIFICATE_REQUIRED" in text:
        return f"refused by the broker: it requires a certificate: {_GIVE_CERTIFICATE}"
    for alert, reason in _ALERTS.items():
        if access.certificate is not None and f"ALERT_{alert}" in text:
            return f"refused by the broker: the certificate {access.certificate}: {reason}"
    return None


def closed_before_answer(tls_error: str, access: BrokerAccess, *, was_accepted: bool) -> str:
    """Return why a connection was closed before the broker answered; `was_accepted` if an earlier one was accepted.

    In TLS 1.3 a broker checks the client's certificate after the client has finished the handshake, and its alert may
    be lost with the connection: `tls_error`, OpenSSL's last error text, is then empty.
    """
    if access.tls:
        after = f"the broker closes the connection after the TLS handshake: {_likely_cause(access)}"
        return _rejection(tls_error, access) or after
    cause = (
        "it may be starting, or its cluster has no majority"
        if was_accepted
        else "if it uses TLS, give --enrollment, --tls-ca or --tls"
    )
    return f"the broker closes the connection unanswered: {cause}"


def _likely_cause(access: BrokerAccess) -> str:
    if access.certificate is None:
        return f"it probably requires a certificate: {_GIVE_CERTIFICATE}"
    return (
        f"it probably refuses the certificate {access.certificate} as revoked, expired or another authority's: "
        "see the broker's log"
    )


def explained(code: str, *, unspecified: str = "the broker gives no reason: see its log") -> str:
    """Return MQTT's name of a reason code, or words in place of one that gives no cause."""
    return unspecified if code == UNSPECIFIED else code


def refused(code: str, access: BrokerAccess) -> str:
    """Return why the broker refused the connection, from its reason code by its MQTT name."""
    if code == UNSPECIFIED:
        return "refused by the broker without a reason: see its log"
    advice = []
    if code in {"Not authorized", "Bad user name or password"}:
        if access.username is not None:
            advice.append("check --username and the password")
        elif access.certificate is None:
            advice.append("give --username and a password, or --tls-cert and --tls-key")
    if code in {"Not authorized", "Client identifier not valid"}:
        advice.append("let it admit client ids that begin with pf- (mosquitto: clientid_prefixes)")
    return f"refused by the broker: {code}" + ": " * bool(advice) + ", or ".join(advice)
