"""The dashboard and the review page by keyboard, for screen readers, on a phone, dark and light."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.coordination.rollout_state import State
from edge_client.apps.review.server import ReviewServer
from tests.browser.conftest import OpenPage
from tests.browser.large_fleet import HEADS, large_store
from tests.browser.pages import DashboardPage
from tests.support.devices.review_folder import TOKEN as REVIEW_TOKEN
from tests.support.devices.review_folder import ReviewFolder, review_folder, review_page
from tests.support.messages.submissions import TASK
from tests.unit.aggregator.http.servers import TOKEN, Client, serving

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
on_screens = pytest.mark.parametrize(
    ("scheme", "screen"), [("light", {}), ("dark", PHONE)], ids=["light desktop", "dark phone"]
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("state")
    with contextlib.closing(large_store(folder, 60)), serving(folder) as (client, _):
        yield client


@on_screens
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
    for name in ("accuracy", "heads", "try-it"):
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
    dashboard = open_page(client.origin)
    page = dashboard.page
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
    dashboard.wait("document.activeElement.textContent === 'Release shed-0007'")


def test_sign_in_page(open_page: OpenPage, tmp_path: Path) -> None:
    """A server that was given a token shows nothing without it."""
    with contextlib.closing(large_store(tmp_path, 2)), serving(tmp_path, token=TOKEN) as (client, _):
        dashboard = open_page(client.origin)
        dashboard.page.get_by_label("Token").fill(TOKEN)
        assert not dashboard.violations()
        dashboard.page.get_by_role("main").get_by_role("button", name="Sign in").click()
        dashboard.wait_for_text("#devices", "2 devices")
        dashboard.server_stops = True


@pytest.fixture
def where(tmp_path: Path) -> ReviewFolder:
    return review_folder(tmp_path)


@pytest.fixture
def server(where: ReviewFolder) -> Iterator[ReviewServer]:
    with review_page(where) as server:
        yield server


def _open(open_page: OpenPage, server: ReviewServer, **options: object) -> DashboardPage:
    origin = f"http://127.0.0.1:{server.server_port}"
    opened = open_page(f"{origin}/review#{REVIEW_TOKEN}", **options)
    opened.origin = origin
    opened.elsewhere.clear()
    opened.wait("document.getElementById('image').naturalWidth > 0")
    return opened


def _press(opened: DashboardPage, key: str) -> None:
    """Press a key once the image is shown: earlier ones are ignored."""
    opened.wait("document.getElementById('current').ariaBusy === 'false'")
    opened.page.keyboard.press(key)


def test_keys_move_images_and_back(open_page: OpenPage, where: ReviewFolder, server: ReviewServer) -> None:
    """The next image is shown after a move."""
    opened = _open(open_page, server)
    opened.wait_for_text("#caption", "cat/wrong.png · labeled cat · held out · the head finds dog")
    _press(opened, "2")
    opened.wait_for_text("#caption", "dog/same.png")
    assert (where.data / "dog" / "wrong.png").exists()
    opened.page.keyboard.press("ArrowLeft")
    opened.wait_for_text("#caption", "moved to")
    _press(opened, "u")
    opened.wait("!document.getElementById('caption').textContent.includes('moved to')")
    assert (where.data / "cat" / "wrong.png").exists()
    opened.page.get_by_role("button", name="labeled images of no known class: 1").click()
    opened.wait_for_text("#caption", "the head finds unrecognized")
    _press(opened, "0")
    opened.wait_for_text("#caption", "moved to")
    assert (where.unlabeled / "stranger.png").exists()
    opened.page.get_by_role("button", name="unlabeled images to label first: 2").click()
    opened.page.get_by_role("button", name="new.png").click()
    opened.wait_for_text("#caption", "new.png")


def test_held_key_moves_one_image(open_page: OpenPage, where: ReviewFolder, server: ReviewServer) -> None:
    """A key moves an image that is shown; undo shows the image that returned."""
    opened = _open(open_page, server)
    opened.wait("document.getElementById('current').ariaBusy === 'false'")
    opened.page.keyboard.down("2")
    for _ in range(5):
        opened.page.keyboard.down("2")  # as the keyboard repeats it
    opened.page.keyboard.up("2")
    opened.wait_for_text("#caption", "dog/same.png")
    assert [each.name for each in (where.data / "dog").iterdir()].count("wrong.png") == 1
    assert (
        sum(path != each.image.path for path, each in zip(server.paths, server.found.findings, strict=True))
        == 1
    )
    opened.page.get_by_role("button", name="unlabeled images to label first").click()
    _press(opened, "u")
    opened.wait_for_text("#caption", "cat/wrong.png")


def test_kept_image_stays_and_is_remembered(
    open_page: OpenPage, where: ReviewFolder, server: ReviewServer
) -> None:
    opened = _open(open_page, server)
    _press(opened, ".")
    opened.wait_for_text("#caption", "dog/same.png")
    assert [image.relative for image in where.kept] == ["cat/wrong.png"]
    opened.page.keyboard.press("ArrowLeft")
    opened.wait_for_text("#caption", "kept")
    opened.page.get_by_role("button", name="Next →").click()
    opened.wait_for_text("#caption", "dog/same.png")


def test_failed_move_is_reported(open_page: OpenPage, where: ReviewFolder, server: ReviewServer) -> None:
    opened = _open(open_page, server)
    opened.server_stops = True  # the browser logs the answer's status
    (where.data / "cat" / "wrong.png").write_bytes(b"changed")
    opened.page.get_by_role("button", name="dog 2").click()
    opened.wait_for_text("#error", "review the images again")
    opened.errors.clear()


@on_screens
def test_axe_finds_nothing_serious_on_the_review_page(
    open_page: OpenPage, server: ReviewServer, scheme: str, screen: dict[str, object]
) -> None:
    """Nothing is wider than a phone."""
    opened = _open(open_page, server, color_scheme=scheme, **screen)
    assert not opened.violations()
    if screen:
        assert opened.page.evaluate("document.documentElement.scrollWidth") == 390


def test_page_without_the_token_says_where_it_is(open_page: OpenPage, server: ReviewServer) -> None:
    opened = open_page(f"http://127.0.0.1:{server.server_port}/review")
    opened.wait_for_text("#error", "Open the whole address")
    opened.errors.clear()
    opened.elsewhere.clear()
