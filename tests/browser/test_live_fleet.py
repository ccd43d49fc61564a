"""The dashboard of a real aggregator with real devices: live, across a restart, and with operator commands."""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.http.settings import own_token
from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.browser.conftest import OpenPage
from tests.browser.pages import DashboardPage
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import free_address, mosquitto, mosquitto_program

SCREENSHOTS = os.environ.get("PROTOFLEET_SCREENSHOTS")
"""The folder that screenshots for the documentation are written to, docs/images; by default none are."""

FLEET = ("--fleet", "orchard")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def screenshots(dashboard: DashboardPage) -> None:
    """Write the images of the documentation, if they are wanted: light, and dark on a phone."""
    if SCREENSHOTS is None:
        return
    page, folder = dashboard.page, Path(SCREENSHOTS)
    page.set_viewport_size({"width": 1280, "height": 1500})
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(6000)  # until the prototypes of the newest head are fetched
    page.screenshot(path=folder / "dashboard.png")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(1000)
    page.screenshot(path=folder / "dashboard-phone.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})


def test_dashboard_follows_a_fleet(fleet: Fleet, tmp_path: Path, open_page: OpenPage) -> None:
    """A device joins, a head arrives, the aggregator restarts, and an operator commands: the page is never reloaded."""
    task, http = write_task(tmp_path, fleet="orchard", quorum=2, retrain_after=1), free_address()
    fleet.start_aggregator(task, "--http", str(http))
    fleet.wait_for("the task", bool)
    dashboard = open_page(f"http://{http}")
    page = dashboard.page
    dashboard.wait_for_text("header", "fedtc")
    dashboard.wait_for_text("#heads", "No head is trained yet")
    page.evaluate("window.wasNotReloaded = true")

    for name, share, each in (("shed-1", [0, 1, 2, 3, 4], 60), ("shed-2", [4, 5, 6, 7, 8, 9], 20)):
        data = write_digits(tmp_path / f"data-{name}", classes=share, each=each)
        fleet.start_device(name, data, *FLEET)
        dashboard.wait_for_text("#devices tbody tr", name)
    dashboard.wait_for_text("#devices .state", "online")
    dashboard.wait_for_text("#heads tbody tr", "current")
    dashboard.wait_for_text("#accuracy", "By class")
    dashboard.wait_for_text("#accuracy .u-legend", "Worst 10 % of devices")

    dashboard.wait_for_text("#prototypes .place", "of 2 devices")
    dashboard.wait_for_text(".figure", "Received")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download head.onnx").click()
    assert download.value.path().read_bytes() == (fleet.aggregator_state / "head.onnx").read_bytes()

    dashboard.server_stops = True
    fleet.stop("aggregator")
    dashboard.wait_for_text("header .live", "reconnecting")
    fleet.start_aggregator(task, "--http", str(http))
    dashboard.wait_for_text("header .live", "live")
    fleet.start_device(
        "shed-3", write_digits(tmp_path / "data-shed-3", classes=[2, 3, 6, 8, 9], start=60, each=10), *FLEET
    )
    dashboard.wait_for_text("#devices tbody tr", "shed-3")
    dashboard.wait_for_text("#heads tbody tr", "Roll back to 1")
    dashboard.server_stops = False
    screenshots(dashboard)

    page.get_by_role("button", name="Roll back to 1").click()
    page.get_by_label("Token").fill("not the token of it")
    page.get_by_role("button", name="Roll back", exact=True).click()
    dashboard.wait_for_text("dialog .problem", "wrong token")
    page.get_by_label("Token").fill(own_token(fleet.aggregator_state))
    page.get_by_role("button", name="Roll back", exact=True).click()
    dashboard.wait_for_text(".outcome", "head 1 is current")
    dashboard.wait_for_text("#heads tr", "Roll back to 2")
    assert fleet.status()["rollout"]["current"] == 1

    page.get_by_role("button", name="Enroll a device").click()
    page.get_by_label("Name").fill("shed-4")
    with page.expect_download() as download:
        page.get_by_role("button", name="Enroll and download").click()
    with zipfile.ZipFile(download.value.path()) as archive:
        assert "shed-4/signing.key" in archive.namelist()
    dashboard.wait_for_text("#devices tbody tr", "shed-4")
    assert page.evaluate("window.wasNotReloaded")
    dashboard.errors = [each for each in dashboard.errors if "401" not in each]  # of the wrong token
    dashboard.server_stops = True
