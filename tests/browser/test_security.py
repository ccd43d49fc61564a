"""Pages of other sites, other names of this machine, and injected content against the dashboard in a real browser."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aggregator.storage.store import Store
from tests.browser.conftest import OpenPage
from tests.browser.pages import TIMEOUT_MS
from tests.support.messages.submissions import TASK, device_info
from tests.unit.aggregator.http.servers import Client, serving
from tests.unit.aggregator.status.stores import busy_store, submission_row

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(busy_store(tmp_path)) as store:
        store.keys.pin("a", bytes(32), now_s=1.0)
        yield store


@pytest.fixture
def server(store: Store) -> Iterator[tuple[Client, str]]:
    with serving(store.folder) as running:
        yield running


@pytest.fixture
def other_site() -> Iterator[str]:
    """A page of another origin: http://localhost:PORT."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>attacker</title>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://localhost:{site.server_port}"
        site.shutdown()


ATTACKS = {
    "a form's request": "(origin) => fetch(origin + '/api/v1/commands/revoke', {method: 'POST', mode: 'no-cors', "
    "credentials: 'include', headers: {'Content-Type': 'text/plain'}, body: '{\"device\": \"a\"}'})"
    ".then(() => 'sent', () => 'blocked')",
    "a beacon": "(origin) => navigator.sendBeacon(origin + '/api/v1/commands/revoke', '{\"device\": \"a\"}') "
    "? 'sent' : 'blocked'",
    "a JSON request": "(origin) => fetch(origin + '/api/v1/commands/revoke', {method: 'POST', credentials: 'include', "
    "headers: {'Content-Type': 'application/json'}, body: '{\"device\": \"a\"}'}).then(() => 'sent', () => 'blocked')",
    "reading": "(origin) => fetch(origin + '/api/v1/status', {credentials: 'include'})"
    ".then((response) => response.text(), () => 'blocked')",
    "events": "(origin) => new Promise((done) => { const events = new EventSource(origin + '/api/v1/events', "
    "{withCredentials: true}); events.addEventListener('change', () => done('read')); "
    "events.onerror = () => done('blocked'); })",
    "a WebSocket": "(origin) => new Promise((done) => { const socket = new WebSocket("
    "origin.replace('http', 'ws') + '/join/mqtt?fleet=barn&device=a', 'mqtt'); "
    "socket.onopen = () => done('read'); socket.onerror = () => done('blocked'); })",
    "a frame": "(origin) => new Promise((done) => { const frame = document.createElement('iframe'); "
    "frame.onload = () => { try { done(frame.contentDocument ? 'empty' : 'blocked'); } catch { done('blocked'); } }; "
    "frame.src = origin; document.body.append(frame); })",
}


def test_other_sites_can_neither_command_nor_read(
    browser: "Browser", server: tuple[Client, str], store: Store, other_site: str
) -> None:
    """In a browser that is signed in."""
    client, token = server
    context = browser.new_context()
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    page.goto(client.origin)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label("Token").fill(token)
    page.get_by_role("dialog").get_by_role("button", name="Sign in").click()
    page.get_by_text("signed in").wait_for()
    page.goto(other_site)
    for name, script in ATTACKS.items():
        result = page.evaluate(script, client.origin)
        assert result in {"blocked", "sent"}, name
        assert "a" not in store.keys.revoked(), name
    context.close()


def test_rebound_name_is_refused(browser: "Browser", server: tuple[Client, str]) -> None:
    """DNS rebinding: the attacker's name has become the address of this machine."""
    client, _ = server
    context = browser.new_context()
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    answer = page.goto(f"http://attacker.example:{client.port}/api/v1/status")
    assert answer is not None
    assert answer.status == 421
    context.close()


def test_texts_of_devices_are_no_markup(
    open_page: OpenPage, server: tuple[Client, str], store: Store
) -> None:
    """Whatever a device reports about itself; nor can a script be injected, or another place be reached."""
    info = device_info(problem=MARKUP, warning="<script>alert(1)</script>", images={"cat": 1})
    store.devices.put_info("a", info, now_s=20.0)
    store.submissions.put(TASK, submission_row("a", {0: 6}))
    store.refusals.count("c", reason="digest", detail=MARKUP, now_s=1.0)
    dashboard = open_page(server[0].origin)
    dashboard.wait_for_text("#devices .flag", MARKUP)
    dashboard.wait_for_text("#refused td", MARKUP)
    assert not dashboard.page.locator("img[src=x]").count()
    assert not dashboard.errors
    blocked = dashboard.page.evaluate(
        """async () => {
            const script = document.createElement("script");
            script.textContent = "window.injected = true";
            document.body.append(script);
            const fetched = await fetch("https://attacker.example/").then(() => true, () => false);
            return [window.injected === undefined, fetched];
        }"""
    )
    assert blocked == [True, False]
    dashboard.errors.clear()
    dashboard.elsewhere.clear()
    dashboard.server_stops = True
