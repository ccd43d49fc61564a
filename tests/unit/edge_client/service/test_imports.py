"""Modules that the service of the device loads: no library that decodes images or opens graphs."""

from pathlib import Path

import pytest

from tests.support.devices.device_factory import CLASSES, write_images
from tests.support.imports import loaded_modules

SERVICE = """
from pathlib import Path

from edge_client.core.state import Mode
from edge_client.config import Settings
from edge_client.service.device import Device
from edge_client.store.device_state import DeviceState
from protocol.mqtt.tls import parse_brokers

nobody = parse_brokers("127.0.0.1:1", tls=False)
settings = Settings(broker=nobody, fleet="lab", device_id="press-7", mode=Mode.SERVICE, data=Path("images"))
device = Device(settings, DeviceState(Path("state"), lock=True))
device.stop()
device.run()
"""

STATUS = """
from pathlib import Path

from edge_client.cli import cli
from edge_client.store.device_state import DeviceState

DeviceState(Path("state")).close()
cli.main(["status", "--state", "state"], standalone_mode=False)
"""

SCAN = f"""
from pathlib import Path

from edge_client.images.file_ages import FileAges
from edge_client.prototypes.holdout import held_out
from edge_client.images.images import scan_images

images = scan_images(Path("images"), {CLASSES}).images
FileAges().update(images)
assert held_out(images, 0.2)
"""

EMBEDDED = """
from protofleet import Device

Device("images", broker="localhost")
"""


@pytest.mark.parametrize(
    "program", [SERVICE, STATUS, SCAN, EMBEDDED], ids=["service", "status", "scan", "embedded"]
)
def test_the_service_loads_no_library_of_its_jobs(program: str, tmp_path: Path) -> None:
    """A service without a task, the status command, a scan and a Python program run without them."""
    write_images(tmp_path / "images", count=5)
    loaded = loaded_modules(program, tmp_path)
    assert {"edge_client", "numpy", "PIL", "onnxruntime"} & loaded == {"edge_client"}
