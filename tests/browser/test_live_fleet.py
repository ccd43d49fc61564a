"""The dashboard of a real aggregator with real devices: live, across a restart, and with operator commands."""

import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_client.cli import cli as edge_client
from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.browser.conftest import OpenPage
from tests.browser.pages import DashboardPage
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import free_address, mosquitto
from tests.unit.aggregator.http.servers import own_token

SCREENSHOTS = os.environ.get("PROTOFLEET_SCREENSHOTS")
"""The folder that screenshots for the documentation are written to, docs/images; by default none are."""

FLEET = ("--fleet", "orchard")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def screenshots(dashboard: DashboardPage) -> None:
    """Write the images of the documentation, if they are wanted: light, and dark on a phone."""
    if SCREENSHOTS is None:
        return
    page, folder = dashboard.page, Path(SCREENSHOTS)
    page.set_viewport_size({"width": 1280, "height": 1500})
    page.evaluate("window.scrollTo(0, 0)")
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
    dashboard.wait_for_text("header", "fedtc")
    dashboard.wait_for_text("#heads", "No head is trained yet")
    dashboard.page.evaluate("window.wasNotReloaded = true")
    first_head_arrives(fleet, dashboard)
    files_are_downloaded(fleet, dashboard)
    model_answers_in_the_browser(fleet, dashboard)
    aggregator_restarts(fleet, dashboard, lambda: fleet.start_aggregator(task, "--http", str(http)))
    screenshots(dashboard)
    operator_rolls_back(fleet, dashboard)
    operator_enrolls(dashboard)
    operator_adds_a_box(fleet, dashboard)
    assert dashboard.page.evaluate("window.wasNotReloaded")
    dashboard.server_stops = True


def start_device(fleet: Fleet, name: str, classes: list[int], *, start: int = 0, each: int) -> None:
    data = write_digits(fleet.root / f"data-{name}", classes=classes, start=start, each=each)
    fleet.start_device(name, data, *FLEET)


def first_head_arrives(fleet: Fleet, dashboard: DashboardPage) -> None:
    for name, classes, each in (("shed-1", [0, 1, 2, 3, 4], 60), ("shed-2", [4, 5, 6, 7, 8, 9], 20)):
        start_device(fleet, name, classes, each=each)
        dashboard.wait_for_text("#devices tbody tr", name)
    dashboard.wait_for_text("#devices .state", "online")
    dashboard.wait_for_text("#heads tbody tr", "head 1, calibrated on 84 held-out images")
    dashboard.wait_for_text("#accuracy .u-legend", "Worst 10 % of devices")
    fleet.wait_for("the files of head 2", lambda s: s["rollout"]["current"] == 2 and s["head_path"])


def files_are_downloaded(fleet: Fleet, dashboard: DashboardPage) -> None:
    with dashboard.page.expect_download() as download:
        dashboard.page.get_by_role("link", name="Download head.onnx").click()
    assert download.value.path().read_bytes() == (fleet.aggregator_state / "head.onnx").read_bytes()


def model_answers_in_the_browser(fleet: Fleet, dashboard: DashboardPage) -> None:
    """The calibrated head does, as on the device, whose images have the backbone's size; nothing is uploaded."""
    image = next((fleet.root / "data-shed-1" / "3").glob("*.png"))
    dashboard.page.get_by_label("Drop an image here, or choose one").set_input_files(image)
    dashboard.wait_for_text("#try-it [role=status]", "by head 2")
    lines = [line.split("\n") for line in dashboard.page.locator("#try-it .bars li").all_inner_texts()]
    shown = {line[0]: float(line[-1].rstrip(" %")) for line in lines}
    fleet.wait_for("the head on its device", lambda status: status["devices"][0]["head"] == 2)
    expected = fleet.predict("shed-1", image)["scores"]
    assert next(iter(shown)) == next(iter(expected))
    for name in expected.keys() & shown.keys():
        assert shown[name] == pytest.approx(100 * expected[name], abs=2.0)
    assert not dashboard.uploads


def aggregator_restarts(fleet: Fleet, dashboard: DashboardPage, start: Callable[[], object]) -> None:
    dashboard.server_stops = True
    fleet.stop("aggregator")
    dashboard.wait_for_text("header .live", "reconnecting")
    start()
    dashboard.wait_for_text("header .live", "live")
    dashboard.server_stops = False
    start_device(fleet, "shed-3", [2, 3, 6, 8, 9], start=60, each=10)
    dashboard.wait_for_text("#devices tbody tr", "shed-3")
    dashboard.wait_for_text("#heads tbody tr", "Roll back to 2")


def operator_rolls_back(fleet: Fleet, dashboard: DashboardPage) -> None:
    page = dashboard.page
    page.get_by_role("button", name="Roll back to 1").click()
    page.get_by_label("Token").fill("not the token of it")
    page.get_by_role("button", name="Roll back", exact=True).click()
    dashboard.wait_for_text("dialog .problem", "wrong token")
    dashboard.errors = [each for each in dashboard.errors if "401" not in each]
    page.get_by_label("Token").fill(own_token(fleet.aggregator_state))
    page.get_by_role("button", name="Roll back", exact=True).click()
    dashboard.wait_for_text(".outcome", "head 1 is current")
    dashboard.wait_for_text("#heads tr", "Roll back to 2")
    assert fleet.status()["rollout"]["current"] == 1


def operator_enrolls(dashboard: DashboardPage) -> None:
    page = dashboard.page
    page.get_by_role("button", name="Enroll a device").click()
    dashboard.wait_for_text("dialog", "closes the fleet")
    page.get_by_label("Name").fill("shed-4")
    with page.expect_download() as download:
        page.get_by_role("button", name="Enroll and download").click()
    with zipfile.ZipFile(download.value.path()) as archive:
        assert "shed-4/signing.key" in archive.namelist()
    dashboard.wait_for_text("#devices tbody tr", "shed-4")


def operator_adds_a_box(fleet: Fleet, dashboard: DashboardPage) -> None:
    """By a link, which the box uses; the phone's camera reads the same one."""
    page = dashboard.page
    page.get_by_role("button", name="Add a device").click()
    assert "closes the fleet" not in page.get_by_role("dialog").inner_text()
    page.get_by_label("Name").fill("shed-5")
    page.get_by_label("Broker").fill("broker.example")
    page.get_by_role("button", name="Make the link").click()
    link = page.get_by_label("Link", exact=True).input_value()
    assert link.startswith(f"{dashboard.origin}/join/#fleet=orchard&key=")
    dashboard.wait("document.querySelector('[alt=\"QR code of the link\"]').naturalWidth > 100")
    assert not dashboard.violations()
    done = CliRunner().invoke(edge_client, ["join", link, "--out", str(fleet.root / "joined")])
    assert "enrolled shed-5" in done.output
    if SCREENSHOTS is not None:
        page.screenshot(path=Path(SCREENSHOTS) / "join-link.png")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    dashboard.wait_for_text("#devices tbody tr", "shed-5")
