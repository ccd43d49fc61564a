"""A headless Chromium, and the dashboard in it."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from aggregator.http.page_folders import page_folder
from tests.browser.pages import CHROMIUM, TIMEOUT_MS, DashboardPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

OpenPage = Callable[..., DashboardPage]


def _missing() -> str:
    """Return what these tests lack; empty if nothing."""
    if shutil.which(CHROMIUM) is None:
        return "chromium is not installed: apt-get install chromium"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    if page_folder() is None:
        return "the page's libraries are missing: python -m dashboard.vendor"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where the browser or the page is missing."""
    if missing := _missing():
        for item in items:
            if item.nodeid.startswith("tests/browser/"):
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def playwright() -> "Iterator[Playwright]":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser(playwright: "Playwright") -> "Iterator[Browser]":
    """Debian's Chromium. `attacker.example` is this machine, as an attacker's DNS server could answer."""
    browser = playwright.chromium.launch(
        executable_path=shutil.which(CHROMIUM),
        timeout=TIMEOUT_MS,
        args=["--no-sandbox", "--host-resolver-rules=MAP attacker.example 127.0.0.1"],
    )
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[OpenPage]:
    """Open the dashboard at an address; at the end, it must have caused no error and no request elsewhere."""
    opened: list[DashboardPage] = []

    def open_it(origin: str, **options: Any) -> DashboardPage:
        page = DashboardPage(browser, origin, **options)
        opened.append(page)
        return page

    yield open_it
    for page in opened:
        page.close()
    for page in opened:
        assert not page.errors
        assert not page.elsewhere
