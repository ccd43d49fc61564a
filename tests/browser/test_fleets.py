"""The page of `aggregator dashboard`: several fleets, each in a line."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from aggregator.config.schema import Limits
from tests.browser.conftest import OpenPage
from tests.support.fleets.fleet import wait_until
from tests.support.network.brokers import free_address
from tests.unit.aggregator.http.servers import TOKEN, Client, serving
from tests.unit.aggregator.status.stores import TASK_FILE, busy_store, started_store


@contextlib.contextmanager
def _dashboard(file: Path, *options: str) -> Iterator[str]:
    """Run `aggregator dashboard`; yields its address."""
    origin = f"http://{(address := free_address())}"
    program = (sys.executable, "-m", "aggregator.cli", "dashboard")
    command = [*program, str(file), "--http", str(address), *options]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_until(
            "an answer of the dashboard",
            lambda: _answers(address.port),
            diagnostics=lambda: "see its log on stderr",
        )
        yield origin
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return Client(port).get("/healthz").status == 200
    return False


def test_fleets_are_shown_with_their_quotas_and_problems(open_page: OpenPage, tmp_path: Path) -> None:
    """And followed: a fleet that stops, and one that does not answer, do not change what is shown of another."""
    file = tmp_path / "fleets.toml"
    orchard = replace(TASK_FILE, fleet="orchard", limits=Limits(max_devices=2, max_storage_mb=8))
    with (
        contextlib.closing(busy_store(tmp_path / "barn")),
        contextlib.closing(started_store(tmp_path / "orchard", orchard)) as store,
        serving(tmp_path / "barn") as (barn, _),
        serving(tmp_path / "orchard") as (other, _),
    ):
        silent = f"http://{free_address()}"
        urls = {"barn": barn.origin, "orchard": other.origin, "vineyard": silent}
        file.write_text("".join(f'[fleets.{name}]\nurl = "{url}"\n' for name, url in urls.items()))
        with _dashboard(file) as origin:
            dashboard = open_page(origin)
            dashboard.wait_for_text("#fleets-title", "3 fleets")
            dashboard.wait_for_text("#fleet-barn", "1 of ")
            dashboard.wait_for_text("#fleet-barn", "90.0 %")
            dashboard.wait_for_text("#fleet-orchard", "0 of 2 devices")
            dashboard.wait_for_text("#fleet-vineyard", "does not answer")
            link = dashboard.page.get_by_role("link", name="barn")
            assert link.get_attribute("href") == barn.origin
            assert not dashboard.violations()
            for device in "ab":
                store.keys.pin(device, bytes(32), now_s=1.0)
            dashboard.wait_for_text("#fleet-orchard .warn", "quota nearly used up")
            store.close()
            dashboard.wait_for_text("#fleet-orchard .state", "stopped")
            dashboard.wait_for_text("#fleet-barn .state", "running")
            dashboard.server_stops = True


def test_page_asks_for_the_token(open_page: OpenPage, tmp_path: Path) -> None:
    """A wrong one is said to be wrong; the right one shows the fleets, also after the page is loaded again."""
    (token := tmp_path / "token").write_text(f"{TOKEN}\n")
    (file := tmp_path / "fleets.toml").write_text(f'[fleets.a]\nurl = "http://{free_address()}"\n')
    with _dashboard(file, "--http-token-file", str(token)) as origin:
        dashboard = open_page(origin)
        dashboard.server_stops = True  # a refused request is an error of the console as well
        for given in ("wrong", TOKEN):
            dashboard.page.get_by_label("Token").fill(given)
            dashboard.page.get_by_role("button", name="Sign in").click()
            if given == "wrong":
                dashboard.wait_for_text(".problem", "Wrong token")
        dashboard.wait_for_text("#fleet-a", "does not answer")
        dashboard.page.reload()
        dashboard.wait_for_text("#fleet-a", "does not answer")
        dashboard.errors[:] = [each for each in dashboard.errors if "401" not in each]
