"""The dashboard by keyboard, for screen readers, on a phone, dark and light."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.coordination.rollout_state import State
from tests.browser.conftest import OpenPage
from tests.browser.large_fleet import HEADS, large_store
from tests.support.messages.submissions import TASK
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


def test_links_lead_to_their_sections_on_a_phone(open_page: OpenPage, client: Client) -> None:
    """At once, although sections above have not been seen; and so does the address with a section's name."""
    section = "document.querySelector('#{}').getBoundingClientRect().top"
    dashboard = open_page(client.origin, **PHONE)
    for name in ("accuracy", "prototypes", "heads", "try-it"):
        dashboard.page.reload()
        dashboard.wait_for_text("#refused", "signature")
        dashboard.page.evaluate(f"document.querySelector('nav [href=\"#{name}\"]').click()")
        dashboard.wait(f"Math.abs({section.format(name)} - 56) < 2")
        dashboard.page.goto("about:blank")
        dashboard.page.goto(f"{client.origin}/#{name}")
        dashboard.wait(f"document.querySelector('#{name}') && Math.abs({section.format(name)} - 56) < 2")


def test_image_with_a_long_name_fits_a_phone(open_page: OpenPage, tmp_path: Path) -> None:
    with contextlib.closing(large_store(tmp_path, 2)) as store, serving(tmp_path) as (client, _):
        store.heads.put_rollout(TASK, State(newest=HEADS, current=HEADS))
        (tmp_path / "head.onnx").write_bytes(f"head {HEADS}".encode())
        (tmp_path / "model.onnx").write_bytes(b"damaged")
        (image := tmp_path / f"{'photo' * 40}.png").touch()
        dashboard = open_page(client.origin, **PHONE)
        dashboard.page.get_by_label("Drop an image here, or choose one").set_input_files(image)
        dashboard.wait_for_text("#try-it .problem", "This image has no answer")
        widths = "() => ['scrollWidth', 'clientWidth'].map((each) => document.querySelector('.drop')[each])"
        assert len(set(dashboard.evaluate(widths))) == 1
        dashboard.server_stops = True


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
