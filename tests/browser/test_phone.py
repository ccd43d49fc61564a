"""The page for phones in Chromium: phones and boxes of one closed fleet, and what can go wrong on a phone."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protocol.storage.keyfile import read_or_make_key
from protocol.wire.signing import public_key
from tests.browser.pages import CHROMIUM, TIMEOUT_MS
from tests.browser.phones import CLASSES, PhonePage, phone, photographs, write_film, write_photographs
from tests.support.fleets.fleet import Fleet, write_task
from tests.support.fleets.joined_fleet import JoinedFleet
from tests.support.network.brokers import free_address, mosquitto, needs_mosquitto

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

pytestmark = needs_mosquitto

SCREENSHOTS = Path(os.environ["PROTOFLEET_SCREENSHOTS"]) if "PROTOFLEET_SCREENSHOTS" in os.environ else None
TAKEN = 10


@pytest.mark.timeout(600)
def test_phones_and_boxes_train_one_head(playwright: "Playwright", tmp_path: Path) -> None:
    """Each phone shows one class only. It recognizes that of another phone, also without a network."""
    with ExitStack() as stack:
        fleet = stack.enter_context(JoinedFleet(tmp_path))
        stack.enter_context(fleet.closed.mosquitto())
        fleet.serve(classes=CLASSES, quorum=5)
        phones = {}
        for name in CLASSES:
            film = write_film(tmp_path / f"{name}.mjpeg", photographs(name, count=30, seed=1))
            browser = stack.enter_context(phone(playwright, film, tmp_path / "https.crt"))
            phones[name] = PhonePage(browser, str(fleet.link(f"phone-{name}")))
        for number in (1, 2):
            fleet.closed.enroll(f"box-{number}")
            images = write_photographs(tmp_path / f"images-{number}", count=20, seed=number + 1)
            fleet.start_device(f"box-{number}", images)
        for name, page in phones.items():
            join(page, name)
        for name, page in phones.items():
            teach(page, name)
        fleet.wait_for("a head of five devices", lambda status: status["heads"])
        for name, page in phones.items():
            page.recognizes(name)
            look(page, f"recognize-{name}", name)
        works_without_a_network(phones["flower"], "flower")
        is_revoked(fleet, phones["digit"])
        leaves(phones["temple"])
        for page in phones.values():
            assert not page.errors
            assert not page.elsewhere


def look(page: PhonePage, screen: str, name: str) -> None:
    """Check a screen's accessibility, and write an image of it for the documentation."""
    assert not page.violations(), screen
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    if SCREENSHOTS and name == "temple":
        page.screenshots(SCREENSHOTS / f"phone-{screen.partition('-')[0]}")


def join(page: PhonePage, name: str) -> None:
    page.wait_for_text("h2", "Join the fleet orchard")
    look(page, "join", name)
    page.join()
    page.wait_for_text("main", "This browser may delete this page's data")


def teach(page: PhonePage, name: str) -> None:
    page.teach(name, TAKEN)
    look(page, "teach", name)
    page.page.get_by_role("button", name="Undo").click()
    page.show("Images")
    page.wait_for_text("h2", name)
    look(page, "images", name)
    page.page.get_by_role("button", name="Select images").click()
    page.page.get_by_role("button", name="All").click()
    page.wait_for_text(".selection", "count no longer for the fleet")
    assert not page.violations()
    page.show("Privacy")
    page.wait_for_text("section", "Everything is uploaded")
    look(page, "privacy", name)


def works_without_a_network(page: PhonePage, name: str) -> None:
    """A service worker has the page, and the store all that the page showed before."""
    page.server_stops = True
    page.show("Teach")
    missing = page.page.locator(".classes button", has_text=name).locator(".missing").inner_text()
    assert "until the next upload" in missing  # all that were there are uploaded
    page.wait("navigator.serviceWorker.controller !== null")
    page.context.set_offline(True)
    page.page.reload()
    page.wait_for_text("header .chip", "offline")
    page.wait_for_text(".classes button", missing)
    page.recognizes(name)
    page.context.set_offline(False)
    page.is_connected()


