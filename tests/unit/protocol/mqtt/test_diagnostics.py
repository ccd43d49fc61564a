"""Reasons of the broker in words."""

from protocol.mqtt import diagnostics
from protocol.mqtt.tls import NO_AUTHENTICATION


def test_unspecified_error_is_put_into_words() -> None:
    """MQTT's name of it gives no cause; other reasons stay as they are."""
    code = "Unspecified error"
    assert diagnostics.explained(code, unspecified="the network closed it") == "the network closed it"
    assert diagnostics.explained("Keep alive timeout", unspecified="") == "Keep alive timeout"
    assert diagnostics.refused(code, NO_AUTHENTICATION).endswith("without a reason: see its log")
    assert diagnostics.explained(code) == "the broker gives no reason: see its log"
    assert diagnostics.explained("Quota exceeded") == "Quota exceeded"
