import threading
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from protocol.mqtt.client import stop_thread
from protocol.mqtt.tls import BrokerAddress
from tests.support.network.brokers import mosquitto, needs_mosquitto


@needs_mosquitto
def test_thread_that_ends_while_it_is_stopped(
    address: BrokerAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paho looks for the thread, and then for the current one; by then, the first has ended."""
    with mosquitto(address, tmp_path):
        client = paho.Client(CallbackAPIVersion.VERSION2)
        client.connect(address.host, address.port)
        client.loop_start()
        (thread,) = (each for each in threading.enumerate() if each.name.startswith("paho-mqtt-client"))
        current = threading.current_thread

        def after_the_end() -> threading.Thread:
            if threading.get_ident() != thread.ident:
                monkeypatch.undo()
                client.disconnect()
                thread.join()
            return current()

        monkeypatch.setattr(threading, "current_thread", after_the_end)
        stop_thread(client)
        assert not thread.is_alive()
