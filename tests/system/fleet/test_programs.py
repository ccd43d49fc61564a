"""`edge-client run` with `serve` and `watch`: one service that takes part, answers requests and classifies a folder."""

import http.client
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import amqtt, free_address

DEVICE = "shed"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with amqtt(address := free_address()), Fleet(tmp_path, address) as fleet:
        yield fleet


def _status(address: BrokerAddress) -> int:
    """Return the status of GET /healthz; 0 if nothing listens."""
    try:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=60)
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    except OSError:
        return 0


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _programs(service: int) -> list[psutil.Process]:
    """Return the programs of a service, without its jobs."""
    children = psutil.Process(service).children()
    return [each for each in children if "edge_client.service.programs" in each.cmdline()]


def test_one_service_takes_part_serves_and_watches(fleet: Fleet, tmp_path: Path) -> None:
    """Its programs wait for the first head, and end with the service, also when that is killed."""
    data, camera, http_address = (
        write_digits(tmp_path / "data", classes=[0, 1]),
        tmp_path / "camera",
        free_address(),
    )
    camera.mkdir()
    settings = tmp_path / "device.toml"
    settings.write_text(f'[serve]\nthreads = 1\n[watch]\nfolder = "{camera}"\njson = true\n')
    environment = {"PROTOFLEET_HTTP": f"{http_address.host}:{http_address.port}"}

    def start() -> list[psutil.Process]:
        """Start the service; returns its programs."""
        process = fleet.start(
            *(DEVICE, "edge_client.cli", "run", "--config", settings, "--broker", str(fleet.broker)),
            *("--data", data, "--state", fleet.device_state(DEVICE), "--device-id", DEVICE),
            environment=environment,
        )
        fleet.wait_until("an answer of serve", lambda: _status(http_address))
        fleet.wait_until("both programs", lambda: len(_programs(process.pid)) == 2)
        return _programs(process.pid)

    programs = start()
    assert _status(http_address) == 503
    fleet.start_aggregator(write_task(tmp_path, quorum=1))
    fleet.wait_until("a head that serve uses", lambda: _status(http_address) == 200)
    shutil.copy(next((data / "0").iterdir()), camera / "new.png")
    fleet.wait_until("an answer of watch", lambda: f'"image": "{camera}/new.png"' in fleet.log(DEVICE))
    fleet.stop(DEVICE)
    assert all(map(_is_gone, programs))
    assert "program ended" not in fleet.log(DEVICE)
    programs = start()
    fleet.kill(DEVICE, with_jobs=False)
    fleet.wait_until("the end of the programs", lambda: all(map(_is_gone, programs)))
