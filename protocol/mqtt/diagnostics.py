"""Why a broker could not be believed, or did not let us in, in words that say what to do about it. Pure."""

import ssl

from protocol.mqtt.tls import BrokerAccess, BrokerAddress

EXPIRED, NOT_YET_VALID = 10, 9
UNKNOWN_ISSUERS = frozenset({2, 18, 19, 20, 21})
WRONG_NAMES = frozenset({62, 64})
"""OpenSSL's numbers of what is wrong with a certificate (`X509_V_ERR_...`)."""

ALERTS = {
    "CERTIFICATE_REVOKED": "it was revoked; enrol this one anew",
    "CERTIFICATE_EXPIRED": "it has expired, or this machine's clock is wrong; enrol this one anew",
    "UNKNOWN_CA": "it is of another authority than the broker's; use the certificate of this fleet",
    "UNSUPPORTED_CERTIFICATE": "it is not made for connecting; use the one of an enrollment",
    "BAD_CERTIFICATE": "it cannot be read; use the one of an enrollment",
}
"""What a broker says of our certificate, by the name of the TLS alert."""

WANTED = "CERTIFICATE_REQUIRED"

NO_TLS = "give the port on which it speaks TLS, or leave --tls, --ca and --cert out"


def no_connection(error: Exception, broker: BrokerAddress, access: BrokerAccess) -> str:
    """Why a connection could not be opened."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the broker at {broker} is not believed: {_disbelief(error, broker, access)}"
    if isinstance(error, ssl.SSLError):
        return own_refusal(str(error), access) or f"the broker at {broker} {_handshake(error, access)}"
    if access.tls and isinstance(error, ConnectionResetError | BrokenPipeError):
        return f"the broker at {broker} hangs up when TLS begins; {NO_TLS}"
    return f"no broker at {broker}: {getattr(error, 'strerror', None) or error}"


def _handshake(error: ssl.SSLError, access: BrokerAccess) -> str:
    reason = error.reason or ""
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return "speaks only an old TLS; have it speak TLS 1.2 or 1.3"
    if "HANDSHAKE_FAILURE" in reason:
        return f"ends the TLS handshake: {_guess(access)}"
    return f"speaks no TLS; {NO_TLS}"


def _disbelief(error: ssl.SSLCertVerificationError, broker: BrokerAddress, access: BrokerAccess) -> str:
    whom = f"{access.ca}" if access.ca else "the system's authorities"
    if error.verify_code in UNKNOWN_ISSUERS:
        advice = "give the authority's certificate with --ca"
        if access.certificate is not None:
            advice += ", or enrol who connects and the broker with the same --state of the aggregator"
        return f"its certificate is not signed by {whom}; {advice}"
    if error.verify_code in WRONG_NAMES:
        return f"its certificate is not for {broker.host}; reach it by a name that it has, or enrol the broker anew"
    if error.verify_code == EXPIRED:
        return "its certificate has expired; enrol the broker anew, or set this machine's clock"
    if error.verify_code == NOT_YET_VALID:
        return "its certificate is not valid yet; set this machine's clock"
    return f"{error.verify_message}; give it a certificate that is made for a broker"


def own_refusal(text: str, access: BrokerAccess) -> str | None:
    """What the broker says of our certificate, as it stands in OpenSSL's words; None if it says nothing of it."""
    if WANTED in text:
        return "refused by the broker: it wants a certificate; give --cert and --key, or --enrollment"
    if access.certificate is not None:
        for alert, reason in ALERTS.items():
            if f"ALERT_{alert}" in text:
                return f"refused by the broker: the certificate {access.certificate}: {reason}"
    return None


def lost_before_answer(said: str, access: BrokerAccess) -> str:
    """Why a connection was lost before the broker answered.

    In TLS 1.3 a broker looks at our certificate only when we believe the connection to stand, and what it says then
    may be lost with it.

    Args:
        said: what OpenSSL said last; empty if it said nothing.
        access: how we wanted to be let in.
    """
    if not access.tls:
        return "the broker hangs up before it answers; where it encrypts, give --enrollment, --ca or --tls"
    return own_refusal(said, access) or f"the broker hangs up once encrypted: {_guess(access)}"


def _guess(access: BrokerAccess) -> str:
    if access.certificate is None:
        return "it probably wants a certificate; give --cert and --key, or --enrollment"
    return (
        f"it probably refuses the certificate {access.certificate}, as revoked, expired or another authority's; "
        "its log says which"
    )


def refused(code: str, access: BrokerAccess) -> str:
    """Why the broker answered with a refusal.

    Args:
        code: the broker's answer, in MQTT's words.
        access: how we wanted to be let in.
    """
    if code in {"Not authorized", "Bad user name or password"}:
        if access.username is not None:
            return f"refused by the broker: {code}; look at --username and the password"
        if access.certificate is None:
            return f"refused by the broker: {code}; it wants --username with a password, or --cert and --key"
    return f"refused by the broker: {code}"
