"""The dashboard in a browser's page, with what it logs and requests."""

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.support.fleets.fleet import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Request

CHROMIUM = "chromium"

TIMEOUT_MS = 60_000.0
"""How long the page may take to show what it must."""


class DashboardPage:
    """An open page; `options` are those of a Playwright context.

    Attributes:
        errors: what the page has logged as an error or warning, or thrown.
        elsewhere: requests to other places than the server.
        uploads: requests that are no reading.
    """

    def __init__(self, browser: "Browser", origin: str, **options: Any) -> None:
        self.browser = browser
        self.origin = origin
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.uploads: list[str] = []
        self.server_stops = False
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", self._log)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(origin)

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

    @contextlib.contextmanager
    def task_times(self) -> Iterator[list[float]]:
        """Yield a list that has, at the end, the processor time (ms) of each task of the page's main thread.

        Processor time, as other programs of this machine may have the processor meanwhile.
        """
        session = self.browser.new_browser_cdp_session()
        events: list[dict[str, Any]] = []
        ended: list[bool] = []
        session.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
        session.on("Tracing.tracingComplete", lambda _: ended.append(True))
        config = {"includedCategories": ["toplevel"]}
        session.send("Tracing.start", {"traceConfig": config, "transferMode": "ReportEvents"})
        times: list[float] = []
        yield times
        session.send("Tracing.end")
        while not ended:
            self.page.wait_for_timeout(50)
        times.extend(_main_thread_tasks(events))

    def evaluate(self, script: str) -> Any:
        """Return the value of a script in the page, through JSON."""
        return json.loads(self.page.evaluate(f"async () => JSON.stringify(await ({script})())"))


def _main_thread_tasks(events: list[dict[str, Any]]) -> list[float]:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name"
    }
    return [
        event["tdur"] / 1000
        for event in events
        if event.get("name") in {"RunTask", "ThreadControllerImpl::RunTask"}
        and "tdur" in event
        and names.get((event["pid"], event["tid"])) == "CrRendererMain"
    ]
