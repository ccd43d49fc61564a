"""What tests of several packages share: an address, and real brokers of both kinds."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from protocol.mqtt.session import BrokerAddress
from tests.support.brokers import amqtt, free_address, mosquitto, mosquitto_program

# Read by OpenMP when torch is first imported: threads that spin slow everybody else on the machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

LONGEST = ("tests/system/faults/", "tests/system/attacks/", "tests/system/fleet/", "tests/examples/")
"""Whole fleets: with several processes of pytest, they begin with these, so that none is left alone with one."""

Serve = Callable[[BrokerAddress], AbstractContextManager[None]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what takes longest first."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture
def address() -> BrokerAddress:
    """An address on which no broker listens yet."""
    return free_address()


@pytest.fixture(params=["amqtt", "mosquitto"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    """Start a broker at an address, for as long as the context lasts; once for each kind of broker."""
    if request.param == "amqtt":
        return amqtt
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    return lambda address: mosquitto(address, tmp_path)


@pytest.fixture
def broker(serve: Serve, address: BrokerAddress) -> Iterator[BrokerAddress]:
    """A broker that runs."""
    with serve(address):
        yield address
