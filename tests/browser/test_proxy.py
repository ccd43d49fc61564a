"""The page for phones behind nginx, as the page on the dashboard configures it."""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protocol.mqtt.tls import BrokerAddress
from tests.browser.phones import PhonePage
from tests.support.fleets.fleet import wait_until
from tests.support.network.brokers import free_address, mosquitto, needs_mosquitto
from tests.support.programs import find_program
from tests.unit.aggregator.http.servers import Client, serving
from tests.unit.aggregator.status.stores import started_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NGINX = find_program("nginx")

pytestmark = [
    needs_mosquitto,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx"),
]

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations" / "dashboard.md"

SERVER = """
daemon off;
error_log {folder}/error.log;
pid {folder}/nginx.pid;
events {{ }}
http {{
    access_log off;
    proxy_max_temp_file_size 0;
    client_body_temp_path {folder};
    proxy_temp_path {folder};
    fastcgi_temp_path {folder};
    uwsgi_temp_path {folder};
    scgi_temp_path {folder};
    server {{
        listen {address};
        {locations}
    }}
}}
"""


def locations(port: int) -> str:
    """Return the documented location, and the one below a path, of a server at this port."""
    found = re.search(r"```nginx\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    location = found[1].replace(":8080", f":{port}")
    return location + location.replace("location /", "location /orchard/").replace(f":{port};", f":{port}/;")


@contextlib.contextmanager
def nginx(folder: Path, upstream: Client) -> Iterator[str]:
    """Run nginx before a server; yields its origin."""
    address = free_address()
    folder.mkdir()
    settings = SERVER.format(folder=folder, address=address, locations=locations(upstream.port))
    (folder / "nginx.conf").write_text(settings)
    command = [str(NGINX), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    proxy = Client(address.port)
    with subprocess.Popen(command) as process:
        try:
            wait_until("nginx", lambda: answers(proxy), diagnostics=(folder / "error.log").read_text)
            yield proxy.origin
        finally:
            process.terminate()


def answers(client: Client) -> bool:
    with contextlib.suppress(OSError):
        return client.get("/healthz").status == 200
    return False


def test_phone_joins_two_fleets_of_one_host(
    browser: "Browser", address: BrokerAddress, tmp_path: Path
) -> None:
    """One is below a path. Each page is a device of its own, with its own storage and service worker."""
    with (
        mosquitto(address, tmp_path),
        contextlib.closing(started_store(tmp_path)),
        serving(tmp_path, brokers=(address,)) as (client, _),
        nginx(tmp_path / "nginx", client) as origin,
    ):
        fields = f"#fleet=barn&key={'0' * 64}"
        first = PhonePage(browser, f"{origin}/join/{fields}&name=phone-1")
        first.join()
        second = first.context.new_page()
        second.goto(f"{origin}/orchard/join{fields}&name=phone-2")
        second.get_by_role("button", name="Join").click()
        second.get_by_text("connected", exact=True).wait_for()
        scopes = "navigator.serviceWorker.ready.then(({ scope }) => scope)"
        assert [page.evaluate(scopes) for page in (first.page, second)] == [
            f"{origin}/join/",
            f"{origin}/orchard/join/",
        ]
        assert second.url == f"{origin}/orchard/join/"
        for page in (first.page, second):
            page.reload()
            page.get_by_text("connected", exact=True).wait_for()
        assert len(first.evaluate("() => caches.keys()")) == 2
        assert not first.errors
        assert not first.elsewhere
        first.close()
