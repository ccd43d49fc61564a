"""The dashboard of a thousand devices stays responsive."""

import contextlib
import random
from pathlib import Path

from tests.browser.conftest import OpenPage
from tests.browser.large_fleet import add_device, large_store
from tests.unit.aggregator.http.servers import serving

LONG_TASK_MS = 50.0


def test_a_thousand_devices_cause_no_long_task(open_page: OpenPage, tmp_path: Path) -> None:
    """While devices join, and while the operator sorts, filters, scrolls and turns the page."""
    chance = random.Random(1)
    with contextlib.closing(large_store(tmp_path, 1000)) as store, serving(tmp_path) as (client, _):
        dashboard = open_page(client.origin)
        page = dashboard.page
        dashboard.wait_for_text("#devices", "1,000 devices")
        with dashboard.task_times() as times:
            for number in range(3):
                add_device(store, f"new-{number}", chance)
                dashboard.wait_for_text("#devices", f"1,00{number + 1} devices")
            page.get_by_role("button", name="Accuracy").click()
            page.get_by_role("button", name="Next").click()
            page.get_by_label("Filter").fill("shed-09")
            dashboard.wait_for_text("#devices", "100 devices")
            page.get_by_label("Show").select_option("prototypes")
            for _ in range(10):
                page.mouse.wheel(0, 400)
            page.wait_for_timeout(200)
        assert len(times) > 100
        assert max(times) < LONG_TASK_MS
        dashboard.server_stops = True