def is_revoked(fleet: JoinedFleet, page: PhonePage) -> None:
    page.server_stops = True
    fleet.closed.revoke("phone-digit")
    page.wait_for_text("[role=alert]", "has revoked this phone")
    page.recognizes("digit")


def leaves(page: PhonePage) -> None:
    """Nothing is left on the phone, also for the next start of the page."""
    page.show("Privacy")
    page.page.get_by_role("button", name="Leave and delete all").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Leave and delete all").click()
    page.wait_for_text("main", "paste it here")
    page.page.reload()
    page.wait_for_text("main", "paste it here")
    databases = page.evaluate("() => indexedDB.databases()")
    counts = "async () => (await caches.keys()).length"
    assert page.evaluate(counts) <= 1, databases


@pytest.fixture(scope="module")
def open_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, str]]:
    """An open fleet, which phones on this machine may join, and its link."""
    root, address, http = tmp_path_factory.mktemp("open"), free_address(), free_address()
    with mosquitto(address, root), Fleet(root, address) as fleet:
        fleet.start_aggregator(
            write_task(root, classes=CLASSES, quorum=1), "--http", f"127.0.0.1:{http.port}"
        )
        fleet.wait_for("the aggregator", lambda status: status["running"])
        key = public_key(read_or_make_key(root / "aggregator" / "identity" / "signing.key")).hex()
        yield fleet, f"http://127.0.0.1:{http.port}/join/#fleet=default&key={key}"


@pytest.fixture(scope="module")
def camera(playwright: "Playwright", tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Browser]":
    film = tmp_path_factory.mktemp("film") / "film.mjpeg"
    with phone(playwright, write_film(film, photographs("flower", count=30, seed=1))) as browser:
        yield browser


def test_camera_that_is_denied_is_explained(camera: "Browser", open_fleet: tuple[Fleet, str]) -> None:
    page = PhonePage(camera, open_fleet[1], permissions=[])
    page.join()
    page.wait_for_text("[role=alert]", "The camera is not allowed")
    assert page.page.get_by_role("button", name="flower").is_disabled()
    page.close()


def test_link_that_is_not_whole_or_of_another_server(
    camera: "Browser", open_fleet: tuple[Fleet, str]
) -> None:
    address, _, fields = open_fleet[1].partition("#")
    page = PhonePage(camera, address)
    link = page.page.get_by_label("Link")
    link.fill(open_fleet[1][:-1])
    page.page.get_by_role("button", name="Join").click()
    page.wait_for_text("[role=alert]", "This is no whole link")
    link.fill(f"{address.replace('127.0.0.1', 'localhost')}#{fields}")
    page.page.get_by_role("button", name="Continue at localhost").click()
    page.wait_for_text("h2", "Join the fleet default")
    assert page.page.url.startswith("http://localhost:")
    page.page.evaluate("location.hash += '&name=phone-7'")  # another link is opened in the same tab
    page.wait("document.querySelector('input[readonly]')?.value === 'phone-7'")
    page.close()


def test_camera_and_classes_are_visible_together_on_a_phone_on_its_side(
    camera: "Browser", open_fleet: tuple[Fleet, str]
) -> None:
    page = PhonePage(camera, open_fleet[1], viewport={"width": 844, "height": 390})
    page.join()
    page.page.get_by_role("button", name="flower").wait_for()
    bars = page.page.get_by_role("navigation").bounding_box()
    for shown in (page.page.locator("video"), page.page.get_by_role("button", name="flower")):
        box = shown.bounding_box()
        assert box is not None
        assert bars is not None
        assert box["y"] + box["height"] <= bars["y"] + 1
    page.close()


def test_one_tab_is_the_device(camera: "Browser", open_fleet: tuple[Fleet, str]) -> None:
    """The other one waits, and continues when the first one is closed."""
    page = PhonePage(camera, open_fleet[1])
    page.join()
    other = page.context.new_page()
    other.goto(page.page.url)
    other.get_by_text("protofleet is open in another tab").wait_for()
    page.page.close()
    other.get_by_text("connected", exact=True).wait_for()
    page.close()


