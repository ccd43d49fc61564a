"""A sensor of Home Assistant on a real broker: its discovery, its state, and its availability."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edge_client.cli.watch import published
from edge_client.data.class_prior import NO_PRIOR
from edge_client.data.extraction import Refusal
from edge_client.predict.classifier import Prediction
from edge_client.predict.home_assistant import Sensor
from edge_client.storage.stored_values import InstalledHead
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Received
from protocol.mqtt.tls import NO_AUTHENTICATION
from tests.support.network.brokers import Mosquitto, mosquitto, needs_mosquitto
from tests.support.network.sessions import running

pytestmark = [needs_mosquitto, pytest.mark.usefixtures("short_pauses")]

CLASSES = ("bee", "käfer")
HEAD = InstalledHead(head=b"", version=1, backbones=(), classes=CLASSES)
FOLDER = Path("/srv/camera")
ID = "protofleet-shed-1-" + hashlib.sha256(b"/srv/camera").hexdigest()[:8]
TOPIC = f"protofleet-watch/{ID}/"
CONFIG = f"homeassistant/sensor/{ID}/config"


def _prediction(label: str, probability: float = 0.9, **fields: Any) -> Prediction:
    return Prediction(top=((label, probability),), prior=NO_PRIOR, **fields)


def _sensor(address: BrokerAddress, name: str = "front door", folder: Path = FOLDER) -> Any:
    return closing(Sensor(address, NO_AUTHENTICATION, device="shed-1", name=name, folder=folder))


@pytest.fixture
def broker(address: BrokerAddress, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(address, tmp_path) as broker:
        yield broker


def _read(address: BrokerAddress, topic: str) -> str:
    """Return the retained message of a topic."""
    with running(address, f"reader {topic}", topic) as (_, heard):
        heard.wait(Connected)
        return heard.wait(Received).payload.decode()


def test_sensor_is_as_home_assistant_documents_it(address: BrokerAddress, broker: Mosquitto) -> None:
    """Its topics are those of the discovery message; after the program's end it is unavailable."""
    with running(address, "home", f"{TOPIC}#") as (_, heard):
        heard.wait(Connected)
        with _sensor(address) as sensor:
            sensor.publish(_prediction("käfer", 0.91234, known=True), CLASSES)
            config = json.loads(_read(address, CONFIG))
            state = json.loads(_read(address, config["state_topic"]))
            assert state == {"answer": "käfer", "label": "käfer", "probability": 0.9123, "known": True}
            assert _read(address, config["availability_topic"]) == "online"
            assert config["json_attributes_topic"] == config["state_topic"]
            assert config["value_template"] == "{{ value_json.answer }}"
            assert (config["device_class"], config["options"]) == ("enum", [*CLASSES, "unknown", "unsure"])
            assert config["unique_id"] == ID
            assert config["device"]["identifiers"] == ["protofleet-shed-1"]
            assert config["origin"]["name"] == "protofleet"
            sensor.publish(_prediction("bee", known=False), CLASSES)
            while b'"unknown"' not in heard.wait(Received).payload:
                pass
        while (last := heard.wait(Received)).payload != b"offline":
            pass
        assert last.topic == config["availability_topic"]


def test_sensor_is_published_again_to_a_broker_that_has_forgotten_it(
    address: BrokerAddress, broker: Mosquitto
) -> None:
    broker.stop()
    with _sensor(address) as sensor:
        sensor.publish(_prediction("bee", is_sure=False), CLASSES)
        broker.start()
        assert json.loads(_read(address, CONFIG))["name"] == "front door"
        assert json.loads(_read(address, f"{TOPIC}state"))["answer"] == "unsure"
        assert _read(address, f"{TOPIC}availability") == "online"


def test_sensor_is_available_before_the_first_image(address: BrokerAddress, broker: Mosquitto) -> None:
    """Also after a start that finds `offline` of the program before."""
    with _sensor(address):
        assert _read(address, f"{TOPIC}availability") == "online"
    assert _read(address, f"{TOPIC}availability") == "offline"
    with _sensor(address) as sensor:
        sensor.announce(CLASSES)
        assert json.loads(_read(address, CONFIG))["options"] == [*CLASSES, "unknown", "unsure"]
        assert _read(address, f"{TOPIC}availability") == "online"


def test_cameras_of_one_device_have_sensors_of_their_own(address: BrokerAddress, broker: Mosquitto) -> None:
    """Their folders distinguish them, whatever their names."""
    gate = FOLDER.with_name("gate")
    with _sensor(address, "Д") as door, _sensor(address, "?", gate) as other:
        door.publish(_prediction("bee"), CLASSES)
        other.publish(_prediction("käfer"), CLASSES)
        assert json.loads(_read(address, f"{TOPIC}state"))["label"] == "bee"
        own = hashlib.sha256(bytes(gate)).hexdigest()[:8]
        assert (
            json.loads(_read(address, f"protofleet-watch/protofleet-shed-1-{own}/state"))["label"] == "käfer"
        )


def test_predictions_are_printed_and_published_and_unusable_images_printed() -> None:
    seen: list[object] = []

    class _Sensor:
        def publish(self, prediction: Prediction, classes: tuple[str, ...]) -> None:
            seen.append((prediction, classes))

    prediction, path = _prediction("bee"), Path("a.jpg")
    stub: Any = _Sensor()
    output = published(lambda *each: seen.append(each), stub)
    output(path, prediction, HEAD)
    output(path, Refusal("broken"), HEAD)
    assert seen == [(path, prediction, HEAD), (prediction, CLASSES), (path, Refusal("broken"), HEAD)]
