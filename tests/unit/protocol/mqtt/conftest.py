import pytest

from protocol.mqtt import reconnect_delay


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session try again within half a second, however often it has failed."""
    monkeypatch.setattr(reconnect_delay, "MAX_RETRY_DELAY_S", 0.5)