def test_full_storage_loses_nothing(camera: "Browser", open_fleet: tuple[Fleet, str]) -> None:
    """An image that does not fit is not taken, and the page says so until there is room again."""
    address = open_fleet[1].partition("#")[0]
    page = PhonePage(camera, f"{address}style.css", service_workers="block")
    session = page.context.new_cdp_session(page.page)
    # Before the page stores anything: Chromium asks again for the quota only half a minute later.
    session.send("Storage.overrideQuotaForOrigin", {"origin": page.origin, "quotaSize": 300_000})
    page.page.goto(open_fleet[1])
    page.join()
    page.teach("flower", until="The storage of this browser is full")
    before = images_of(page)
    assert before > 1
    session.send("Storage.overrideQuotaForOrigin", {"origin": page.origin})
    page.show("Teach")
    page.teach("flower", count=before + 1)
    page.page.get_by_text("The storage of this browser is full").wait_for(state="detached")
    page.close()


def images_of(page: PhonePage) -> int:
    """Return the number of images of the only class with any."""
    page.show("Images")
    return int(page.page.locator("main h2").inner_text().rpartition(", ")[2])


def test_files_are_taken_where_the_browser_keeps_them(
    playwright: "Playwright", open_fleet: tuple[Fleet, str], tmp_path: Path
) -> None:
    """In German; all but one are then deleted together."""
    link, images = open_fleet[1], write_photographs(tmp_path / "images", count=4, seed=3)
    profile, program = tmp_path / "profile", shutil.which(CHROMIUM)
    start = partial(playwright.chromium.launch_persistent_context, timeout=TIMEOUT_MS)
    with start(profile, executable_path=program, args=["--no-sandbox"], locale="de-DE") as context:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        grant = {"permissions": ["durableStorage"], "origin": link.partition("/join")[0]}
        context.new_cdp_session(page).send("Browser.grantPermissions", grant)
        page.goto(link)
        page.get_by_role("button", name="Beitreten").click()
        page.get_by_label("Klasse").select_option("temple")
        page.get_by_label("Bilddateien hinzufügen").set_input_files(sorted((images / "temple").iterdir()))
        page.get_by_role("link", name="Bilder").click()
        page.get_by_role("heading", name="temple, 4").wait_for()
        page.get_by_role("button", name="Bilder auswählen").click()
        page.get_by_role("button", name="Bild von temple").first.click()
        page.get_by_role("button", name="Alle").click()
        page.get_by_role("button", name="Bild von temple").first.click()
        page.get_by_role("button", name="3 Bilder löschen").click()
        page.get_by_role("heading", name="temple, 1").wait_for()


def test_page_does_not_wait_for_a_person_who_is_asked_to_keep_the_storage(
    camera: "Browser", open_fleet: tuple[Fleet, str]
) -> None:
    """Firefox asks. The link is used up by then."""
    page = PhonePage(camera, open_fleet[1])
    asks = "StorageManager.prototype.persist = () => new Promise((answer) => (window.keep = answer))"
    page.page.add_init_script(asks)
    page.page.reload()
    page.join()
    page.wait_for_text("main", "This browser may delete this page's data")
    page.page.evaluate("keep(true)")
    page.page.get_by_label("Add image files").wait_for()
    page.close()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("Object.defineProperty(Navigator.prototype, 'storage', { value: undefined })", "Join the fleet"),
        ("IDBObjectStore.prototype.put = () => { throw new DOMException('', 'UnknownError') }", "stores nothing"),
        ("delete globalThis.WebAssembly", "runs no WebAssembly"),
        ("OffscreenCanvasRenderingContext2D.prototype.getImageData = () => new ImageData(16, 16)", "the pixels"),
    ],
)  # fmt: skip
def test_page_in_a_browser_that_lacks_something(
    camera: "Browser", open_fleet: tuple[Fleet, str], script: str, text: str
) -> None:
    page = PhonePage(camera, open_fleet[1])
    page.page.add_init_script(script)
    page.page.reload()
    page.wait_for_text("main", text)
    page.close()


def test_clock_of_another_year_is_explained(camera: "Browser", open_fleet: tuple[Fleet, str]) -> None:
    page = PhonePage(camera, open_fleet[1])
    page.page.clock.set_system_time("2039-01-01")
    page.join()
    page.wait_for_text("[role=alert]", "Check date and time")
    page.close()
