"""The dashboard by keyboard, for screen readers, on a phone, dark and light."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.large_fleet import large_store
from tests.unit.aggregator.http.servers import TOKEN, Client, serving

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("state")
    with contextlib.closing(large_store(folder, 60)), serving(folder) as (client, _):
        yield client


@pytest.mark.parametrize(
    ("scheme", "screen"), [("light", {}), ("dark", PHONE)], ids=["light desktop", "dark phone"]
)
def test_axe_finds_nothing_serious(
    open_page: OpenPage, client: Client, scheme: str, screen: dict[str, object]
) -> None:
    """With a dialog and without; nothing is wider than a phone."""
    dashboard = open_page(client.origin, color_scheme=scheme, **screen)
    dashboard.wait_for_text("#refused", "signature")
    assert not dashboard.violations()
    if screen:
        assert dashboard.page.evaluate("document.documentElement.scrollWidth") == 390
    dashboard.page.get_by_role("button", name="Enroll a device").click()
    dashboard.page.get_by_role("dialog").wait_for()
    assert not dashboard.violations()


def test_keyboard_reaches_commands(open_page: OpenPage, client: Client) -> None:
    """Sort, filter, open a confirmation and leave it without a pointer; the focus returns."""
    page = open_page(client.origin).page
    page.get_by_label("Filter").focus()
    page.keyboard.type("quarantined")
    page.get_by_text("8 devices", exact=True).wait_for()
    page.get_by_role("button", name="Device", exact=True).focus()
    page.keyboard.press("Enter")
    page.locator('th[aria-sort="descending"]').wait_for()
    page.get_by_role("button", name="Release shed-0007").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Release shed-0007 from quarantine?").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.textContent") == "Release shed-0007"


def test_sign_in_page(open_page: OpenPage, tmp_path: Path) -> None:
    """A server that was given a token shows nothing without it."""
    with contextlib.closing(large_store(tmp_path, 2)), serving(tmp_path, token=TOKEN) as (client, _):
        dashboard = open_page(client.origin)
        dashboard.page.get_by_label("Token").fill(TOKEN)
        assert not dashboard.violations()
        dashboard.page.get_by_role("main").get_by_role("button", name="Sign in").click()
        dashboard.wait_for_text("#devices", "2 devices")
        dashboard.server_stops = True
