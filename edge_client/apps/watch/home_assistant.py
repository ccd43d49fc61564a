"""Publishes a camera's answer as a sensor that Home Assistant finds by itself; nothing of an image is in it.

Source: Home Assistant, "MQTT", sections "MQTT discovery" and "Sensor" (https://www.home-assistant.io/integrations/mqtt).
"""

import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from edge_client.heads.classifier import Prediction
from protocol import __version__
from protocol.answers import HOME_ASSISTANT, UNRECOGNIZED, UNSURE
from protocol.cli import plain
from protocol.log import event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.tls import BrokerAccess, Brokers
from protocol.wire.codec import digest_of

log = logging.getLogger(__name__)

DISCOVERY = "homeassistant"


class Sensor:
    """A sensor on a broker; it is published again after each connection.

    Args:
        broker: the one that Home Assistant uses.
        access: TLS and credentials.
        device: the device's id.
        name: of the camera.
        folder: of the camera's images; each folder has a sensor of its own.
    """

    def __init__(
        self, broker: Brokers, access: BrokerAccess, *, device: str, name: str, folder: Path
    ) -> None:
        self._device, self._name = device, plain(name)
        digest = digest_of(os.fsencode(folder.resolve())).hex()[:8]
        self._id = re.sub(r"[^A-Za-z0-9_-]+", "-", f"protofleet-{device}")[:100] + f"-{digest}"
        self._lock = threading.Lock()
        online = self._outgoing("availability", b"online")
        self._retained = {online.topic: online}
        self._session = mqtt.Session(
            broker,
            client_id=self._id,
            subscriptions=(),
            on_event=self._take,
            access=access,
            will=lambda: self._outgoing("availability", b"offline"),
        )
        self._session.start()

    def announce(self, classes: Sequence[str]) -> None:
        """Publish the sensor of a head with these classes, which has no state before the first image."""
        config = _json(self._config(classes))
        self._retain(mqtt.Outgoing(f"{DISCOVERY}/sensor/{self._id}/config", config, retain=True))

    def publish(self, prediction: Prediction, classes: Sequence[str]) -> None:
        """Publish a prediction of a head with these classes."""
        self.announce(classes)
        self._retain(self._outgoing("state", _json(_state(prediction))))

    def _retain(self, outgoing: mqtt.Outgoing) -> None:
        with self._lock:
            if self._retained.get(outgoing.topic) != outgoing:
                self._retained[outgoing.topic] = outgoing
                self._session.send(outgoing)

    def close(self) -> None:
        """Publish that the camera is not watched, and disconnect."""
        self._session.stop([self._outgoing("availability", b"offline")])

    def _take(self, found: mqtt.Event) -> None:
        match found:
            case mqtt.Connected(broker=broker):
                event(log, logging.INFO, "publishing", broker=broker, sensor=self._id)
                with self._lock:
                    for outgoing in self._retained.values():
                        self._session.send(outgoing)
            case mqtt.Disconnected(reason=reason, repeated=False, broker=broker):
                event(log, logging.WARNING, reason, broker=broker)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=False):
                event(log, logging.ERROR, "publication refused by the broker", topic=topic, reason=reason)
            case BaseException():
                event(log, logging.ERROR, "nothing is published any more", reason=str(found))

    def _topic(self, channel: str) -> str:
        return f"protofleet-watch/{self._id}/{channel}"

    def _outgoing(self, channel: str, payload: bytes) -> mqtt.Outgoing:
        return mqtt.Outgoing(self._topic(channel), payload, retain=True)

    def _config(self, classes: Sequence[str]) -> dict[str, object]:
        return {
            "name": self._name,
            "unique_id": self._id,
            "device_class": "enum",
            "options": list(dict.fromkeys([*map(_sensor_state, classes), UNRECOGNIZED, UNSURE])),
            "icon": "mdi:camera-iris",
            "state_topic": self._topic("state"),
            "value_template": "{{ value_json.answer }}",
            "json_attributes_topic": self._topic("state"),
            "availability_topic": self._topic("availability"),
            "device": {
                "identifiers": [f"protofleet-{self._device}"],
                "name": self._device,
                "model": "protofleet",
            },
            "origin": {"name": "protofleet", "sw_version": __version__},
        }


def _sensor_state(answer: str) -> str:
    return f"class {answer}" if answer in HOME_ASSISTANT else answer


def _state(prediction: Prediction) -> dict[str, object]:
    label, probability = prediction.top[0]
    return {
        "answer": _sensor_state(prediction.answer),
        "label": label,
        "probability": round(probability, 4),
        "known": prediction.known,
        "prior": prediction.prior.source,
        "prior_reason": prediction.prior.reason,
    }


def _json(value: dict[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
