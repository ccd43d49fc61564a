"""The dashboard of a thousand devices draws a bounded part of them; `python -m tests.browser.large_fleet` times it."""

import contextlib
import random
from pathlib import Path

from tests.browser.conftest import OpenPage
from tests.browser.large_fleet import add_device, large_store, operate
from tests.unit.aggregator.http.servers import serving

MAX_ELEMENTS = 5_000
"""Of the page; with a row of each device there would be some 20,000."""


def test_page_does_not_grow_with_the_fleet(open_page: OpenPage, tmp_path: Path) -> None:
    """While a device joins, and while the operator sorts, filters, scrolls and turns the page."""
    with contextlib.closing(large_store(tmp_path, 1000)) as store, serving(tmp_path) as (client, _):
        dashboard = open_page(client.origin)
        dashboard.wait_for_text("#devices", "1,000 devices")
        add_device(store, "new", random.Random(1))
        dashboard.wait_for_text("#devices", "1,001 devices")
        operate(dashboard.page)
        dashboard.page.get_by_label("Filter").fill("")
        dashboard.wait_for_text("#devices", "1,001 devices")
        assert dashboard.page.locator("*").count() < MAX_ELEMENTS
        dashboard.server_stops = True
