"""The dashboard in a browser's page, with what it logs and requests."""

import json
from typing import TYPE_CHECKING, Any

from tests.support.fleets.fleet import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Request

CHROMIUM = "chromium"

TIMEOUT_MS = 180_000.0
"""How long Chromium may take to start, and a page to show what it must."""


class DashboardPage:
    """An open page, at a path of a server; `options` are those of a Playwright context.

    Attributes:
        errors: what the page has logged as an error or warning, or thrown.
        elsewhere: requests to other places than the server.
        uploads: requests that are no reading.
    """

    def __init__(self, browser: "Browser", origin: str, path: str = "", **options: Any) -> None:
        self.browser = browser
        self.origin = origin
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.uploads: list[str] = []
        self.server_stops = False
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(TIMEOUT_MS)
        self.page = self.context.new_page()
        self.page.on("console", self._log)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(origin + path)

    def close(self) -> None:
        self.context.close()

    def _log(self, message: "ConsoleMessage") -> None:
        is_connection = "net::ERR_" in message.text and self.server_stops
        if message.type in {"error", "warning"} and not is_connection:
            self.errors.append(f"{message.text} {message.location}")

    def _request(self, request: "Request") -> None:
        if request.method != "GET":
            self.uploads.append(request.url)
        if not request.url.startswith((f"{self.origin}/", "blob:", "data:")):
            self.elsewhere.append(request.url)

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression holds in the page."""
        # Not page.wait_for_function, which the page's content security policy refuses.
        wait_until(condition, lambda: bool(self.page.evaluate(condition)), diagnostics=lambda: self.page.url)

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until an element has a text."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def violations(self) -> list[str]:
        """Return what axe finds that is serious or critical."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {node['html']}: {node['failureSummary']}"
            for each in found
            if each["impact"] in {"serious", "critical"}
            for node in each["nodes"]
        ]

    def evaluate(self, script: str) -> Any:
        """Return the value of a script in the page, through JSON."""
        return json.loads(self.page.evaluate(f"async () => JSON.stringify(await ({script})())"))
